"""Data: text prompts and the columns rewards read, in an order that is a function of the seed and the step."""

from grpo_lightning.data.datamodule import PromptData, check_prompts
from grpo_lightning.data.sources import Row, Source, Subset, hold_out, keep

__all__ = ["PromptData", "Row", "Source", "Subset", "check_prompts", "hold_out", "keep"]
