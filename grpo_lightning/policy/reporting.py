"""Completions as text, also while others are still being drawn."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from grpo_lightning.policy import OnFinished
from grpo_lightning.sampler.own.decode import OnRowsFinished


def decoded(tokenizer: Any, completions: Tensor, mask: Tensor) -> tuple[str, ...]:
    """Texts of completions [B, T] without special tokens."""
    rows = [ids[keep].tolist() for ids, keep in zip(completions.cpu(), mask.cpu(), strict=True)]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def reporter(tokenizer: Any, on_finished: OnFinished | None) -> OnRowsFinished | None:
    """``on_finished`` as `decode` calls it: with several rows at once, not decoded."""
    if on_finished is None:
        return None

    def report(rows: list[int], completions: Tensor, mask: Tensor) -> None:
        texts = decoded(tokenizer, completions, mask)
        for row, text, ids, is_real in zip(rows, texts, completions, mask, strict=True):
            on_finished(row, text, ids[is_real].tolist())

    return report


def one_by_one(tokenizer: Any, on_finished: OnFinished) -> Callable[[int, Sequence[int]], None]:
    """``on_finished`` as an engine calls it: with one row, not decoded."""

    def report(row: int, ids: Sequence[int]) -> None:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        on_finished(row, text, list(ids))

    return report
