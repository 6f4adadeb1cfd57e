"""``summary.json``, how a run ended, and other files for programs."""

import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_lightning.config.redaction import single_line
from grpo_lightning.output.files import replace

log = logging.getLogger(__name__)


def now() -> str:
    """The time, as in 2026-01-31T23:59:59+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(directory: Path, summary: Mapping[str, Any], *, mode: str = "fit") -> None:
    """Write ``summary.json``; a later validation or export of a directory does not overwrite that of its training.

    A preflight, which is no run yet, has ``summary_preflight.json`` in any case.

    Args:
        directory: The run's.
        summary: What there is to say: "metrics", "values" (of each metric over the run, as `module.values` sums them
            up), "steps", "seconds", "started", "choices" (group of conf/ -> name or names), "overrides", "status" and
            "error".
        mode: What the run did.
    """
    path = directory / "summary.json"
    if mode == "preflight" or (mode != "fit" and path.exists()):
        path = directory / f"summary_{mode}.json"
    write_json(path, summary)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file for programs by a new one, or leave it as it is and warn."""
    try:
        replace(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:  # a full disk: not a second error that would hide the first
        log.warning("%s cannot be written: %s", path, error.strerror)


def sweep_value(metrics: Mapping[str, float], config: Mapping[str, Any]) -> float:
    """``metrics[sweep_metric]``, or the smallest float there is where it was not measured."""
    name = config["sweep_metric"]
    value = metrics.get(name, math.nan)
    if math.isfinite(value):
        return value
    if config["mode"] in ("fit", "validate"):
        log.warning("sweep_metric=%s was not measured; there are %s", name, single_line(", ".join(metrics)))
    return -sys.float_info.max
