"""A sweep as a whole: which jobs it has, which of them are done already, and the table at its end.

The same ``-m`` command with the same ``hydra.sweep.dir`` continues a sweep: finished jobs are left alone, begun ones go
on from their checkpoints, and the rest runs.
"""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo_lightning.config.settings import format_override
from grpo_lightning.console import print_line, redact, redact_overrides, single_line, write_atomic, write_summary

if TYPE_CHECKING:
    from grpo_lightning.report import RunRecord

_MAY_CHANGE = ("steps=", "checkpoint=", "tags=", "task_name=")
"""Overrides of a job that another start of it may have otherwise."""
_SUBDIR = "${hydra.job.override_dirname}"
_MAX_NAME = 200
"""Characters of an override that may become a part of the name of a directory."""

_started: list[tuple[Path, str]] = []
"""Directory and metric of the sweep of this process."""


class SweepRecorder(Callback):
    """Hydra callback that writes, when a sweep begins, which jobs it has."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        from grpo_lightning.report import SWEEP_FILE

        if config.mode != "fit":
            return
        directory = Path(config.hydra.sweep.dir)
        _started.append((directory, str(config.sweep_metric)))
        name_by_differences(config)
        page = {"command": shlex.join(redact_overrides(sys.argv)), "jobs": job_overrides(config)}
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / SWEEP_FILE, json.dumps(page, indent=2) + "\n")


def name_by_differences(config: DictConfig) -> None:
    """Name the directories of jobs by what differs between them, or by numbers where a value makes no name."""
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides(words)
    swept = [override for override in parsed if override.is_sweep_override()]
    common = {override.key_or_group for override in parsed} - {override.key_or_group for override in swept}
    excluded = sorted({*config.hydra.job.config.override_dirname.exclude_keys, *common})
    subdir = OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"]  # type: ignore[call-overload,index]
    words = [str(override.input_line) for override in swept]
    differs = words or config.hydra.get("sweeper", {}).get("params")
    makes_name = differs and all("/" not in word and len(word) <= _MAX_NAME for word in words)
    with open_dict(config):
        config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(excluded)}]")
        if subdir == _SUBDIR and not (makes_name and redact_overrides(words) == words):
            config.hydra.overrides.hydra.append("hydra.sweep.subdir=${hydra.job.num}")


def job_overrides(config: DictConfig) -> list[list[str]] | None:
    """The overrides of every job of a sweep; None of a search, which chooses them as it goes."""
    sweeper: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    if sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
        return None
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # ${oc.env:…} stays
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    try:
        parsed = OverridesParser.create().parse_overrides([*params, *words])
        [batch] = BasicSweeper.split_arguments(parsed, None)
    except (HydraException, ValueError):
        return None  # such as glob(*), of which only Hydra knows the choices
    return [redact_overrides(filter_overrides(job)) for job in batch]


def objective_problems(overrides: Sequence[str], metric: str) -> Iterator[str]:
    """What a sweep may not vary if it goes by ``metric``: totals of other rewards or weights are no better or worse."""
    for override in OverridesParser.create().parse_overrides([*overrides]) if metric.endswith("reward/total") else ():
        key = override.key_or_group
        if override.is_sweep_override() and (
            key == "reward" or re.match(r"reward\.[^.]+\.(weight|clip|function)", key)
        ):
            yield f"{override.input_line}: {metric} changes with it; use sweep_metric=val/pass@1 or reward/NAME"


def find_job(directory: Path, overrides: Sequence[str]) -> "RunRecord | None":
    """What an earlier start of a sweep has left of a job in its directory; None if nothing.

    Raises:
        ValueError: The directory holds a job of other settings.
    """
    from grpo_lightning.report import read_run

    if not any((directory / name).exists() for name in (".hydra/overrides.yaml", "summary.json")):
        return None

    def fixed(words: Sequence[str]) -> list[str]:
        return sorted(word for word in words if not word.lstrip("+").startswith(_MAY_CHANGE))

    record = read_run(directory)
    if fixed(record.overrides) != fixed(redact_overrides(overrides)):
        raise ValueError(
            f"{directory} holds another job ({single_line(' '.join(record.overrides))}): continue the sweep that it "
            "is of, or choose another hydra.sweep.dir="
        )
    return record


def is_finished(record: "RunRecord", steps: int) -> bool:
    """Whether a job has made its ``steps``, or a callback has ended it."""
    made = record.summary.get("steps")
    return record.status == "stopped" or (record.status == "finished" and isinstance(made, int) and made >= steps)


def skip(record: "RunRecord", metric: str) -> float:
    """Leave a finished job alone; returns its ``metric``, which the sweep maximizes, or the smallest float there is."""
    print_line(f"{record.directory}: finished already, nothing to do")
    value = record.summary.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else -sys.float_info.max


def write_failure(directory: Path, overrides: Sequence[str], error: str) -> None:
    """Write ``summary.json`` of a job that failed before its run began; files of a run are not replaced."""
    if not any((directory / name).exists() for name in ("summary.json", ".hydra", ".lock")):
        facts = {"metrics": {}, "steps": 0, "seconds": 0.0, "overrides": redact_overrides(overrides)}
        write_summary(directory, {**facts, "status": "failed", "error": error})


def print_table(status: int) -> int:
    """Print the table of the sweep that this process has made, if any; returns 1 for status 0 if a job has failed."""
    if not _started or os.environ.get("LOCAL_RANK", "0") != "0":
        return status
    from grpo_lightning.report import find_runs
    from grpo_lightning.report.table import sweep_table

    directory, metric = _started.pop()
    page = directory / "multirun.yaml"
    if page.exists():  # Hydra's, with secrets
        write_atomic(page, redact(page.read_text(encoding="utf-8")))
    failed = False
    try:
        runs = find_runs(directory)
        failed = any(run.status == "failed" for run in runs)
        print(sweep_table(runs, metric), end="")
    except ValueError as error:
        print_line(str(error))
    print_line(f"this table again: python -m grpo_lightning.report {shlex.quote(str(directory))}")
    if status or failed:
        print_line(f"to continue the sweep: the same command with {format_override('hydra.sweep.dir', directory)}")
    return status or int(failed)
