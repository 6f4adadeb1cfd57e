"""What somebody meant who mistyped a key or a choice, or used another project's name for it."""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import yaml

from grpo_lightning.config.redaction import single_line
from grpo_lightning.config.shell import command_name, format_override, shell_quote

_UNKNOWN = re.compile(r"Could not override '([^']*)'")
_NO_CHOICE = re.compile(r"Could not (?:find|load) '([^']*)'")
_NOT_THERE = re.compile(r"Could not delete from config\. '([^']*)'")
_THERE_ALREADY = re.compile(r"An item is already at '([^']*)'")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '([^']*)'")
_CHOSEN_ALREADY = re.compile(r"Multiple values for (\w+)\.")
_NOT_PARSED = re.compile(r"(?:Error parsing override '|LexerNoViableAltException: )(.*?)'?$", re.MULTILINE)
_OWN_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+", re.ASCII)
_LEFT_OUT = re.compile(r"hydra\.cc|^\s*(To|Either|Or|Did you mean) ")
"""Of what Hydra says: an address, and offers that are worse than those made here."""
_OPEN = re.compile(r"You must specify '(.*?)', e\.g,.*Available options:(.*)", re.DOTALL)
_FULL_KEY = re.compile(r"full_key: (\S+)")
_INHERITED = re.compile(r"^defaults: \[([\w, ]*)\]", re.MULTILINE)
_LINE = re.compile(r"^(\s*)([\w@/]+):(.*)$")
_NOT_BY_ITSELF = {"base", "taught"}
"""Files of conf/ that others inherit from."""
_OF_HYDRA = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job.name",
    "hydra.verbose",
)
_OF_GROUP = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}
_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "optuna": "hydra-optuna-sweeper",
}
"""Choices of Hydra's that plug-ins bring -> the package to install."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that is most like another one; None if none is much like it."""
    found = get_close_matches(word, list(known), 5, cutoff)
    return next((one for one in found if sorted(one) == sorted(word)), found[0] if found else None)


def nearest_key(key: str, known: Collection[str]) -> str | None:
    """The known dotted key that somebody may have meant: one beside it, else one elsewhere with such a last part."""
    above, _, last = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == above}
    if found := nearest(last, beside):
        return beside[found]
    lasts = {one.rpartition(".")[2]: one for one in sorted(known, key=lambda one: (-one.count("."), one))}
    if found := nearest(last, lasts, cutoff=0.75):
        return lasts[found]
    return nearest(key, known, cutoff=0.85)


def group_choices(conf: Path, group: str) -> list[str]:
    """The names of the files of a group that may be chosen."""
    return sorted(path.stem for path in (conf / group).glob("*.yaml") if path.stem not in _NOT_BY_ITSELF)


def explain_compose_error(error: Exception, conf: Path, keys: Collection[str] = (), words: Sequence[str] = ()) -> str:
    """One sentence for what Hydra says of overrides that it cannot apply: key, value, and what may have been meant.

    Args:
        error: Raised by composing settings: of Hydra or of OmegaConf.
        conf: The directory of the settings' files, whose folders are the groups.
        keys: Dotted keys of the settings; where there are none, those that the files hold are taken.
        words: The user's overrides.
    """
    text = str(error)
    said = {word.partition("=")[0].lstrip("+~"): word for word in words}
    if match := _NO_CHOICE.search(text):
        return single_line(_no_choice(match[1].strip(), conf, words))
    for form, answer in (
        (_UNKNOWN, lambda key: _unknown(error, said[key], conf, keys or known_keys(conf))),
        (_NOT_THERE, lambda key: _not_there(key, keys or known_keys(conf))),
        (_THERE_ALREADY, lambda key: f"+{key}: it is there already; allowed is {key}=VALUE, without the plus sign"),
        (_CHOSEN_ALREADY, lambda key: f"+{key}: one is chosen already; allowed is {key}=NAME, without the plus sign"),
    ):
        if (match := form.search(text)) and match[1] in said:
            return single_line(answer(match[1]))
    for form, answer in ((_AMBIGUOUS, _ambiguous), (_NOT_PARSED, _not_parsed)):
        if (match := form.search(text)) and match[1].strip() in words:
            return single_line(answer(match[1].strip()))
    if match := _OPEN.search(text):
        options = [name for name in match[2].split() if name not in _NOT_BY_ITSELF] or ["none"]
        named, *names = (match[1], *options)
        return f"{named}: a file leaves this choice open; allowed is one of {', '.join(names)}, on the command line"
    if place := _FULL_KEY.search(text):
        is_missing = type(error).__name__ == "MissingMandatoryValue"
        missing = f"a value is missing; allowed is {place[1]}=VALUE"
        return single_line(f"{place[1]}: {missing if is_missing else text.splitlines()[0]}")
    if type(error).__name__ == "OverrideParseException" and (word := getattr(error, "override", None)) in words:
        return single_line(_not_parsed(str(word)))
    cause = str(error.__cause__ or "").splitlines()
    lines = [line.strip() for line in [*text.splitlines(), *cause[:1]] if line.strip() and not _LEFT_OUT.search(line)]
    return single_line("; ".join(lines))


