"""Prompts that a program has in memory: rows, or a data set."""

from typing import Any

from grpo_lightning.data import PromptData
from grpo_lightning.data.jsonl import Inline

FEW = 5
"""From how many rows on some are held out; fewer all serve for both, as a fifth of them would be none."""


def prompts(*, train: Any, validation: Any, **settings: Any) -> PromptData:
    """The data of a run from rows in memory.

    Args:
        train: Texts, chat messages, token ids, or mappings with the key "prompt" and any columns: a list of them, or a
            data set of the datasets library.
        validation: Held-out rows; None holds out some of ``train``, or takes all of them where they are few.
        settings: Everything else that ``PromptData`` needs.

    Raises:
        ValueError: A row is malformed; names its number and column.
    """
    rows = Inline(train, "data")
    if validation is not None:
        return PromptData(train=rows, validation=Inline(validation, "data, validation"), **settings)
    held_out = min(settings["validation_size"], len(rows) // 5)
    few = len(rows) < FEW or len(rows) - held_out < settings["prompts_per_step"]
    return PromptData(train=rows, validation=rows if few else None, **settings)
