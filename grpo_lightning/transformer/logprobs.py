"""Log-probabilities of completions by a model's own forward pass; and micro-batches.

Shapes: B rows of S prompt and T completion tokens, W of these S + T columns that are not padding in every row; C
completion tokens in the mask; V the size of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.transformer.lm_head import token_logprobs, tokens_per_chunk
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


@torch.no_grad()
def logits_in_chunks(logits: Tensor, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The logits of every token in the mask, a chunk at a time, out of those [B, t, V] of all t that any row has."""
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
