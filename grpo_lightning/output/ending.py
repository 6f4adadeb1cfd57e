"""What a run says at its end: the outcome, what it leaves behind, and how to go on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.config.shell import shell_quote
from grpo_lightning.output.terminal import WIDTH, brief

_LABELS = {"reward/total": "reward", "loss/total": "loss"}


def label(name: str) -> str:
    """What a metric is called on a line: ``pass@1`` for ``val/pass@1``, ``accuracy`` for ``reward/accuracy``."""
    name = name.removeprefix("val/")
    return _LABELS.get(name) or name.removeprefix("reward/")


def folded(start: str, parts: Sequence[str]) -> list[str]:
    """``parts`` behind ``start`` on one line, or where that does not fit on one line each."""
    line = start + " · ".join(parts)
    return [line] if len(line) <= WIDTH else [start.rstrip(), *(f"  {part}" for part in parts)]


def outcome(summary: Mapping[str, Any], metric: str) -> str:
    """One line with a metric's first, last and best value, and the seconds.

    Args:
        summary: As in ``summary.json``.
        metric: The one that tells how the run went; where it has no values, the loss does.
    """
    values = summary["values"]
    name = next((name for name in (metric, "val/pass@1", "reward/total", "loss/total") if name in values), None)
    parts = []
    if name is not None:
        course = values[name]
        one, many = brief(course["last"], 3), f"{brief(course['first'], 3)} → {brief(course['last'], 3)}"
        is_one = course.get("first_step", 0) == course.get("last_step", 1)
        parts.append(f"{label(name)} {one if is_one else many}")
        if "best" in course and not is_one:
            parts[-1] += f" (best {brief(course['best'], 3)} at {course['best_step']})"
    return " · ".join([*parts, f"{summary['seconds']:.0f} s"])


def closing(
    summary: Mapping[str, Any], config: Mapping[str, Any], directory: Path, command: str, *, is_job: bool = False
) -> list[str]:
    """The lines that end a run.

    Args:
        summary: As in ``summary.json``.
        config: The run's settings.
        directory: The run's directory.
        command: The one that continues the run.
        is_job: Whether it is one of a sweep, which ends with one line.
    """
    if config["mode"] in ("export", "preflight"):
        return []
    if config["mode"] == "validate":
        metrics = {name: value for name, value in summary["metrics"].items() if name.startswith("val/")}
        told = [f"{label(name)} {brief(value, 3)}" for name, value in metrics.items()]
        return folded("validated: ", [*told, f"{summary['seconds']:.0f} s"])
    lines = [outcome(summary, config["sweep_metric"])]
    if is_job:
        return lines
    if (directory / "export").is_dir():
        lines += _pointed("exported to", str(directory / "export"))
    if (directory / "tensorboard").is_dir():
        lines += _pointed("look at it with:", f"tensorboard --logdir {shell_quote(str(directory))}")
    if (directory / "checkpoints" / "last.ckpt").exists():
        lines += _pointed("continue with:", command)
    return lines


def _pointed(what: str, where: str) -> list[str]:
    """One line, or where that does not fit two: what is to be copied is never cut."""
    line = f"{what} {where}"
    return [line] if len(line) <= WIDTH else [what, f"  {where}"]
