"""From token ids back to text, and where it ends."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from grpo_lightning.policy import Ended
from grpo_lightning.policy.decode import Ended as EndedRows
from grpo_lightning.policy.decode import StopTest


def decoded(tokenizer: Any, completions: Tensor, mask: Tensor) -> tuple[str, ...]:
    """Texts of completions [B, T] without special tokens."""
    rows = [ids[keep].tolist() for ids, keep in zip(completions.cpu(), mask.cpu(), strict=True)]
    return tuple(tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def reporter(tokenizer: Any, ended: Ended | None) -> EndedRows | None:
    """``ended`` as `decode` calls it."""
    if ended is None:
        return None

    def report(rows: list[int], completions: Tensor, mask: Tensor) -> None:
        texts = decoded(tokenizer, completions, mask)
        for row, text, ids, counts in zip(rows, texts, completions, mask, strict=True):
            ended(row, text, ids[counts].tolist())

    return report


def stop_test(tokenizer: Any, stop: tuple[str, ...]) -> StopTest | None:
    """Which completions contain one of the texts in ``stop``, in the last of their tokens."""
    if not stop:
        return None
    # A token is at least one byte of text, so this many tokens hold every stop string that just ended.
    tail = max(len(text.encode()) for text in stop) + 1

    def ends(completions: Tensor) -> Tensor:
        texts = tokenizer.batch_decode(completions[:, -tail:], clean_up_tokenization_spaces=False)
        return torch.tensor([any(s in text for s in stop) for text in texts], device=completions.device)

    return ends


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion, by the model's own word; its other generation settings are dropped."""
    own = model.generation_config or GenerationConfig()
    ids: set[int] = set()
    for value in (own.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids |= {value} if isinstance(value, int) else set(value or ())
    if not ids:
        raise ValueError("the model names no end-of-sequence token: set eos_token in its tokenizer")
    return sorted(ids)
