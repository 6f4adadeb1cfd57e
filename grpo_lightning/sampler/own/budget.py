"""How many completions fit into a budget of memory for their keys and values."""

import math

from grpo_lightning.memory import GiB, Shape


def rows_within(
    gib: float,
    shape: Shape,
    *,
    number_bytes: int,
    prompts: int,
    prompt_tokens: int,
    completion_tokens: int,
    shares_prompts: bool,
    copies_below: int = 0,
) -> int:
    """How many completions can be held at a time, each with room for all its tokens.

    Args:
        gib: The budget in GiB.
        shape: The model's sizes.
        number_bytes: The bytes of a number among keys and values.
        prompts: How many prompts there are.
        prompt_tokens: The length of the longest.
        completion_tokens: The most tokens of a completion.
        shares_prompts: Whether prompts are held once, for all their completions.
        copies_below: As long as the copies of a layer's prompts take no more bytes than this, completions have some.

    Raises:
        ValueError: Not even one fits.
    """
    token = 2 * number_bytes * shape.keys * shape.layers
    whole = token * (prompt_tokens + completion_tokens)
    budget = gib * GiB
    held = token * prompts * prompt_tokens if shares_prompts else 0
    rows = int((budget - held) // (token * completion_tokens if shares_prompts else whole))
    if shares_prompts and rows * token * prompt_tokens / shape.layers <= copies_below:
        rows = int((budget - held) // whole)
    if rows < 1:
        raise ValueError(
            f"rollout.kv_cache_gib={gib}: allowed is at least {math.ceil((held + whole) / GiB * 1e4) / 1e4:.4f}, what "
            f"{prompts} prompts of up to {prompt_tokens} tokens and one completion of {completion_tokens} need"
        )
    return rows
