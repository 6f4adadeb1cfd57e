"""Collect rollouts: prompts -> samples -> rewards -> advantages. Runs without a Trainer."""

from grpo_lightning.rollout.collector import Collected, Collector, max_variance, mixed

__all__ = ["Collected", "Collector", "max_variance", "mixed"]
