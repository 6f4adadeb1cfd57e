"""Log-probabilities of completions, every prompt computed once for its group or once per row; and micro-batches.

Shapes: B rows of S prompt and T completion tokens, W of these S + T columns that are not padding in every row; N tokens
in a stream, C completion tokens in the mask, to be predicted; H the size of a hidden state, V of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.transformer.attention import Stream, forward
from grpo_lightning.transformer.lm_head import LMHead, LossGradient, token_logprobs, tokens_per_chunk
from grpo_lightning.types import Rollout, Sampled

Chunk = tuple[Tensor, Tensor]
"""The numbers [n] of some tokens in a flattened [B, T], and the logits [n, V] that each is drawn from, in float32."""


def separate(model: Any, rows: Sampled | Rollout, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """``Policy.logprobs_and_entropy`` by the own forward pass of any causal language model, with all logits at once."""
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
    used = max(1, int(completion_ends(rows.mask).max()))
    first, last = int(rows.attention_mask.any(0).nonzero()[0]), start + used
    attention_mask = rows.attention_mask[:, first:last]  # [B, S + T] -> [B, W]
    # One logit more than there are tokens: each is predicted at the place before it.
    logits: Tensor = model(
        input_ids=rows.ids[:, first:last],
        attention_mask=attention_mask.long(),
        position_ids=(attention_mask.long().cumsum(-1) - 1).clamp(min=0),  # 0 on padding
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
    """``Policy.logprobs_and_entropy`` with every prompt computed once, no padding, and logits for completions only."""
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
    ends = completion_ends(mask).tolist()
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
    # On a GPU the backward pass of index_select adds up equal places in any order; that of indexing sorts them first.
    predicting = hidden.index_select(0, predictors) if device.type == "cpu" else hidden[predictors.to(device)]
    return predicting, numbers.to(device)  # [N, H] -> [C, H]


@torch.no_grad()
def shared_logits(decoder: Any, head: LMHead, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The logits that every token in the mask is drawn from, a chunk at a time, with every prompt computed once."""
    hidden, numbers = predicting(decoder, rows)
    size = tokens_per_chunk(len(head.weight), hidden.device)
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        yield numbers[part], head.logits(hidden[part], head.weight, head.bias, temperature)


@torch.no_grad()
def logits_in_chunks(logits: Tensor, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The same of logits [B, t, V] of the first t completion tokens that are there already; no row has more tokens."""
    length = rows.mask.shape[1]
    tokens = rows.mask.flatten().nonzero().flatten()  # [B, T] -> [B * T] -> [C]
    for numbers in tokens.split(tokens_per_chunk(logits.shape[-1], logits.device)):
        yield numbers, logits[numbers // length, numbers % length].float() / temperature


def same_prompts(rows: Sampled | Rollout) -> list[list[int]]:
    """The numbers of the rows that have the same prompt, by prompt, in order of their first appearance."""
    start = rows.ids.shape[1] - rows.mask.shape[1]
    real = rows.attention_mask[:, :start]
    # What stands where a row is padded says nothing of its prompt, and rows of one prompt may differ in it.
    ids = rows.ids[:, :start].masked_fill(~real, -1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(ids):
        groups.setdefault(prompt.tobytes(), []).append(row)
    return list(groups.values())


def completion_ends(mask: Tensor) -> Tensor:
    """How many tokens [B] of every completion are read: those up to its last one in the mask [B, T]."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * places).amax(-1)  # [B, T] -> [B]


def lengths(rows: Sampled | Rollout) -> tuple[list[int], list[int]]:
    """How many tokens of every completion are read, and how many every prompt has, without padding."""
    completions: list[int] = completion_ends(rows.mask).tolist()
    start = rows.ids.shape[1] - rows.mask.shape[1]
    prompts: list[int] = rows.attention_mask[:, :start].sum(-1).tolist()
    return completions, prompts


def packed_microbatches(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches without padding, for a model that computes a prompt once for all rows that share it.

    Groups are taken from the largest to the smallest. A group stays together unless it is larger than the budget of
    ``tokens`` in one forward pass; a row that is longer goes alone.

    Returns:
        Disjoint index tensors that together cover all B rows.
    """
    completion, prompt = lengths(rows)
    batches: list[list[int]] = []
    used = 0
    groups = sorted(same_prompts(rows), key=lambda group: -prompt[group[0]] - sum(completion[row] for row in group))
    for group in groups:
        own = prompt[group[0]]
        whole = own + sum(completion[row] for row in group)
        if not batches or used + whole > tokens:
            batches.append([])
            used = 0
        used += own
        for row in group:
            # A group that is continued in another micro-batch takes its prompt along.
            if batches[-1] and used + completion[row] > tokens:
                batches.append([])
                used = own
            batches[-1].append(row)
            used += completion[row]
    return [torch.tensor(batch, device=rows.mask.device) for batch in batches]


def padded_microbatches(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches in which every row is padded to the widest prompt and the longest completion.

    Rows are taken from the longest to the shortest, so that little of a micro-batch is padding and the largest one
    comes first. Otherwise as `packed_microbatches`; padding counts as tokens.
    """
    completion, prompt = lengths(rows)
    batches: list[list[int]] = []
    order = sorted(range(len(rows)), key=lambda row: (prompt[row] + completion[row], row), reverse=True)
    widest_prompt = widest_completion = 0
    for row in order:
        longest = max(widest_prompt, prompt[row]), max(widest_completion, completion[row])
        if batches and (len(batches[-1]) + 1) * sum(longest) <= tokens:
            batches[-1].append(row)
            widest_prompt, widest_completion = longest
        else:
            batches.append([row])
            widest_prompt, widest_completion = prompt[row], completion[row]
    return [torch.tensor(batch, device=rows.mask.device) for batch in batches]
