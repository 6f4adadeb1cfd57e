"""Where the settings' files are."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
"""The settings' files: inside the package where it is installed, beside it in a checkout."""
