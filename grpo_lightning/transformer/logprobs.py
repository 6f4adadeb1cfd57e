"""Log-probabilities of completions: every prompt computed once for its whole group, or once per completion.

Shapes: B rows of S prompt and T completion tokens, W of these S + T columns that are not padding in every row; N tokens
in a stream, C completion tokens in the mask, to be predicted; H the size of a hidden state, V of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.transformer import packing
from grpo_lightning.transformer.attention import Stream, forward
from grpo_lightning.transformer.lm_head import LMHead, LossGradient, token_logprobs, tokens_per_chunk
from grpo_lightning.types import Rollout, Sampled

Chunk = tuple[Tensor, Tensor]
"""The numbers [n] of some tokens in a flattened [B, T], and the logits [n, V] that each is drawn from, in float32."""


def positions(attention_mask: Tensor) -> Tensor:
    """The position [B, W] of every token in its row, counted from its first real one; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def separate(model: Any, rows: Sampled | Rollout, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """``Policy.logprobs_and_entropy`` by the model's own forward pass, with all logits at once.

    It works with any causal language model.

    Returns:
        Log-probabilities [B, T] and entropies [B, T] in nats, 0 where masked; None for entropies that are not wanted.
    """
    length = rows.mask.shape[1]
    logits = model_logits(model, rows)
    used = logits.shape[1]
    start = rows.ids.shape[1] - length
    chosen = rows.ids[:, start : start + used]  # [B, used]
    logprobs, entropies = token_logprobs(
        logits,
        chosen,
        temperature,
        entropy_gradient=entropy,
        support=None if rows.support is None else rows.support.narrow(used).flat,
    )
    padding, masked = (0, length - used), ~rows.mask[:, :used]
    padded = torch.nn.functional.pad(logprobs.masked_fill(masked, 0.0), padding)  # [B, used] -> [B, T]
    return padded, torch.nn.functional.pad(entropies.masked_fill(masked, 0.0), padding) if entropy else None


def model_logits(model: Any, rows: Sampled | Rollout) -> Tensor:
    """The logits [B, used, V] that completion tokens are drawn from, by the model's own forward pass.

    ``used`` are the completion tokens of the longest row, at least 1.
    """
    # Columns that are padding in every row, or behind what is asked for, cost time and change nothing.
    start = rows.ids.shape[1] - rows.mask.shape[1]
    used = max(1, int(packing.ends(rows.mask).max()))
    first, last = int(rows.attention_mask.any(0).nonzero()[0]), start + used
    attention_mask = rows.attention_mask[:, first:last]  # [B, S + T] -> [B, W]
    # One logit more than there are tokens: each is predicted at the place before it.
    logits: Tensor = model(
        input_ids=rows.ids[:, first:last],
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        use_cache=False,
        logits_to_keep=used + 1,
    ).logits  # [B, used + 1, V]
    return logits[:, -used - 1 : -1]


def shared(
    decoder: Any,
    head: LMHead,
    rows: Sampled | Rollout,
    *,
    temperature: float,
    entropy: bool,
    loss_gradient: LossGradient | None,
) -> tuple[Tensor, Tensor | None]:
    """``Policy.logprobs_and_entropy`` with every prompt computed once, no padding, and logits for completions only.

    Returns:
        Log-probabilities [B, T] and entropies [B, T] in nats, 0 where masked; None for entropies that are not wanted.
    """
    length = rows.mask.shape[1]
    start = rows.ids.shape[1] - length
    hidden, numbers = predicting(decoder, rows)
    zeros = torch.zeros(rows.mask.numel(), device=rows.ids.device)
    if not len(numbers):
        # Zeros that depend on all weights: a backward pass then gives every weight a gradient of zero, not an error.
        logprobs, entropies = head(hidden, rows.ids[0, start - 1 : start], temperature=temperature, entropy=entropy)
        nothing = zeros.view_as(rows.mask)  # [B * T] -> [B, T]
        return nothing + 0.0 * logprobs, None if entropies is None else nothing + 0.0 * entropies
    logprobs, entropies = head(
        hidden,
        rows.ids[:, start:].flatten()[numbers],  # [B, T] -> [B * T] -> [C]
        temperature=temperature,
        entropy=entropy,
        loss_gradient=None if loss_gradient is None else lambda values, part: loss_gradient(values, numbers[part]),
        support=None if rows.support is None else rows.support.of(numbers),
    )
    outside = ~rows.mask

    def placed(values: Tensor) -> Tensor:
        # [C] -> [B * T] -> [B, T]
        return zeros.index_copy(0, numbers, values).view_as(rows.mask).masked_fill(outside, 0.0)

    return placed(logprobs), None if entropies is None else placed(entropies)


def predicting(decoder: Any, rows: Sampled | Rollout) -> tuple[Tensor, Tensor]:
    """The hidden states that completion tokens are predicted from, with every prompt computed once.

    Returns:
        Hidden states [C, H], and the number [C] of each token in a flattened [B, T]. Where no row has a token, one
        hidden state [1, H] and no number [0].
    """
    length = rows.mask.shape[1]
    start = rows.ids.shape[1] - length
    # The stream is put together from small pieces, each of which would be a call of its own on a GPU.
    ids, real, mask = rows.ids.cpu(), rows.attention_mask.cpu(), rows.mask.cpu()
    ends = packing.ends(mask).tolist()
    groups, order, tokens = [], [], []
    for members in packing.same_prompts(rows):
        members = [row for row in members if ends[row]]
        if not members:
            continue
        prompt = ids[members[0], :start][real[members[0], :start]]
        # A completion's last token predicts nothing that is asked for, so it need not be in the stream.
        groups.append((len(prompt), tuple(ends[row] - 1 for row in members)))
        tokens += [prompt, *(ids[row, start : start + ends[row] - 1] for row in members)]
        order += members
    device = rows.ids.device
    if not groups:
        prompt = ids[0, :start][real[0, :start]].to(device)
        stream = Stream(((len(prompt), ()),), device)
        hidden = forward(decoder, prompt[None], stream.positions, stream)[0]  # [1, S, H] -> [S, H]
        return hidden[-1:], torch.empty(0, dtype=torch.long, device=device)
    stream = Stream(tuple(groups), device)
    hidden = forward(decoder, torch.cat(tokens)[None].to(device), stream.positions, stream)[0]  # [1, N, H] -> [N, H]
    numbers = torch.cat([torch.arange(row * length, row * length + ends[row]) for row in order])
    predictors, asked = torch.cat(stream.predictors), mask.flatten()[numbers]
    if not asked.all():  # replies are read, not predicted
        numbers, predictors = numbers[asked], predictors[asked]
    return deterministic_index_select(hidden, predictors), numbers.to(device)  # [N, H] -> [C, H]


def deterministic_index_select(hidden: Tensor, places: Tensor) -> Tensor:
    """The rows [C, H] of ``hidden`` [N, H] at ``places`` [C] (on the CPU), as ``hidden.index_select(0, places)``.

    On a GPU that one's backward pass adds up what belongs to the same row in the order in which threads get there, and
    so rounds differently each time. Here the second of equal places is added after the first, and so on.
    """
    if hidden.device.type == "cpu":
        return hidden.index_select(0, places)
    rows: Tensor = _IndexSelect.apply(hidden, places)
    return rows


class _IndexSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.size, ctx.places = len(hidden), places
        return hidden.index_select(0, places.to(hidden.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        gradient = rows.new_zeros(ctx.size, rows.shape[1])
        for numbers in occurrences(ctx.places):
            places = ctx.places[numbers].to(rows.device)
            gradient.index_add_(0, places, rows.index_select(0, numbers.to(rows.device)))
        return gradient, None


def occurrences(places: Tensor) -> list[Tensor]:
    """The numbers of the places that come for the first time, of those that come for the second, and so on."""
    if not len(places):
        return []
    ordered, order = places.sort(stable=True)
    starts = torch.searchsorted(ordered, ordered)  # [C] where the run of equal places starts
    seen = torch.empty_like(order)
    seen[order] = torch.arange(len(places)) - starts
    return [(seen == turn).nonzero().flatten() for turn in range(int(seen.max()) + 1)]


@torch.no_grad()
def shared_logits(decoder: Any, head: LMHead, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The logits that every token in the mask is drawn from, a chunk at a time, with every prompt computed once."""
    hidden, numbers = predicting(decoder, rows)
    size = tokens_per_chunk(len(head.weight), hidden.device)
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        yield numbers[part], head.logits(hidden[part], head.weight, head.bias, temperature)


def separate_logits(model: Any, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The same by the model's own forward pass, which makes the logits of all rows at once."""
    with torch.no_grad():
        return logits_in_chunks(model_logits(model, rows), rows, temperature=temperature)


@torch.no_grad()
def logits_in_chunks(logits: Tensor, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """A chunk at a time of logits that are there already.

    Args:
        logits: [B, t, V] of the first t completion tokens, behind which no row has any.
        rows: Whose they are.
        temperature: Divides the logits, > 0.
    """
    length = rows.mask.shape[1]
    tokens = rows.mask.flatten().nonzero().flatten()  # [B, T] -> [B * T] -> [C]
    for numbers in tokens.split(tokens_per_chunk(logits.shape[-1], logits.device)):
        yield numbers, logits[numbers // length, numbers % length].float() / temperature
