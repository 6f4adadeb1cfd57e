"""A language model's opinion as a reward, asked of an OpenAI-compatible endpoint."""

from grpo_lightning.reward.judge.chat import ChatJudge

__all__ = ["ChatJudge"]
