"""Whether prompts make sense for a run, looked at before its first step: they fit the model, and they differ."""

import logging
from collections.abc import Mapping
from typing import Any

from grpo_lightning.data import Generated, PromptData, Source
from grpo_lightning.data.source import place
from grpo_lightning.policy import Policy

log = logging.getLogger(__name__)

_CHUNK = 1024  # prompts measured at once
_LOOKED_AT = 64
"""Prompts of a source that makes its rows on access: there may be millions."""


def check_prompts(data: PromptData, policy: Policy, config: Mapping[str, Any]) -> None:
    """Check the prompts that are left after ``data.max_prompt_length``; warn where they are all the same.

    Args:
        data: Its prompts are read.
        policy: Knows their lengths in tokens, and its context.
        config: The run's settings.

    Raises:
        ValueError: A prompt does not fit into the model's context together with the longest completion; names its
            place, its length, and what to do.
    """
    if "rollout" not in config["module"]:  # supervised
        return
    train = data.train
    if config.get("environment") is None:  # else the same prompt may be replied to in another way
        first = train[0][0]
        if len(train) > 1 and all(train[i][0] == first for i in _looked_at(train)):
            log.warning(
                "all %d training prompts are the same, %.60r: only this one is trained on; is data.prompt_column the "
                "column that differs?",
                len(train),
                first,
            )
    for part, source in {"rollout": train, "validation": data.validation}.items():
        if part == "validation" or config["mode"] in ("fit", "preflight"):
            new = config[part]["max_new_tokens"]
            _check_lengths(source, policy, new, f"{part}.max_new_tokens", data.max_prompt_length)


def _looked_at(source: Source) -> range:
    return range(min(len(source), _LOOKED_AT) if isinstance(source, Generated) else len(source))


def _check_lengths(source: Source, policy: Policy, new: Any, key: str, limit: int | None) -> None:
    context = policy.context
    if context is None or not isinstance(new, int) or (limit is not None and limit + new <= context):
        return
    numbers = _looked_at(source)
    for chunk in (numbers[first : first + _CHUNK] for first in range(0, len(numbers), _CHUNK)):
        for number, length in zip(chunk, policy.count_tokens([source[i][0] for i in chunk]), strict=True):
            if length + new > context:
                remedy = (
                    f"data.max_prompt_length={context - new}, which leaves out longer prompts, or a lower {key}"
                    if new < context
                    else f"{key} below {context}"
                )
                raise ValueError(
                    f"{place(source, number)}: the prompt has {length} tokens, which with {key}={new} are more than "
                    f"the model's context of {context}; allowed is {remedy}"
                )
