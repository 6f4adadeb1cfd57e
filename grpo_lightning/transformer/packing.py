"""Micro-batches: which rows go through the model together."""

import torch
from torch import Tensor

from grpo_lightning.types import Rollout, Sampled


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


def ends(mask: Tensor) -> Tensor:
    """How many tokens [B] of every completion are read: those up to its last one in the mask [B, T].

    What lies before it and is not in the mask, such as a reply, is read all the same.
    """
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * places).amax(-1)  # [B, T] -> [B]


def lengths(rows: Sampled | Rollout) -> tuple[list[int], list[int]]:
    """How many tokens of every completion are read, and how many every prompt has, without padding."""
    completions: list[int] = ends(rows.mask).tolist()
    start = rows.ids.shape[1] - rows.mask.shape[1]
    prompts: list[int] = rows.attention_mask[:, :start].sum(-1).tolist()
    return completions, prompts


def packed_microbatches(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches without padding, for a model that computes a prompt once for all rows that share it.

    Groups are taken from the largest to the smallest. A group stays together unless it is larger than the budget.

    Args:
        rows: B prompts and completions.
        tokens: The most tokens in one forward pass; a row that is longer goes alone.

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
    comes first. Arguments and returns are those of `packed_microbatches`; padding counts as tokens.
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
