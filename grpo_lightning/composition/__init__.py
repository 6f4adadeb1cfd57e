"""From overrides and live objects to a run: the only part that knows Hydra, which is loaded when it is first used."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lightning.composition.command import main
    from grpo_lightning.composition.overrides import compose, part

__all__ = ["CONF", "compose", "main", "part"]

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
"""The settings' files: inside the package where it is installed, beside it in a checkout."""
_HOME = {"compose": "overrides", "main": "command", "part": "overrides"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
