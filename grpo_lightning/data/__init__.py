"""Data: text prompts and the columns rewards read, in an order that is a function of the seed and the step.

The names are loaded when they are first used: the settings read this folder's rules, and need no torch for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lightning.data.prompt_data import PromptData
    from grpo_lightning.data.source import Fits, Generated, Row, Source, Subset, hold_out, keep

__all__ = ["Fits", "Generated", "PromptData", "Row", "Source", "Subset", "hold_out", "keep"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'prompt_data' if name == 'PromptData' else 'source'}"), name)
