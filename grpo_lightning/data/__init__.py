"""Data: text prompts and the columns rewards read, in an order that is a function of the seed and the step."""

from grpo_lightning.data.datamodule import PromptData, Row, Source, check_readable, completion_limits, origin

__all__ = ["PromptData", "Row", "Source", "check_readable", "completion_limits", "origin"]
