"""Sampling: tokens from a causal language model, with the log-probability of each as it was drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_lightning.batch import Sampling
from grpo_lightning.policy import Poll
from grpo_lightning.policy.head import token_logprobs, truncate

StopTest = Callable[[Tensor], Tensor]
"""(completion ids so far [B, t]) -> which rows end with a stop string [B] (bool)."""
Ended = Callable[[list[int], Tensor, Tensor], None]
"""(rows that just ended, completion ids so far [B, t], mask so far [B, t])"""


def positions(attention_mask: Tensor) -> Tensor:
    """[B, S] position of every token in its row, counted from its first real one; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row, with its log-probability and the entropy under logits / temperature, before any truncation.

    Args:
        logits: [B, V]
        sampling: How the token is drawn.
        generator: The random numbers.

    Returns:
        Tokens [B], log-probabilities [B] and entropies [B].

    Raises:
        FloatingPointError: A logit is NaN, or none of a row is finite.
    """
    logits = logits.float()
    if not logits.logsumexp(-1).isfinite().all():
        raise FloatingPointError("the policy's logits are not finite: its weights are damaged")
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, *token_logprobs(logits, tokens, 1.0)
    scaled = logits / sampling.temperature
    kept = truncate(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    tokens = kept.softmax(-1).multinomial(1, generator=generator).squeeze(-1)
    return tokens, *token_logprobs(scaled, tokens, 1.0)


@torch.no_grad()
def decode(
    model: Any,
    ids: Tensor,
    attention_mask: Tensor,
    *,
    group_size: int,
    sampling: Sampling,
    end_ids: Sequence[int],
    pad_id: int,
    stops: StopTest | None,
    generator: torch.Generator,
    poll: Poll | None = None,
    ended: Ended | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``group_size`` completions of every prompt; the prompt goes through the model once per group.

    Args:
        model: A transformers causal language model.
        ids: [P, S] prompts, padded on the left.
        attention_mask: [P, S] True on real tokens.
        group_size: Completions per prompt, G.
        sampling: How tokens are drawn.
        end_ids: A completion ends with the first of these, which belongs to it.
        pad_id: Fills finished rows.
        stops: Further reasons to end, or None.
        generator: The random numbers.
        poll: Called before every token.
        ended: Called after every token with which completions ended.

    Returns:
        Completion ids [B, T], mask [B, T], log-probabilities and entropies [B, T] (0 where masked) and finished [B]
        (bool), with B = P * G and T the longest completion.
    """
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=ids,
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits = output.logits[:, -1].repeat_interleave(group_size, 0)
    cache.batch_repeat_interleave(group_size)
    seen = attention_mask.long().repeat_interleave(group_size, 0)
    position = seen.sum(-1, keepdim=True)
    ends = torch.tensor(sorted(end_ids), device=ids.device)
    running = torch.ones(len(seen), dtype=torch.bool, device=ids.device)
    tokens, masks, logprobs, entropies = [], [], [], []
    for step in range(sampling.max_new_tokens):
        if poll:
            poll()
        token, logprob, entropy = draw(logits, sampling, generator)
        token = token.where(running, pad_id)
        tokens.append(token)
        masks.append(running)
        logprobs.append(logprob.where(running, 0.0))
        entropies.append(entropy.where(running, 0.0))
        last = torch.isin(token, ends)
        if stops:
            last = last | stops(torch.stack(tokens, 1))
        if ended and (rows := (running & last).nonzero().flatten().tolist()):
            ended(rows, torch.stack(tokens, 1), torch.stack(masks, 1))
        running = running & ~last
        if step + 1 == sampling.max_new_tokens or not running.any():
            break
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        logits = model(
            input_ids=token.unsqueeze(-1),
            attention_mask=seen,
            position_ids=position + step,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    mask, ids = torch.stack(masks, 1), torch.stack(tokens, 1)
    return ids, mask, torch.stack(logprobs, 1), torch.stack(entropies, 1), ~running
