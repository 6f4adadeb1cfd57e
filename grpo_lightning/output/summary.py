"""``summary.json``: how a run ended, for programs."""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write(directory: Path, summary: Mapping[str, Any], *, mode: str = "fit") -> None:
    """Write ``summary.json``; a later validation or export of a directory does not overwrite that of its training.

    Args:
        directory: The run's.
        summary: What there is to say: "metrics", "steps", "seconds", "overrides", "status" and "error".
        mode: What the run did.
    """
    path = directory / "summary.json"
    if mode != "fit" and path.exists():
        path = directory / f"summary_{mode}.json"
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        staged.replace(path)
    except OSError as error:  # a full disk: not a second error that would hide the first
        log.warning("%s cannot be written: %s", path, error.strerror)
        with suppress(OSError):
            staged.unlink(missing_ok=True)
