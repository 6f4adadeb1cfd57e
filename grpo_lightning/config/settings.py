"""Nested settings: reading and walking them, writing them as overrides, and suggestions for mistyped keys."""

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.console import single_line

_PLAIN = re.compile(r"[\w/.:+@%-]+", re.ASCII)
_UNKNOWN = re.compile(r"Could not override '([^']*)'")
_NO_CHOICE = re.compile(r"Could not (?:find|load) '([^']*)'")
_FULL_KEY = re.compile(r"full_key: (\S+)")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+", re.ASCII)
_INHERITED_ONLY = {"base", "taught"}
"""Files of conf/ that others inherit from, which are no choices."""
_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name", "hydra.verbose")


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


def normalize_overrides(words: Sequence[str], conf: Path) -> list[str]:
    """Overrides as Hydra reads them: logger=false is none, policy.adapter.KEY may be new, other letters are quoted."""

    def normal(word: str) -> str:
        key, sign, value = word.partition("=")
        if value in ("null", "false") and (conf / key).is_dir() and key not in ("experiment", "sweep", "debug"):
            return f"{key}=none" if (conf / key / "none.yaml").exists() else f'{key}="{value}"'  # which is explained
        key = f"++{key}" if key.startswith("policy.adapter.") else key  # which is null
        is_text = sign and not value.isascii() and value[0] not in "'\"[{" and not {"$", ","} & {*value}
        return f"{key}{sign}{quote_value(value) if is_text else value}"

    return [normal(word) for word in words]


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that is most like another one; None if none is much like it."""
    matches = get_close_matches(word, list(known), 5, cutoff)
    return next((match for match in matches if sorted(match) == sorted(word)), matches[0] if matches else None)


def nearest_key(key: str, known: Collection[str]) -> str | None:
    """The known dotted key that was probably meant: one beside it, else one elsewhere with such a last part."""
    above, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == above}
    if match := nearest(last, beside):
        return beside[match]
    order = sorted(known, key=lambda name: (not name.startswith("validation."), -name.count("."), name))
    elsewhere = {name.rpartition(".")[2]: name for name in order}  # the last one of a name stays
    match = nearest(last, elsewhere, cutoff=0.75)
    return elsewhere[match] if match else nearest(key, known, cutoff=0.85)


@cache
def aliases() -> dict[str, dict[str, str]]:
    """``same``, ``similar`` and ``python`` of aliases.yaml: another project's name of a setting -> its name here."""
    page: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_text("utf-8"))
    return page


def translate_key(key: str, value: str | None = None) -> str | None:
    """What a setting of TRL, verl and others is called here, as the end of a sentence; None if it is none."""
    same, similar, _ = aliases().values()
    last = key.rpartition(".")[2]
    foreign = [last] if same.get(last) != key else []  # rollout.top_p is a word of both
    for name in (key, key.removeprefix("actor_rollout_ref."), *foreign):
        if ours := same.get(name):
            return f"is called {ours if value is None else shlex.quote(f'{ours}={value}')} here"
        if ours := similar.get(name):
            return f"use {ours}"
    return None


def unknown_key(key: str, value: str | None, keys: Collection[str]) -> str | None:
    """What to say of an unknown key, with the known one that was meant; None if no known one is like it."""
    override = f"{key}={value}" if value is not None else key
    if ours := translate_key(key, value):
        return f"{override}: {ours}"
    if meant := nearest_key(key, keys):
        return f"{override}: unknown; the nearest is {meant if value is None else shlex.quote(f'{meant}={value}')}"
    return None


def compose_problems(
    error: Exception, conf: Path, words: Sequence[str], compose: Callable[[list[str]], object]
) -> list[str]:
    """What is wrong with overrides that cannot be composed, all unknown keys and choices at once.

    Args:
        error: Hydra's, about the first of them.
        conf: Whose folders are the groups.
        words: The overrides.
        compose: Composes overrides; raises such an error again.
    """
    left, problems = list(words), [explain_compose_error(error, conf, words)]
    while wrong := _word_of(error, left):
        left.remove(wrong)
        try:
            compose(left)
            break
        except Exception as another:
            error = another
            problems.append(explain_compose_error(error, conf, left))
    return list(dict.fromkeys(problems))


def _word_of(error: Exception, words: Sequence[str]) -> str | None:
    """The override that an error of Hydra is about."""
    text = str(error)
    match = _UNKNOWN.search(text) or _NO_CHOICE.search(text)
    key = match[1].strip().partition("/")[0] if match else ""
    return next((word for word in words if key and word.partition("=")[0] == key), None)


