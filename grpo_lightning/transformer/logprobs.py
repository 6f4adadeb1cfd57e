"""Log-probabilities of completions: every prompt computed once for its whole group, or once per completion.

Shapes: B rows of S prompt and T completion tokens, W of these S + T columns that are not padding in every row; N tokens
in a stream, C of which are completion tokens to be predicted; H the size of a hidden state, V of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from grpo_lightning.batch import Rollout, Sampled
from grpo_lightning.transformer.attention import Stream, forward
from grpo_lightning.transformer.head import Head, LossGradient, token_logprobs
from grpo_lightning.transformer.packing import same_prompts
from grpo_lightning.transformer.selected import selected


def positions(attention_mask: Tensor) -> Tensor:
    """The position [B, W] of every token in its row, counted from its first real one; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def separate(model: Any, rows: Sampled | Rollout, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """``Policy.logprobs_and_entropy`` by the model's own forward pass, with all logits at once.

    It works with any causal language model.

    Returns:
        Log-probabilities [B, T] and entropies [B, T] in nats, 0 where masked; None for entropies that are not wanted.
    """
    # Columns that are padding in every row cost time and change nothing.
    width, length = rows.ids.shape[1], rows.mask.shape[1]
    real = rows.attention_mask.any(0).nonzero()
    first, last = int(real[0]), int(real[-1]) + 1
    used = last - (width - length)  # completion tokens of the longest row
    attention_mask = rows.attention_mask[:, first:last]  # [B, S + T] -> [B, W]
    # One logit more than there are tokens: each is predicted at the place before it.
    logits = model(
        input_ids=rows.ids[:, first:last],
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        use_cache=False,
        logits_to_keep=used + 1,
    ).logits  # [B, used + 1, V]
    chosen = rows.ids[:, last - used : last]  # [B, used]
    logprobs, entropies = token_logprobs(
        logits[:, -used - 1 : -1],
        chosen,
        temperature,
        entropy_gradient=entropy,
        kept=None if rows.kept is None else rows.kept.narrow(used).flat,
    )
    padding, masked = (0, length - used), ~rows.mask[:, :used]
    padded = torch.nn.functional.pad(logprobs.masked_fill(masked, 0.0), padding)  # [B, used] -> [B, T]
    return padded, torch.nn.functional.pad(entropies.masked_fill(masked, 0.0), padding) if entropy else None


def shared(
    decoder: Any,
    head: Head,
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
    # Up to the last token in the mask: those before it that are masked are read all the same.
    ends = (rows.mask * torch.arange(1, length + 1, device=rows.mask.device)).amax(-1).tolist()  # [B, T] -> [B]
    # The stream is put together from small pieces, each of which would be a call of its own on a GPU.
    ids, real = rows.ids.cpu(), rows.attention_mask.cpu()
    groups, order, tokens = [], [], []
    for members in same_prompts(rows):
        members = [row for row in members if ends[row]]
        if not members:
            continue
        prompt = ids[members[0], :start][real[members[0], :start]]
        # A completion's last token predicts nothing that is asked for, so it need not be in the stream.
        groups.append((len(prompt), tuple(ends[row] - 1 for row in members)))
        tokens += [prompt, *(ids[row, start : start + ends[row] - 1] for row in members)]
        order += members
    device = rows.ids.device
    zeros = torch.zeros(rows.mask.numel(), device=device)
    if not groups:
        # Zeros that depend on all weights: a backward pass then gives every weight a gradient of zero, not an error.
        prompt = ids[0, :start][real[0, :start]].to(device)
        stream = Stream(((len(prompt), ()),), device)
        hidden = forward(decoder, prompt[None], stream.positions, stream)[0]  # [1, S, H] -> [S, H]
        logprobs, entropies = head(hidden[-1:], prompt[:1], temperature=temperature, entropy=entropy)
        nothing = zeros.view_as(rows.mask)  # [B * T] -> [B, T]
        return nothing + 0.0 * logprobs, None if entropies is None else nothing + 0.0 * entropies
    stream = Stream(tuple(groups), device)
    hidden = forward(decoder, torch.cat(tokens)[None].to(device), stream.positions, stream)[0]  # [1, N, H] -> [N, H]
    # The number [C] of each in a flattened [B, T].
    numbers = torch.cat([torch.arange(row * length, row * length + ends[row]) for row in order]).to(device)
    logprobs, entropies = head(
        selected(hidden, torch.cat(stream.predictors)),  # [N, H] -> [C, H]
        rows.ids[:, start:].flatten()[numbers],  # [B, T] -> [B * T] -> [C]
        temperature=temperature,
        entropy=entropy,
        loss_gradient=None if loss_gradient is None else lambda values, part: loss_gradient(values, numbers[part]),
        kept=None if rows.kept is None else rows.kept.of(numbers),
    )
    outside = ~rows.mask

    def placed(values: Tensor) -> Tensor:
        # [C] -> [B * T] -> [B, T]
        return zeros.index_copy(0, numbers, values).view_as(rows.mask).masked_fill(outside, 0.0)

    return placed(logprobs), None if entropies is None else placed(entropies)
