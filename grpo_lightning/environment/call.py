"""How environments are called: arguments by name, copied, and what comes back as an answer."""

import copy
import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_lightning.config.redaction import single_line
from grpo_lightning.environment.answer import Answer, AnswerError, read
from grpo_lightning.environment.played import Played, called
from grpo_lightning.reward.spec import arguments
from grpo_lightning.reward.workers import Failure

ARGUMENTS = ("turns", "replies", "prompt", "rng")
"""What every environment may name, beside the columns."""


class Asked:
    """An environment that is asked for its answer, in this process or in a worker.

    Args:
        function: As in `grpo_lightning.environment.Environment`.
        max_reply: The most characters of a reply.
    """

    def __init__(self, function: Callable[..., Any], max_reply: int) -> None:
        self.function, self._max_reply = function, max_reply

    def __call__(self, *, given: Mapping[str, Any], seed: Sequence[int] | None) -> Answer | Failure:
        """Its answer, or why what it returned is none; exceptions of the function are left as they are.

        Args:
            given: Arguments by name.
            seed: Of the generator ``rng``; None: the function takes none.
        """
        passed = copy.deepcopy(dict(given))
        if seed is not None:
            passed["rng"] = generator(seed)
        try:
            return read(called(self.function, passed), max_reply=self._max_reply)
        except AnswerError as error:
            return Failure("answer", str(error))


def taken(function: Callable[..., Any], names: Collection[str]) -> tuple[list[str], list[str]]:
    """What a call lacks and what it takes of ``names``; what `functools.partial` has bound is never replaced.

    Returns:
        The required parameters that are no names, and the names that it takes.

    Raises:
        TypeError: The signature cannot be read.
        ValueError: Likewise.
    """
    free = dict.fromkeys(name for name in names if name not in _bound(function))
    missing, known = arguments(function, free)
    return missing, list(known)


def generator(seed: Sequence[int]) -> random.Random:
    """A generator of random numbers that is the same for the same numbers, on any machine and in any process."""
    text = ",".join(str(int(number)) for number in seed)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))


def name_of(function: Any) -> str:
    """What messages call an environment: the dotted path of what is called in the end."""
    while isinstance(function, Played | partial):
        function = function.function if isinstance(function, Played) else function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return single_line(f"{function.__module__}.{function.__qualname__}")


def attribute(function: Any, name: str) -> Any:
    """What an environment says of itself by an attribute, also behind partials; None where it has none."""
    while isinstance(function, Played | partial):
        function = function.function if isinstance(function, Played) else function.func
    return getattr(function, name, None)


def _bound(function: Any) -> Collection[str]:
    while isinstance(function, Played):
        function = function.function
    return function.keywords if isinstance(function, partial) else ()
