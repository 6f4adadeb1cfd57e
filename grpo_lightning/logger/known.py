"""By which name a service knows a run, kept in the run's directory, so that a continued run is the same run there."""

from pathlib import Path


def known(file: Path) -> str | None:
    """The name that `keep` has written; None if there is none."""
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def keep(file: Path, name: str) -> None:
    """Write a name down."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{name}\n", encoding="utf-8")
