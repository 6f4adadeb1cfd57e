"""Sampling: tokens from a causal language model, with the log-probability of each as it was drawn.

Shapes: B rows, b of them in the batch now; T tokens of the longest completion, t so far; n rows that have just ended.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_lightning.batch import Sampling
from grpo_lightning.distributed.ranks import ALONE, Ranks
from grpo_lightning.sampler.cache import Cache
from grpo_lightning.sampler.draw import draw

Poll = Callable[[], None]
"""Called between generated tokens; may raise to abandon the sampling."""
StopTest = Callable[[Tensor], Tensor]
"""(completion ids so far [b, t]) -> which rows end with a stop string [b] (bool)."""
OnRowsFinished = Callable[[list[int], Tensor, Tensor], None]
"""(rows that just ended, their completion ids so far [n, t], mask so far [n, t])"""

COMPACT = 0.75
"""Finished completions are dropped from the batch once at most this fraction of it is still running.

Dropping copies the keys and values of all that remain, so it is not done for each one that ends.
"""


@torch.no_grad()
def decode(
    cache: Cache,
    uniforms: Tensor,
    *,
    sampling: Sampling,
    end_ids: Sequence[int],
    pad_id: int,
    stops: StopTest | None,
    poll: Poll | None = None,
    on_finished: OnRowsFinished | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw a completion for every row of a cache.

    Args:
        cache: The model, with its prompts.
        uniforms: [B, max_new_tokens] the random numbers that decide the tokens.
        sampling: How tokens are drawn.
        end_ids: The token ids that end a completion; the first of them still belongs to it.
        pad_id: The token id that fills finished rows.
        stops: Which completions end for another reason; None: no other reason.
        poll: Called before every token; what it raises is passed on.
        on_finished: Called with the completions that have just ended.
        ranks: The processes that may have to make every forward pass together.

    Returns:
        Completion ids [B, T], mask [B, T], log-probabilities and entropies [B, T] (0 where masked) and finished [B]
        (bool), with T the longest completion.

    Raises:
        FloatingPointError: The logits are not finite.
    """
    shape, device = uniforms.shape, uniforms.device
    ids = torch.full(shape, pad_id, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    logprobs, entropies = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    ends = torch.tensor(sorted(end_ids), device=device)
    rows = torch.arange(shape[0], device=device)  # [b] those that go through the model
    running = torch.ones_like(rows, dtype=torch.bool)  # [b] those of them that have not ended
    finished = torch.zeros_like(running)
    length = 0
    for step in range(sampling.max_new_tokens):
        if poll and ranks.lockstep:
            # If one process leaves, the others would wait in the next forward pass for ever.
            ranks.together(poll)
        elif poll:
            poll()
        # Rows that have ended go on like the others until the batch is made smaller; what they draw is not kept.
        logits = cache.start() if step == 0 else cache.step(ids[rows, step - 1])
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
            if on_finished:
                on_finished(done.tolist(), ids[done, :length], mask[done, :length])
            running &= ~last
        elif not ranks.lockstep:
            continue
        left = int(running.sum())
        if not ranks.anyone(left > 0):
            break
        if left <= COMPACT * len(rows) and len(rows) > 1 and step + 1 < sampling.max_new_tokens:
            # With none left, one goes on, to take part in the forward passes of the other processes.
            still = running.nonzero().flatten() if left else torch.zeros_like(rows[:1])
            cache.keep(still)
            rows, running = rows[still], running[still]
    return ids[:, :length], mask[:, :length], logprobs[:, :length], entropies[:, :length], finished
