"""Collect rollouts: prompts -> samples -> rewards -> advantages. Runs without a Trainer."""

from grpo_lightning.rollout.collector import Collector

__all__ = ["Collector"]
