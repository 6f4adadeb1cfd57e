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


def positions(attention_mask: Tensor) -> Tensor:
    """[B, S] position of every token in its row, counted from its first real one; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under logits / temperature, before any truncation.

    Args:
        logits: [B, V]
        sampling: How the token is drawn.
        generator: The random numbers.

    Returns:
        Tokens [B] and log-probabilities [B].

    Raises:
        FloatingPointError: A logit is NaN, or none of a row is finite.
    """
    logits = logits.float()
    if not logits.logsumexp(-1).isfinite().all():
        raise FloatingPointError("the policy's logits are not finite: its weights are damaged")
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, token_logprobs(logits, tokens, 1.0)[0]
    scaled = logits / sampling.temperature
    kept = truncate(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    tokens = kept.softmax(-1).multinomial(1, generator=generator).squeeze(-1)
    return tokens, token_logprobs(scaled, tokens, 1.0)[0]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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

    Returns:
        Completion ids [B, T], mask [B, T], log-probabilities [B, T] (0 where masked) and finished [B] (bool), with
        B = P * G and T the longest completion.
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
    tokens, masks, logprobs = [], [], []
    for step in range(sampling.max_new_tokens):
        if poll:
            poll()
        token, logprob = draw(logits, sampling, generator)
        token = token.where(running, pad_id)
        tokens.append(token)
        masks.append(running)
        logprobs.append(logprob.where(running, 0.0))
        ended = torch.isin(token, ends)
        if stops:
            ended = ended | stops(torch.stack(tokens, 1))
        running = running & ~ended
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
    return torch.stack(tokens, 1), torch.stack(masks, 1), torch.stack(logprobs, 1), ~running
