"""Data: text prompts and the columns rewards read, in an order that is a function of the seed and the step."""

from grpo_lightning.data.prompt_data import PromptData
from grpo_lightning.data.source import Fits, Generated, Row, Source, Subset, hold_out, keep

__all__ = ["Fits", "Generated", "PromptData", "Row", "Source", "Subset", "hold_out", "keep"]
