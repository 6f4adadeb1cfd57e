"""A look ahead: what a run would do with its own policy, rewards and settings, before a step of it is made."""

from grpo_lightning.preflight.conduct import conduct
from grpo_lightning.preflight.needs import announce_memory

__all__ = ["announce_memory", "conduct"]