def translate_key(key: str, value: str | None = None) -> str | None:
    """What a setting of TRL, verl or many others is called here, as the end of a sentence; None if it is none.

    Args:
        key: As a user wrote it, with or without verl's ``actor_rollout_ref``.
        value: What it was set to; None: not known.
    """
    same, similar = aliases().values()
    last = key.rpartition(".")[2]
    foreign = [last] if same.get(last, "").rpartition(".")[2] != last else []  # rollout.top_p is a word of both
    for name in (key, key.removeprefix("actor_rollout_ref."), *foreign):
        if ours := same.get(name):
            word = ours if value is None else shell_quote(f"{ours}={value}")
            return f"allowed here is {word}, as this project calls it"
        if ours := similar.get(name):
            return f"allowed here is {ours}"
    return None


@cache
def aliases() -> dict[str, dict[str, str]]:
    """``same`` and ``similar`` of aliases.yaml: what others call a setting -> what it is called here."""
    found: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_text("utf-8"))
    return found


def unknown_key(key: str, value: str | None, keys: Collection[str]) -> str | None:
    """What is to be said of a key that is none of the known ones; None if it is like none of them."""
    said = f"{key}={value}" if value is not None else key
    if ours := translate_key(key, value):
        return f"{said}: {ours}"
    if meant := nearest_key(key, keys):
        return f"{said}: unknown; the nearest is {meant if value is None else shell_quote(f'{meant}={value}')}"
    return None


def unknown_option(option: str, following: str | None, keys: Collection[str]) -> str:
    """What is said of an option that is none of Hydra's, such as ``--lr 1e-5``: settings have no dashes here.

    Args:
        option: With its dashes, as typed.
        following: The word after it, which may be its value.
        keys: Dotted keys of the settings.
    """
    typed_name, sign, value = option.lstrip("-").partition("=")
    name = typed_name.replace("-", "_")
    if not sign:
        is_value = following is not None and not following.startswith("--") and "=" not in following
        value = str(following) if is_value else "VALUE"
    if name in keys:
        return single_line(f"{option}: allowed is {shell_quote(f'{name}={value}')}, without dashes")
    said = unknown_key(name, value, keys)
    return single_line(
        f"{option}: {said or f'allowed is KEY=VALUE, without dashes; {command_name()} --help lists the keys'}"
    )


def _unknown(error: Exception, word: str, conf: Path, keys: Collection[str]) -> str:
    said = word.lstrip("+~")
    key, sign, given = said.partition("=")
    value = given if sign else None
    absent = _FULL_KEY.search(str(error.__cause__))  # the first part of the key that is not there
    part, _, name = absent[1].rpartition(".") if absent else ("", "", "")
    if part == "reward" and name in group_choices(conf, "reward"):
        return f"{said}: the reward {name} is not chosen; allowed is reward=[…,{name}] with it"
    groups = [path.name for path in conf.iterdir() if path.is_dir()]
    if not set("./") & set(key) and not translate_key(key) and (group := nearest(key, groups, cutoff=0.7)):
        return (
            f"{said}: unknown; the nearest is {shell_quote(f'{group}={value}') if value else f'{group}=NAME'}, a part"
        )
    if having := _having(key, conf):
        return f"{said}: allowed with {' or '.join(having)}, which is not chosen"
    return unknown_key(key, value, [*keys, *_OF_HYDRA]) or (
        f"{said}: unknown; allowed are the keys that `{command_name()} --cfg job` prints, and "
        f"{shell_quote(f'+{said}')} for a new one"
    )


