"""From overrides and live objects to a run: the only part that knows Hydra."""

from grpo_lightning.composition.overrides import CONF, compose, main, part

__all__ = ["CONF", "compose", "main", "part"]
