"""From overrides and live objects to a run: the only part that knows Hydra, which is loaded when it is first used."""

from typing import TYPE_CHECKING, Any

from grpo_lightning.distributed.alone.grpo_lightning_path import leave_here

if TYPE_CHECKING:
    from grpo_lightning.composition.command import main
    from grpo_lightning.composition.conf import CONF
    from grpo_lightning.composition.overrides import compose, part

__all__ = ["CONF", "compose", "main", "part"]

_HOME = {"CONF": "conf", "compose": "overrides", "main": "command", "part": "overrides"}


def __getattr__(name: str) -> Any:
    if name == "main":  # before anything is imported for it, which could lie where only a slip has put it
        leave_here()
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