def _having(key: str, conf: Path) -> list[str]:
    """The choices of a key's part that have such a setting, as ``PART=NAME``; without those for objects of programs."""
    part = key.split(".")[0]
    names = [name for name in group_choices(conf, part) if name != "live"]
    return [f"{part}={name}" for name in names if key in _inherited(conf / part / f"{name}.yaml")]


def _inherited(path: Path) -> frozenset[str]:
    """The dotted keys that a file has, those of others of its folder that it inherits from included."""
    listed = _INHERITED.search(path.read_text(encoding="utf-8"))
    names = [one.strip() for one in listed[1].split(",")] if listed else []
    above = [path.with_name(f"{name}.yaml") for name in names]
    return frozenset(_keys_of(path)).union(*(_inherited(one) for one in above if one.exists() and one != path))


def _not_there(key: str, keys: Collection[str]) -> str:
    meant = nearest_key(key, keys)
    return f"~{key}: there is no such setting{f'; the nearest is ~{meant}' if meant else ''}"


def _ambiguous(override: str) -> str:
    key, _, value = override.partition("=")
    together = shell_quote(f"{key}=[{value}]")
    return f"{override}: allowed is {together} for several together, or -m for one run of each"


def _no_choice(path: str, conf: Path, words: Sequence[str] = ()) -> str:
    group, _, name = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    if group.startswith("hydra/"):
        if name in _PLUGINS:
            return f"{group}={name}: a plug-in that is not installed: pip install {_PLUGINS[name]}"
        known = ["basic", *_OF_GROUP.get(group, ())]
        meant = nearest(name, known)
        return f"{group}={name}: allowed is one of {', '.join(known)}{f'; the nearest is {meant}' if meant else ''}"
    known = group_choices(conf, group)
    listed = f"reward=[…,{name}]" if group == "reward" else f"{group}={name}"
    if group == "policy" and "/" in name and f"policy={name}" in words:  # else a file may have chosen it
        word = format_override("policy.path", name)
        return f"{listed}: allowed is policy=hf {word} for a model of the hub or of a directory"
    if group == "data" and f"data={name}" in words:
        kind = "jsonl" if name.endswith((".jsonl", ".parquet")) else "hub"
        if kind == "jsonl" or "/" in name or "." in name:
            word = format_override("data.path", name)
            return f"{listed}: allowed is data={kind} {word} for a data set of your own or the hub's"
    if (
        group == "reward"
        and _OWN_FUNCTION.fullmatch(name)
        and any(name in re.split(r"[=\[\],]", word) for word in words)
    ):
        word = format_override("reward.custom.function._target_", name)
        return f"{listed}: allowed is custom in place of it, with {word}, for a function of your own"
    meant = nearest(name, known)
    return f"{listed}: allowed is one of {', '.join(known)}{f'; the nearest is {meant}' if meant else ''}"


def _not_parsed(override: str) -> str:
    key, _, value = override.partition("=")
    if not value:
        return f"{override}: allowed is KEY=VALUE{', without dashes' if override.startswith('-') else ''}"
    if override.startswith("--"):
        return f"{override}: allowed is {shell_quote(override.lstrip('-'))}, without dashes"
    quoted = shell_quote(f'{key}="…"')
    return (
        f"{override}: allowed with spaces, commas, brackets, quotes or = in a value are quotes around it, and others "
        f"for the shell: {quoted}"
    )


@cache
def known_keys(conf: Path) -> frozenset[str]:
    """The dotted keys that the settings' files have, whichever of them are chosen."""
    found: set[str] = set()
    for path in conf.rglob("*.yaml"):
        found |= _keys_of(path, is_part=path.parent != conf)
    return frozenset(found)


def _keys_of(path: Path, *, is_part: bool = True) -> set[str]:
    """The dotted keys that one file has."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    package = [path.parent.name] if is_part and "@package _global_" not in text else []
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match or line.lstrip().startswith(("#", "-")):
            continue
        indent, name, rest = len(match[1]), match[2], match[3].split(" #")[0].strip()
        above = [(deep, one) for deep, one in above if deep < indent]
        key = ".".join([*package, *(one for _, one in above), name])
        is_setting = not name.startswith("_") and not key.startswith("hydra") and "defaults" not in key.split(".")
        if is_setting and rest:
            found.add(key)
        above.append((indent, name))
    return found
