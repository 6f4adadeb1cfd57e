"""Rewards for the right answer: [B] scores for [B] completions and columns.

Odd text of the model scores 0; a right answer that is empty or neither text nor a number raises a ValueError.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.reward.text import answer_text

_WINDOW = 200  # characters before the last digit that can belong to its number
_MAX_DIGITS = 50
_FRAC = re.compile(r"\\[dt]?frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}")
_VALUE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}%])[-\u2212])?\$?(?P<number>{_VALUE})(?:[eE](?P<exponent>[-+]?[0-9]+))?"
    rf"(?: ?/ ?(?P<divisor>{_VALUE}))?",
    re.ASCII,
)


def exact(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 if the answer text is the right answer, surrounding whitespace aside, else 0.0."""
    return [float(answer_text(text) == _right_answer(right)) for text, right in zip(completions, answer, strict=True)]


def numeric(
    completions: Sequence[str], answer: Sequence[Any], *, tolerance: float = 1e-6, **_: Any
) -> list[float | None]:
    r"""1.0 if the last number of the answer text is the right one's, |given − right| ≤ tolerance, else 0.0.

    Numbers are 1,234.5 or -3 or 1e-3 or 3/4 or \frac{3}{4}; a percent or dollar sign is ignored, so 50% is 50.
    The tolerance is absolute, since a relative one lets large integers be off by one.

    Of right answers the last number counts, too, so that "… #### 72" is 72.

    Raises:
        ValueError: A right answer holds no number.
    """
    scores: list[float | None] = []
    for text, right in zip(completions, answer, strict=True):
        expected, given = last_number(_right_answer(right)), last_number(answer_text(text))
        if expected is None:
            raise ValueError(f"answer: expected a number, got {right!r:.80}")
        scores.append(float(given is not None and abs(given - expected) <= tolerance))
    return scores


def reasoning_gym(
    completions: Sequence[str],
    answer: Sequence[str | None],
    task: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    task_config: Sequence[Mapping[str, Any] | None] | None = None,
    **_: Any,
) -> list[float | None]:
    """What the task's own verifier gives the answer text, in [0, 1]; 0.0 for text that it cannot be given or raises on.

    Args:
        completions: [B]
        answer: [B] the right answers; None in the tasks where any solution counts.
        task: [B] reasoning_gym dataset names.
        metadata: [B] the entries' metadata, unchanged: verifiers read the puzzle from it.
        task_config: [B] the data set's arguments where they are not its defaults; some verifiers read them.

    Raises:
        ValueError: An unknown task, a right answer that the verifier itself raises on, or a row of which its verifier
            would evaluate what could run code.
    """
    from grpo_lightning.reward import verifier  # takes two seconds; not every run needs it

    configs = task_config or [None] * len(completions)
    rows = zip(completions, answer, task, metadata, configs, strict=True)
    results = [verifier.begin(answer_text(text), right, name, data, of or {}) for text, right, name, data, of in rows]
    return [result() for result in results]


def demonstrated(
    completions: Sequence[str],
    completion: Sequence[str | Sequence[Mapping[str, str]]],
    answer: Sequence[Any] | None = None,
    task: Sequence[str] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> list[float | None]:
    """1.0 if the answer text is that of the demonstration; of reasoning_gym's tasks, what their verifiers give it.

    The right answer is the column ``answer``, else the answer text of the demonstration in ``completion``, a text or
    the messages of several turns.
    """
    if task is not None and metadata is not None:
        return reasoning_gym(completions, answer or [None] * len(completions), task, metadata)
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completion]
    right = answer if answer is not None else [answer_text(text) for text in texts]
    return exact(completions, right)


def of_environment(turn_scores: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """The sum of an environment's own scores, given as (number of the turn from 0, score) pairs of each episode.

    With ``advantage=to_go`` each of them counts at the end of its turn.
    """
    return [float(sum(score for _, score in pairs)) for pairs in turn_scores]


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, or None: there is none, its divisor is 0, or it has more than 50 digits."""
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    window = _FRAC.sub(r"\1/\2", text[max(end - _WINDOW, 0) : end + 1])
    matches = list(_NUMBER.finditer(window))
    if not matches:
        return None
    last = matches[-1]
    number, divisor = (last[group] or "1" for group in ("number", "divisor"))
    exponent = last["exponent"] or "0"
    if max(len(number), len(divisor), len(exponent)) > _MAX_DIGITS or abs(int(exponent)) > _MAX_DIGITS:
        return None
    bottom = Fraction(divisor.replace(",", ""))
    if not bottom:
        return None
    value = Fraction(number.replace(",", "")) * Fraction(10) ** int(exponent) / bottom
    return -value if last["sign"] else value


def _right_answer(answer: Any) -> str:
    text = str(answer).strip()
    if not text or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"answer: expected text or a number, got {answer!r:.80}")
    return text
