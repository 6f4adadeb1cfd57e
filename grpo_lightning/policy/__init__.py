"""Language models with their tokenizers."""

from grpo_lightning.policy.base import Policy

__all__ = ["Policy"]
