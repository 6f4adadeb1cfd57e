"""What tells the runs of a sweep apart."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from grpo_lightning.config.shell import shell_quote
from grpo_lightning.report.records import ReportError, RunRecord

_NOT_SWEPT = ("seed", "checkpoint", "run_dir", "tags", "task_name")
UNSET = "(default)"
"""Stands for a value that nobody has given and no file tells."""


def given(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> value of overrides such as ``+trainer.max_time=1``; of a removed one (``~key``) "removed"."""
    found = {}
    for word in overrides:
        key, sign, value = word.partition("=")
        if word.startswith("~"):
            found[key[1:]] = "removed"
        elif sign:
            found[key.lstrip("+")] = value.strip("'\"") if value[:1] == value[-1:] else value
    return found


def value_of(run: RunRecord, key: str) -> str | None:
    """What a setting was in a run: as overridden, or else as chosen or composed; None if nothing tells."""
    if (value := given(run.overrides).get(key)) is not None:
        return value
    choices = run.summary.get("choices")
    if isinstance(choices, Mapping) and choices.get(key) is not None:
        return str(choices[key])
    node: Any = run.settings
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if node is None or isinstance(node, Mapping) or "${" in str(node):
        return None
    return str(node).lower() if isinstance(node, bool) else str(node)


def seed_of(run: RunRecord) -> str:
    """The seed of a run, 0 unless it says otherwise."""
    return value_of(run, "seed") or "0"


def swept(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose overrides differ between the runs, in the order in which they are given; seeds are none."""
    each = [given(run.overrides) for run in runs]
    keys = list(dict.fromkeys(key for words in each for key in words if key not in _NOT_SWEPT))
    differing = [key for key in keys if len({words.get(key) for words in each}) > 1]
    # absent in some, and there what the others say
    return [key for key in differing if len({value_of(run, key) for run in runs}) > 1]


def checked(keys: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """The keys that a user names.

    Raises:
        ReportError: No run has one of them.
    """
    for key in keys:
        if all(value_of(run, key) is None for run in runs):
            known = sorted({name for run in runs for name in [*given(run.overrides), *run.settings]})
            raise ReportError(f"--by={key}: no run has this setting{suggestion(key, known)}")
    return list(keys)


def suggestion(word: str, known: Sequence[str]) -> str:
    """The known word that is nearest, as the end of a sentence."""
    found = get_close_matches(word, known, 1, 0.5)
    return f"; the nearest is {shell_quote(found[0])}" if found else ""


def order(value: str) -> tuple[int, float, str]:
    """By which values are sorted: numbers by size, before texts."""
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)
