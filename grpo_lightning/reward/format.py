"""Rewards for the shape of a completion: ``<think>…</think><answer>…</answer>``, and steps in it."""

import re
from collections.abc import Sequence
from typing import Any

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(
    r"Step [0-9]{1,3}:|^[ \t]{0,8}(?:[0-9]{1,3}\.|[-*\u2022])(?=[ \t])|\b(?:First|Second|Next|Finally),", re.MULTILINE
)


def format(completions: Sequence[str], **_: Any) -> list[float | None]:
    """1.0 if the whole completion is ``<think>…</think><answer>…</answer>``, else 0.0.

    Whitespace may surround and separate the two parts; each of the four tags stands there exactly once.
    DeepSeek-R1, arXiv:2501.12948, section 2.2.2, made strict.

    Args:
        completions: [B]

    Returns:
        [B] 0.0 or 1.0
    """
    return [float(_is_formatted(completion.strip())) for completion in completions]


def tag_count(completions: Sequence[str], **_: Any) -> list[float | None]:
    """A quarter for each of the four tags that stands in the completion exactly once.

    Args:
        completions: [B]

    Returns:
        [B] 0.0, 0.25, 0.5, 0.75 or 1.0
    """
    return [sum(completion.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for completion in completions]


def reasoning_steps(completions: Sequence[str], *, target: int, **_: Any) -> list[float | None]:
    """The number of markers of steps over ``target``, at most 1.

    Markers are "Step 1:", lines with "1." or a bullet, "First,", "Second,", "Next," and "Finally,".

    Open R1's reward of that name, github.com/huggingface/open-r1, src/open_r1/rewards.py, whose target is 3. There
    "1." counts at the beginning of the text only, here on every line; "1." and bullets (- * •) need a space after them.

    Args:
        completions: [B]
        target: How many markers are enough; at least 1.

    Returns:
        [B] in [0, 1]

    Raises:
        ValueError: ``target`` is less than 1.
    """
    if target < 1:
        raise ValueError(f"target: expected at least 1 marker, got {target}")
    return [min(1.0, sum(1 for _ in _STEP.finditer(completion)) / target) for completion in completions]


def _is_formatted(text: str) -> bool:
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    between = text[text.find("</think>") + len("</think>") : text.find("<answer>")]
    return text.find("</think>") < text.find("<answer>") and not between.strip()
