"""The runs below a directory: what each was asked for, and how it ended."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.checkpoint import lock

SWEEP_FILE = "sweep.json"
"""In a sweep's directory: which jobs it has, and the command that makes them."""


class ReportError(ValueError):
    """There is nothing to report; the message is one sentence."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell of it."""

    directory: Path
    """Of a missing job, that of its sweep."""
    overrides: tuple[str, ...]
    status: str
    """finished, stopped (by a callback), failed, interrupted, preempted, running, killed (gone without a word) or
    missing (of a sweep's jobs)."""
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings as composed, from ``.hydra/config.yaml``; empty where that cannot be read."""
        return _yaml(self.directory / ".hydra" / "config.yaml") or {}

    @cached_property
    def findings(self) -> list[str]:
        """What the doctor has found in it, from ``health.json``: each rule with its step, metric and value."""
        known = _json(self.directory / "health.json").get("findings", ())
        return [f"{one['rule']} at step {one['step']} ({one['metric']} {one['value']:.3g})" for one in known]


def find_runs(*directories: Path | str) -> list[RunRecord]:
    """All runs at or below some directories, and the jobs that sweeps there have not begun.

    Raises:
        ReportError: A directory is none, or there are no runs.
    """
    places = [Path(directory) for directory in directories]
    for place in places:
        if not place.is_dir():
            raise ReportError(f"{place}: {'no directory' if place.exists() else 'there is no such directory'}")
    summaries = {path.parent for place in places for path in place.rglob("summary.json")}
    begun = {path.parent.parent for place in places for path in place.rglob(".hydra/overrides.yaml")}
    records = [read_run(directory) for directory in sorted(summaries | begun)]
    sweeps = sorted({path.parent for place in places for path in place.rglob(SWEEP_FILE)})
    for sweep in sweeps:
        records += _missing(sweep, [record for record in records if sweep in record.directory.parents])
    if not records:
        raise ReportError(f"{', '.join(map(str, places))}: no summary.json at or below it, so no run")
    return records


def read_run(directory: Path) -> RunRecord:
    """The run in a directory."""
    summary = _json(directory / "summary.json")
    words = tuple(summary.get("overrides") or _yaml(directory / ".hydra" / "overrides.yaml") or ())
    if lock.is_held(directory):
        return RunRecord(directory, words, "running", "a process trains in it", summary)
    if not summary:
        reason = "it has begun, no process trains in it, and it has no summary.json that can be read"
        return RunRecord(directory, words, "killed", reason)
    reason = " ".join(str(summary.get("error") or "").split())
    return RunRecord(directory, words, str(summary.get("status")), f"“{reason}”" if reason else "", summary)


def _missing(sweep: Path, records: Sequence[RunRecord]) -> list[RunRecord]:
    """The jobs of a sweep of which there is no trace."""
    there = Counter(tuple(sorted(record.overrides)) for record in records)
    absent = []
    for job in _json(sweep / SWEEP_FILE).get("jobs") or ():
        words = tuple(sorted(job))
        if there[words] > 0:
            there[words] -= 1
        else:
            absent.append(RunRecord(sweep, tuple(job), "missing", "a job of the sweep that has not begun"))
    return absent


def _json(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is not there or cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return None
