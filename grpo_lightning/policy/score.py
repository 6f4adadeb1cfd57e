"""Log-probabilities of completions: one forward pass for what a group shares, or one row for each completion."""

from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Rollout, Sampled, same_prompts
from grpo_lightning.policy import Slope
from grpo_lightning.policy.head import Head, token_logprobs
from grpo_lightning.policy.prefix import Stream, forward


def positions(attention_mask: Tensor) -> Tensor:
    """[B, S] position of every token in its row, counted from its first real one; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def plain(model: Any, rows: Sampled | Rollout, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """``Policy.score`` by the model's own forward pass, with all logits. Works with any causal language model."""
    # Columns that are padding in every row cost time and change nothing.
    width, length = rows.ids.shape[1], rows.mask.shape[1]
    real = rows.attention_mask.any(0).nonzero()
    first, last = int(real[0]), int(real[-1]) + 1
    kept = last - (width - length)
    attention_mask = rows.attention_mask[:, first:last]
    logits = model(
        input_ids=rows.ids[:, first:last],
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        use_cache=False,
        logits_to_keep=kept + 1,
    ).logits
    chosen = rows.ids[:, last - kept : last]
    logprobs, entropies = token_logprobs(logits[:, -kept - 1 : -1], chosen, temperature, entropy_gradient=entropy)
    padding, hidden = (0, length - kept), ~rows.mask[:, :kept]
    found = torch.nn.functional.pad(logprobs.masked_fill(hidden, 0.0), padding)
    return found, torch.nn.functional.pad(entropies.masked_fill(hidden, 0.0), padding) if entropy else None


def shared(
    decoder: Any,
    head: Head,
    rows: Sampled | Rollout,
    *,
    temperature: float,
    entropy: bool,
    slope: Slope | None,
) -> tuple[Tensor, Tensor | None]:
    """``Policy.score`` with every prompt computed once, no padding, and the logits of the completions only."""
    length = rows.mask.shape[1]
    start = rows.ids.shape[1] - length
    counts = (rows.mask * torch.arange(1, length + 1, device=rows.mask.device)).amax(-1).tolist()
    ids, real = rows.ids.cpu(), rows.attention_mask.cpu()
    groups, order, tokens = [], [], []
    for members in same_prompts(rows):
        members = [row for row in members if counts[row]]
        if not members:
            continue
        prompt = ids[members[0], :start][real[members[0], :start]]
        groups.append((len(prompt), tuple(counts[row] - 1 for row in members)))
        tokens += [prompt, *(ids[row, start : start + counts[row] - 1] for row in members)]
        order += members
    device = rows.ids.device
    zeros = torch.zeros(rows.mask.numel(), device=device)
    if not groups:  # zeros that depend on all weights, for whoever asks for their gradient
        prompt = ids[0, :start][real[0, :start]].to(device)
        stream = Stream(((len(prompt), ()),), device)
        hidden = forward(decoder, prompt[None], stream.positions, stream)[0]
        logprobs, entropies = head(hidden[-1:], prompt[:1], temperature=temperature, entropy=entropy)
        nothing = zeros.view_as(rows.mask)
        return nothing + 0.0 * logprobs, None if entropies is None else nothing + 0.0 * entropies
    stream = Stream(tuple(groups), device)
    hidden = forward(decoder, torch.cat(tokens)[None].to(device), stream.positions, stream)[0]
    places = torch.cat(stream.predictors).to(device)
    numbers = torch.cat([torch.arange(row * length, row * length + counts[row]) for row in order]).to(device)
    logprobs, entropies = head(
        hidden.index_select(0, places),
        rows.ids[:, start:].flatten()[numbers],
        temperature=temperature,
        entropy=entropy,
        slope=None if slope is None else lambda values, part: slope(values, numbers[part]),
    )
    outside = ~rows.mask

    def placed(values: Tensor) -> Tensor:
        return zeros.index_copy(0, numbers, values).view_as(rows.mask).masked_fill(outside, 0.0)

    return placed(logprobs), None if entropies is None else placed(entropies)
