"""What environments return, checked."""

import math
from dataclasses import dataclass
from typing import Any, SupportsFloat

from grpo_lightning.config.redaction import single_line

ALLOWED = "text (a reply), a finite number (over, with this score), None (over) or (text, finite number)"
_SHOWN_CHARACTERS = 80


class AnswerError(ValueError):
    """An environment has returned what is no answer, or another than it gave before.

    Args:
        message: What happened; control characters become escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(single_line(message))


class BadCall(str):
    """A reply that says what is wrong with what the model has asked for; it is counted as ``episode/bad_calls``."""

    __slots__ = ()


@dataclass(frozen=True)
class Answer:
    """What an environment says to the model's last turn."""

    reply: str | None
    """What the model is told; None: the episode is over."""
    score: float | None
    """Of the last turn; None where it has none."""
    is_bad_call: bool = False
    """Whether the reply says that the model has asked for something wrongly."""
    is_cut: bool = False
    """Whether the reply was longer than allowed."""


def read(returned: Any, *, max_reply: int | None = None) -> Answer:
    """What an environment has returned, as plain values; halves of surrogate pairs become question marks.

    Args:
        returned: What it has returned.
        max_reply: The most characters of a reply; longer ones are `shortened`. None: any number.

    Raises:
        AnswerError: It is not one of ``ALLOWED``.
    """
    if returned is None:
        return Answer(None, None)
    if isinstance(returned, str):
        return _reply(returned, None, max_reply)
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[0], str) or (score := _number(returned[1])) is None:
            raise _refused(returned)
        return _reply(returned[0], score, max_reply)
    score = _number(returned)
    if score is None:
        raise _refused(returned)
    return Answer(None, score)


def shortened(text: str, most: int) -> str:
    """The beginning of a text of more than ``most`` characters and how many it has, ``most`` characters in all."""
    if len(text) <= most:
        return text
    told = f"… ({len(text)} characters in all)"
    return text[: max(most - len(told), 0)] + told[-most:]


def _reply(given: str, score: float | None, max_reply: int | None) -> Answer:
    text = str.__str__(given).encode(errors="replace").decode()  # as replies become tokens
    told = text if max_reply is None else shortened(text, max_reply)
    return Answer(told, score, is_bad_call=isinstance(given, BadCall), is_cut=told is not text)


def _number(value: Any) -> float | None:
    """A finite number as a float; None if it is no such number."""
    if hasattr(value, "tolist"):  # of torch and numpy, of which none is imported here
        value = value.tolist()
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _refused(returned: Any) -> AnswerError:
    return AnswerError(f"returned {shown(returned)}: allowed is {ALLOWED}")


def shown(value: Any) -> str:
    """The beginning of a value as Python writes it, for messages."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS]) + ("…" if len(value) > _SHOWN_CHARACTERS else "")
    try:
        return repr(value)[:_SHOWN_CHARACTERS]
    except Exception:
        return f"a value of type {type(value).__name__}"
