"""Whether prompts make sense for a run, looked at before its first step: they fit the model, and they differ."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from grpo_lightning.batch import Prompt
from grpo_lightning.data import Generated, PromptData, Source
from grpo_lightning.data.source import place

log = logging.getLogger(__name__)

_CHUNK = 1024  # prompts measured at once
_LOOKED_AT = 64
"""Prompts of a source that makes its rows on access: there may be millions."""


class _Counts(Protocol):
    """What is needed of a policy."""

    @property
    def context(self) -> int | None: ...

    def count_tokens(self, prompts: list[Prompt]) -> list[int]: ...


def check_prompts(data: PromptData, policy: _Counts, config: Mapping[str, Any]) -> None:
    """Check the prompts that are left after ``data.max_prompt_length``; warn where they are all the same.

    Args:
        data: Its prompts are read.
        policy: Knows their lengths in tokens, and its context.
        config: The run's settings.

    Raises:
        ValueError: A prompt does not fit into the model's context together with the longest completion; names its
            place, its length, and what to do.
    """
    is_sampled = "rollout" in config["module"]
    if is_sampled and config.get("environment") is None:
        _warn_if_equal(data.train)  # else the same prompt may be continued, or replied to, in another way
    if not is_sampled:
        return
    for source, part in ((data.train, "rollout"), (data.validation, "validation")):
        if part == "rollout" and config["mode"] not in ("fit", "preflight"):
            continue
        _check_lengths(source, policy, config[part]["max_new_tokens"], f"{part}.max_new_tokens", data.max_prompt_length)


def _warn_if_equal(source: Source) -> None:
    size = len(source)
    some = range(min(size, _LOOKED_AT)) if isinstance(source, Generated) else range(size)
    if size > 1 and all(source[i][0] == source[0][0] for i in some):
        log.warning(
            "all %d training prompts are the same, %.60r: only this one is trained on; is data.prompt_column the "
            "column that differs?",
            size,
            source[0][0],
        )


def _check_lengths(source: Source, policy: _Counts, new: Any, key: str, limit: int | None) -> None:
    context = policy.context
    if context is None or not isinstance(new, int) or (limit is not None and limit + new <= context):
        return
    size = min(len(source), _LOOKED_AT) if isinstance(source, Generated) else len(source)
    for first in range(0, size, _CHUNK):
        numbers = range(first, min(first + _CHUNK, size))
        for number, length in zip(numbers, policy.count_tokens([source[i][0] for i in numbers]), strict=True):
            if length + new <= context:
                continue
            remedy = (
                f"data.max_prompt_length={context - new}, which leaves out longer prompts, or a lower {key}"
                if new < context
                else f"{key} below {context}"
            )
            raise ValueError(
                f"{place(source, number)}: the prompt has {length} tokens, which with {key}={new} are more than the "
                f"model's context of {context}; allowed is {remedy}"
            )
