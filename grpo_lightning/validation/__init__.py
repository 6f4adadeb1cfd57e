"""Validation on held-out prompts and its metrics."""

from grpo_lightning.validation.validation import Validation

__all__ = ["Validation"]
