"""A look ahead: what a run would do with its own policy, rewards and settings, before a step of it is made."""

from grpo_lightning.preflight.conduct import announce_memory, conduct

__all__ = ["announce_memory", "conduct"]
