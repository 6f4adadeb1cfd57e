"""The logits from which the tokens of completions are drawn, without gradient, a few tokens at a time.

Shapes: B rows of S prompt and T completion tokens, C of these in the mask, n in a chunk; H the size of a hidden state,
V of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.transformer.head import CHUNK, GPU_CHUNK, Head
from grpo_lightning.transformer.logprobs import model_logits, predicting
from grpo_lightning.types import Rollout, Sampled

Chunk = tuple[Tensor, Tensor]
"""The numbers [n] of some tokens in a flattened [B, T], and the logits [n, V] that each is drawn from, in float32."""


@torch.no_grad()
def shared(decoder: Any, head: Head, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The logits of every token in the mask, with every prompt computed once.

    Args:
        decoder: Gives hidden states.
        head: Makes logits of them.
        rows: Prompt and completion as token ids.
        temperature: Divides the logits, > 0.
    """
    hidden, numbers = predicting(decoder, rows)
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    size = _tokens(len(weight), hidden.device)
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        yield numbers[part], head.logits(hidden[part], weight, bias, temperature)


@torch.no_grad()
def separate(model: Any, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The same by the model's own forward pass, which makes the logits of all rows at once.

    Arguments are those of `shared`.
    """
    logits = model_logits(model, rows)  # [B, used, V]
    return parts(logits, rows, temperature=temperature)


@torch.no_grad()
def parts(logits: Tensor, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """A chunk at a time of logits that are there already.

    Args:
        logits: [B, t, V] of the first t completion tokens, behind which no row has any.
        rows: Whose they are.
        temperature: Divides the logits, > 0.
    """
    length = rows.mask.shape[1]
    found = rows.mask.flatten().nonzero().flatten()  # [B, T] -> [B * T] -> [C]
    for numbers in found.split(_tokens(logits.shape[-1], logits.device)):
        yield numbers, logits[numbers // length, numbers % length].float() / temperature


def _tokens(vocabulary: int, device: torch.device) -> int:
    """How many tokens a chunk has."""
    return max(1, (GPU_CHUNK if device.type == "cuda" else CHUNK) // vocabulary)
