"""Prompts -> samples -> rewards -> advantages. Runs without a Trainer."""

from grpo_lightning.rollout.collector import Collector
from grpo_lightning.rollout.recorded import Recorded

__all__ = ["Collector", "Recorded"]