def explain_compose_error(error: Exception, conf: Path, words: Sequence[str] = ()) -> str:
    """One sentence for an error of Hydra about the overrides ``words``; the folders of ``conf`` are the groups."""
    text = str(error)
    typed = {word.partition("=")[0].lstrip("+~"): word.lstrip("+~") for word in words}
    if (match := _NO_CHOICE.search(text)) and not match[1].startswith("hydra/"):
        return single_line(_no_choice(match[1].strip(), conf, words))
    if (match := _UNKNOWN.search(text)) and match[1] in typed:
        return single_line(_unknown(typed[match[1]], conf, words))
    if match := _FULL_KEY.search(text):
        is_missing = type(error).__name__ == "MissingMandatoryValue"
        problem = f"has no value; set {match[1]}=VALUE" if is_missing else text.splitlines()[0]
        return single_line(f"{match[1]}: {problem}")
    if word := getattr(error, "override", ""):  # Hydra cannot parse it
        key, _, value = word.partition("=")
        quoted = format_override(key, [t.strip(" '\"") for t in value[1:-1].split(",")] if value[:1] == "[" else value)
        return single_line(f"{word}: such a text needs quotes inside those of the shell: {quoted}")
    lines = [*text.splitlines(), *str(error.__cause__ or "").splitlines()[:1]]
    return single_line("; ".join(line.strip() for line in lines if line.strip() and "hydra.cc" not in line))


def _unknown(override: str, conf: Path, words: Sequence[str]) -> str:
    key, sign, value = override.partition("=")
    groups = [path.name for path in conf.iterdir() if path.is_dir()]
    if not set("./") & set(key) and not translate_key(key) and (group := nearest(key, groups, cutoff=0.7)):
        choice = shlex.quote(f"{group}={value}") if value else f"{group}=NAME"
        return f"{override}: unknown; the nearest is {choice}, a part"
    part, (above, _, last) = key.partition(".")[0], key.rpartition(".")
    keys = {name: _keys_of(conf / part / f"{name}.yaml") for name in _choices(conf, part)}
    having, chosen = [name for name in keys if key in keys[name]], [name for name in keys if f"{part}={name}" in words]
    if (chosen or not having) and any(above in keys[name] for name in chosen or keys):
        return f"{override}: unknown; {shlex.quote(f'+{override}')} adds a key to {above}"
    if having:
        return f"{override}: needs {' or '.join(f'{part}={name}' for name in having)}"
    beside = [name.rpartition(".")[2] for name in known_keys(conf) if name.startswith(f"{part}.")]
    takes_more = part in ("trainer", "optimizer") or above.endswith(".function")
    if takes_more and not (translate_key(key) or nearest(last, beside)):
        return f"{override}: unknown; {shlex.quote(f'+{override}')} adds an argument of {above}._target_"
    return unknown_key(key, value if sign else None, [*known_keys(conf), *_HYDRA_KEYS]) or (
        f"{override}: unknown; `{command_name()} --cfg job` prints the keys"
    )


def _no_choice(path: str, conf: Path, words: Sequence[str]) -> str:
    group, _, name = path.partition("/")
    known = _choices(conf, group)
    choice = f"reward=[…,{name}]" if group == "reward" else f"{group}={name}"
    if group == "policy" and "/" in name and choice in words:  # otherwise a file may have chosen it
        return f"{choice}: use policy=hf {format_override('policy.path', name)} for a model of the hub or a directory"
    if path == "validation/null":
        return f"{choice}: use validation.every=1000000 data.validation_size=1 for next to no validation"
    if group == "data" and choice in words and ("/" in name or "." in name):
        kind = "jsonl" if re.search(r"\.(jsonl?|ndjson|csv|tsv|parquet|gz)$", name) else "hub"
        if kind == "hub" and _FUNCTION.fullmatch(name):
            return f"{choice}: use data=custom {format_override('data.train._target_', name)} for rows of your own code"
        return f"{choice}: use data={kind} {format_override('data.path', name)} for a data set of your own or the hub's"
    if group == "reward" and _FUNCTION.fullmatch(name):
        function = format_override("reward.custom.function._target_", name)
        return f"{choice}: use reward=[…,custom] {function} for a function of your own"
    meant = nearest(name, known)
    return f"{choice}: choose one of {', '.join(known)}{f'; the nearest is {meant}' if meant else ''}"


def _choices(conf: Path, group: str) -> list[str]:
    """The names of the files of a group that may be chosen."""
    return sorted(path.stem for path in (conf / group).glob("*.yaml") if path.stem not in _INHERITED_ONLY)


@cache
def known_keys(conf: Path) -> frozenset[str]:
    """The dotted keys in all files of settings, whichever of them are chosen."""
    return frozenset[str]().union(*map(_keys_of, conf.rglob("*.yaml")))


@cache
def _keys_of(path: Path) -> frozenset[str]:
    """The dotted keys in one file of settings, and in those of its folder that it inherits from."""
    text = path.read_text("utf-8")
    page: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    inherited = [path.parent / f"{name}.yaml" for name in page.pop("defaults", ()) if isinstance(name, str)]
    is_global = (path.parent / "train.yaml").exists() or "@package _global_" in text
    nodes = walk(page, "" if is_global else path.parent.name)
    keys = {key for key, value in nodes if not (isinstance(value, dict) and value)}
    own = {key for key in keys if not re.search(r"(^|\.)(_|\d|hydra\.)", key)}
    return frozenset(own).union(*(_keys_of(file) for file in inherited if file.exists() and file != path))
