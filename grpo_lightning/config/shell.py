"""Commands as users type them: overrides in quotes for Hydra and the shell."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[\w/.:+@%-]+", re.ASCII)


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
