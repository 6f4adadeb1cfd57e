"""Nested settings: reading and walking them, and writing them as the words of a command."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[\w/.:+@%-]+", re.ASCII)


def value_at(config: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key, or ``default`` where there is none; items of lists are numbered from 0."""
    for name in key.split("."):
        if isinstance(config, list) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        elif isinstance(config, Mapping) and name in config:
            config = config[name]
        else:
            return default
    return config


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every node of nested settings, or of those at the key ``prefix``, parents first: pairs of dotted key and value.

    A part of a run that others contain, as ``module.loss`` is ``${loss}``, is visited once, where it stands by itself.
    """
    yield from _walk(config, prefix, {} if prefix else config)


def _walk(node: Any, prefix: str, parts: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, value in pairs:
        if not prefix or not _is_copy(value, parts.get(name)):
            key = f"{prefix}.{name}" if prefix else str(name)
            yield key, value
            yield from _walk(value, key, parts)


def _is_copy(value: Any, part: Any) -> bool:
    """Whether a value is a whole part, or the list of a part's values; compared as text, since nan differs from nan."""
    if not isinstance(part, Mapping) or not isinstance(value, Mapping | list):
        return False
    return repr(value) == repr(part if isinstance(value, Mapping) else list(part.values()))


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value of nested settings with its dotted key; see `walk`."""
    return ((key, value) for key, value in walk(config, prefix) if not isinstance(value, Mapping | list | tuple))


def each_target(config: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping with a ``_target_`` in nested settings with its dotted key; see `walk`."""
    pairs = [(prefix, config), *walk(config, prefix)] if prefix else walk(config)
    return ((key, value) for key, value in pairs if isinstance(value, Mapping) and "_target_" in value)


def format_override(key: str, value: Any) -> str:
    """A setting as users type it: ``'reward=[exact,format]'``."""
    if isinstance(value, list | tuple):
        return shlex.quote(f"{key}=[{','.join(quote_value(str(item)) for item in value)}]")
    return shlex.quote(f"{key}={quote_value(str(value))}")


def command_name() -> str:
    """How the command line is started, such as ``python train.py``."""
    return " ".join(map(shlex.quote, command_words()))


def command_words() -> list[str]:
    """The words that start the command line, such as ``python train.py`` or ``grpo-lightning``."""
    script = Path(sys.argv[0])
    if script.name in ("train.py", "grpo-lightning"):
        return ["python", sys.argv[0]] if script.suffix else [script.name]
    checkout = Path(__file__).resolve().parents[2] / "train.py"
    return ["python", str(checkout)] if checkout.is_file() else ["grpo-lightning"]


def config_path_words() -> list[str]:
    """The words by which the command line says where settings are found, such as ``--config-dir conf``."""
    words_of_paths = []
    for number, word in enumerate(words := sys.argv[1:]):
        if word.startswith(("--config-", "-cd", "-cn", "-cp")):
            words_of_paths += words[number : number + (1 if "=" in word else 2)]
        elif word.lstrip("+").startswith("hydra.searchpath="):
            words_of_paths.append(word)
    return words_of_paths


def quote_value(value: str) -> str:
    r"""``value`` in quotes where Hydra would read something else than this text; ``${`` becomes ``\${``."""
    value = value.replace("${", r"\${")
    if _PLAIN.fullmatch(value):
        return value
    if not {*'"\\'} & {*value}:
        return f'"{value}"'
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)  # backslashes count before a quote only
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"
