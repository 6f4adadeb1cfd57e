"""Sampling: tokens from a causal language model, with the log-probability of each as it was drawn."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_lightning.batch import Sampling
from grpo_lightning.policy import Poll
from grpo_lightning.policy.cache import Memory
from grpo_lightning.policy.sampler import draw
from grpo_lightning.ranks import ALONE, Ranks

StopTest = Callable[[Tensor], Tensor]
"""(completion ids so far [b, t]) -> which rows end with a stop string [b] (bool)."""
Ended = Callable[[list[int], Tensor, Tensor], None]
"""(rows that just ended, their completion ids so far [n, t], mask so far [n, t])"""

COMPACT = 0.75
"""Finished completions are dropped from the batch once at most this share of it is still running."""


@torch.no_grad()
def decode(
    memory: Memory,
    uniforms: Tensor,
    *,
    sampling: Sampling,
    end_ids: Sequence[int],
    pad_id: int,
    stops: StopTest | None,
    poll: Poll | None = None,
    ended: Ended | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A completion for every row of ``memory``.

    Args:
        memory: The model, with its prompts.
        uniforms: [B, max_new_tokens] the random numbers that decide the tokens.
        sampling: How tokens are drawn.
        end_ids: A completion ends with the first of these, which belongs to it.
        pad_id: Fills finished rows.
        stops: Further reasons to end, or None.
        poll: Called before every token.
        ended: Called after every token with the completions that ended.
        ranks: Processes that may have to make every forward pass together.

    Returns:
        Completion ids [B, T], mask [B, T], log-probabilities and entropies [B, T] (0 where masked) and finished [B]
        (bool), with T the longest completion.
    """
    shape, device = uniforms.shape, uniforms.device
    ids = torch.full(shape, pad_id, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    logprobs, entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    ends = torch.tensor(sorted(end_ids), device=device)
    rows = torch.arange(shape[0], device=device)  # of the batch that goes through the model
    running = torch.ones_like(rows, dtype=torch.bool)  # of these
    finished = torch.zeros_like(running)
    length = 0
    for step in range(sampling.max_new_tokens):
        if poll and ranks.lockstep:
            ranks.agree(ranks.attempt(poll))
        elif poll:
            poll()
        logits = memory.start() if step == 0 else memory.step(ids[rows, step - 1])
        token, logprob, entropy = draw(logits, sampling, uniforms[rows, step])
        ids[rows, step] = token.where(running, pad_id)
        mask[rows, step] = running
        logprobs[rows, step] = logprob.where(running, 0.0)
        entropies[rows, step] = entropy.where(running, 0.0)
        length = step + 1
        last = torch.isin(token, ends)
        if stops:
            last |= stops(ids[rows, :length])
        last &= running
        if last.any():
            done = rows[last]
            finished[done] = True
            if ended:
                ended(done.tolist(), ids[done, :length], mask[done, :length])
            running &= ~last
        elif not ranks.lockstep:
            continue
        left = int(running.sum())
        if not ranks.anyone(left > 0):
            break
        if left <= COMPACT * len(rows) and len(rows) > 1 and step + 1 < sampling.max_new_tokens:
            # with none left, one takes part in the forward passes of the others
            still = running.nonzero().flatten() if left else torch.zeros_like(rows[:1])
            memory.keep(still)
            rows, running = rows[still], running[still]
    return ids[:, :length], mask[:, :length], logprobs[:, :length], entropies[:, :length], finished
