"""By which name a service knows a run, kept in the run's directory, so that a continued run is the same run there."""

import re
from pathlib import Path

from grpo_lightning.output.files import replace

STORE = "sqlite:///mlflow.db"
"""Where MLflow logs runs that say nothing else, as in conf/logger/mlflow.yaml; relative to the working directory."""
_NAME = re.compile(r"[\w-]{1,128}")


def known(file: Path) -> str | None:
    """The name that `keep` has written; None if there is none, or something else: it would be sent to the service."""
    try:
        found = "" if file.is_symlink() else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return found if _NAME.fullmatch(found) else None


def keep(file: Path, name: str) -> None:
    """Write a name down."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, f"{name}\n")
