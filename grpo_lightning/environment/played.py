"""Environments written as generators, which are played again from the start for every turn."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_lightning.environment.answer import AnswerError, read, shortened, shown


class Played:
    """An environment made of a generator function.

    Its first ``yield`` has no value and gives the model's first turn. Every other one replies, with a text or a text
    and the score of the turn, and gives the next turn. ``return`` ends the episode, with a number as its score, or with
    none. ::

        def shop(goal, rng):
            said, stock = (yield), rng.sample(GOODS, 5)
            while said != "done":
                said = yield f"{len(stock)} left"
            return float(goal in stock)

    The function is called anew for every turn, with the columns, ``prompt`` and ``rng`` that it names, and is given all
    turns so far: it must do the same with the same turns. That is checked by its replies.

    Raises:
        ValueError: On construction, if ``function`` is no generator function, or names ``turns`` or ``replies``, which
            come by ``yield``.
    """

    def __init__(self, function: Callable[..., Generator[Any, str, Any]]) -> None:
        if not is_generator(function):
            raise ValueError(f"function: expected a generator function (def with yield), got {function!r:.80}")
        self.function = function
        own = list(inspect.signature(function).parameters.values())
        for parameter in own:
            if parameter.name in ("turns", "replies"):
                raise ValueError(
                    f"function: expected a generator function without the parameter {parameter.name!r}, since turns "
                    f"come by yield, got {function!r:.80}"
                )
        told = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("turns", "replies")]
        named = [
            parameter if parameter.kind is parameter.VAR_KEYWORD else parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in own
            if parameter.kind is not parameter.VAR_POSITIONAL
        ]
        self.__signature__ = inspect.Signature(sorted([*told, *named], key=lambda parameter: parameter.kind))

    def __call__(self, *, turns: Sequence[str], replies: Sequence[str], **named: Any) -> Any:
        """What the generator says to the last turn.

        Args:
            turns: What the model has said so far.
            replies: What it was told, one less.
            **named: Arguments of the generator function.

        Raises:
            AnswerError: The generator replies otherwise than before, or yields and returns what is no answer.
        """
        playing = called(self.function, named)
        try:
            return _last(playing, turns, replies)
        finally:
            playing.close()


def called(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What a function returns, given its arguments by name, those too that it takes by position only."""
    named = dict(given)
    parameters = inspect.signature(function).parameters.values()
    first = [named.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in named]
    return function(*first, **named)


def is_generator(function: Any) -> bool:
    """Whether ``function``, what a partial calls, or the call of an object is a generator function."""
    while isinstance(function, partial):
        function = function.func
    return inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__)


def _last(playing: Generator[Any, Any, Any], turns: Sequence[str], replies: Sequence[str]) -> Any:
    """Tell a generator all turns; returns what it says to the last one."""
    try:
        early = next(playing)
    except StopIteration:
        raise AnswerError("ended before its first `yield`, which gives the model's first turn") from None
    if early is not None:
        raise AnswerError(
            f"yielded {shown(early)} before it was told a turn: its first `yield` has no value, as in `said = yield`"
        )
    for number, turn in enumerate(turns):
        try:
            yielded = playing.send(turn)
        except StopIteration as end:
            return _returned(end.value, number, replies)
        answer = read(yielded)
        if answer.reply is None:
            raise AnswerError(f"yielded {shown(yielded)}: allowed is text or (text, finite number); `return` ends")
        if number < len(replies) and not _is_same(answer.reply, replies[number]):
            raise _inconstant(f"replied {shown(answer.reply)} to turn {number + 1}", replies[number])
    return yielded


def _is_same(reply: str, before: str) -> bool:
    """Whether a reply is one given before, which may have been cut."""
    return before in (reply, shortened(reply, len(before)))


def _returned(value: Any, number: int, replies: Sequence[str]) -> Any:
    if number < len(replies):
        raise _inconstant(f"ended at turn {number + 1}", replies[number])
    if isinstance(value, str | tuple):
        raise AnswerError(f"returned {shown(value)}: allowed is a finite number or None; a reply is yielded")
    return value


def _inconstant(now: str, before: str) -> AnswerError:
    return AnswerError(
        f"is not a function of its turns: {now}, where it had replied {shown(before)} (randomness comes from `rng`, "
        "and nothing may be kept between calls)"
    )
