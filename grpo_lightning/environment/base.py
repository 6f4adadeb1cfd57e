"""What an environment is: a function with settings, how it is called, and what it may return."""

import copy
import hashlib
import inspect
import math
import random
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from numbers import Real
from typing import Any

from grpo_lightning.config.rules import ENVIRONMENT, problems
from grpo_lightning.console import single_line
from grpo_lightning.reward.spec import arguments, is_coroutine_function

ARGUMENTS = ("turns", "replies", "prompt", "rng")
"""Arguments that every environment may name, beside the columns."""


class EpisodeError(ValueError):
    """An environment that cannot be called, or has failed too often."""

    def __init__(self, message: str) -> None:
        super().__init__(single_line(message))  # it may hold texts of the function or the model


class BadCall(str):
    """A reply that says what is wrong with what the model has asked for; it is counted as ``episode/bad_calls``."""

    __slots__ = ()


@dataclass(frozen=True)
class Environment:
    """A function that replies to the model, and how it is called.

    ``function`` takes by name what it needs of ``turns`` (the model's turns so far, texts, the last is new),
    ``replies`` (those in between, one less), ``prompt`` (as rewards get it), ``rng`` (a `random.Random` that is the
    same in every call for the same completion of the same step) and the columns of the row; all of it if it has
    ``**kwargs``. What it gets are copies. It returns

    * a text, which is the reply;
    * a finite number: the episode is over, with this score;
    * None: the episode is over, and the rewards judge it;
    * a text and a finite number, as a tuple: a reply, and the score of the turn.

    It has to return the same for the same arguments, since it may be called in any process. A generator function
    becomes a `GeneratorEnvironment`.

    Raises:
        ValueError: On construction, naming the field: ``function`` cannot be called as an environment, or a setting is
            out of range.
    """

    function: Callable[..., Any]
    max_turns: int
    """The most turns of the model in one episode. After the last one the function is asked for its score, not for a
    reply."""
    timeout: float | None = None
    """Seconds for one call, in a worker process that is ended after them; None: it is called in this process."""
    max_failed: float = 0.5
    """The largest fraction of the episodes in which a call may raise, take too long, break its worker or return
    something else."""
    failed_score: float | None = None
    """The score of those episodes; None: they are left out of their group."""
    max_reply: int = 10_000
    """Characters of a reply; longer ones are cut and say so."""
    role: str | None = None
    """Role of the replies, user or tool; None: what the function's attribute ``role`` says or, without one, the
    policy's ``reply_role``."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function: expected a callable (`_partial_: true` in YAML), got {self.function!r:.80}")
        if is_coroutine_function(self.function):
            raise ValueError(f"function: expected no coroutine function (async def), got {self.name}")
        if inspect.isgeneratorfunction(self.function):
            object.__setattr__(self, "function", GeneratorEnvironment(self.function))
        if errors := problems(ENVIRONMENT, {**vars(self), "role": self.reply_role}):
            raise ValueError("; ".join(errors))

    def __call__(self, *, named: Mapping[str, Any], seed: Sequence[int] | None) -> "StepResult":
        """Call the function with copies, in this process or in a worker.

        Args:
            named: Arguments by name.
            seed: Of the generator ``rng``, which is the same on any machine; None: the function takes none.
        """
        passed = copy.deepcopy(dict(named))
        if seed is not None:
            digest = hashlib.sha256(",".join(map(str, seed)).encode()).digest()
            passed["rng"] = random.Random(int.from_bytes(digest, "big"))
        return StepResult.of(self.function(**passed), self.max_reply)

    @property
    def name(self) -> str:
        """The dotted path of its function."""
        function = _innermost(self.function)
        function = function if hasattr(function, "__qualname__") else type(function)
        return single_line(f"{function.__module__}.{function.__qualname__}")

    @property
    def reply_role(self) -> str | None:
        """Role of the replies, user or tool; None: what the policy's settings say."""
        return getattr(_innermost(self.function), "role", None) if self.role is None else self.role

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """JSON schemas of the tools that the chat template shows in the prompt; None: there are none."""
        return getattr(_innermost(self.function), "tools", None)


class GeneratorEnvironment:
    """An environment made of a generator function, which runs again from the start for every turn.

    Its first ``yield`` has no value and gives the model's first turn. Every other one replies, with a text or a text
    and the score of the turn, and gives the next turn. ``return`` ends the episode, with a number as its score, or with
    none. ::

        def shop(goal, rng):
            said, stock = (yield), rng.sample(GOODS, 5)
            while said != "done":
                said = yield f"{len(stock)} left"
            return float(goal in stock)

    It has to do the same with the same turns, which is checked by its replies.

    Args:
        function: The generator function; it takes the columns, ``prompt`` and ``rng`` that it names.
    """

    def __init__(self, function: Callable[..., Generator[Any, str, Any]]) -> None:
        self.function = function
        keyword = inspect.Parameter.KEYWORD_ONLY
        bound = function.keywords if isinstance(function, partial) else {}
        named = [p for p in inspect.signature(function).parameters.values() if p.name not in bound]
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, keyword) for name in ("turns", "replies")]
            + [p if p.kind is p.VAR_KEYWORD else p.replace(kind=keyword) for p in named]
        )

    def __call__(self, *, turns: Sequence[str], replies: Sequence[str], **named: Any) -> Any:
        """What the generator yields or returns after the last turn."""
        episode, value = self.function(**named), None
        try:
            if next(episode, "a return") is not None:
                raise ValueError("the first `yield` must have no value, as in `said = yield`")
            for turn, before in zip_longest(turns, replies):
                try:
                    value, is_over = episode.send(turn), False
                except StopIteration as end:
                    value, is_over = end.value, True
                reply = None if is_over else StepResult.of(value, None if before is None else len(before)).reply
                if before not in (None, reply):  # the last turn has no reply before
                    raise ValueError(
                        f"not a function of its turns: {value!r:.80} after {turn!r:.80}, and before it was "
                        f"{before!r:.80} (randomness comes from `rng`, and nothing may be kept between calls)"
                    )
                if is_over == isinstance(value, str | tuple):
                    raise ValueError(f"expected a reply by `yield` and the end by `return`, got {value!r:.80}")
            return value
        finally:
            episode.close()


@dataclass(frozen=True)
class StepResult:
    """What an environment returns after a turn."""

    reply: str | None
    """None: the episode is over."""
    score: float | None
    """Of the turn; None where it has none."""
    is_bad_call: bool = False
    is_cut: bool = False
    """Whether the reply was longer than allowed."""

    @classmethod
    def of(cls, returned: Any, max_reply: int | None = None) -> "StepResult":
        """Read what an environment has returned; halves of surrogate pairs become question marks.

        Raises:
            ValueError: It is nothing that an environment may return.
        """
        reply, score = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if isinstance(reply, str) and (reply is returned or (score := _number(score)) is not None):
            text = reply.encode(errors="replace").decode()
            note = f"… ({len(text)} characters in all)"
            limit = len(text) if max_reply is None else max_reply
            shown = text if len(text) <= limit else text[: max(limit - len(note), 0)] + note[-limit:]
            return cls(shown, score, is_bad_call=isinstance(reply, BadCall), is_cut=shown is not text)
        if returned is None or (score := _number(returned)) is not None:
            return cls(None, score)
        raise ValueError(
            f"the environment returned {returned!r:.80}; expected text (a reply), a finite number (over, with this "
            "score), None (over) or (text, finite number)"
        )


def check_columns(environment: Environment, column_names: Collection[str]) -> list[str]:
    """The arguments and columns that an environment's function takes; needs no data, so that a run can ask first.

    Raises:
        EpisodeError: A required parameter is no column, or a column has the name of an argument that it takes.
    """
    missing, names = arguments(environment.function, dict.fromkeys([*ARGUMENTS, *column_names]))
    errors = [f"parameter {name!r} is no column of the data, which are {sorted(column_names)}" for name in missing]
    doubled = {*ARGUMENTS} & {*column_names} & {*names}
    errors += [f"column {name!r} has the name of an argument" for name in sorted(doubled)]
    if errors:
        raise EpisodeError(f"environment {environment.name}: {'; '.join(errors)}")
    return list(names)


def _number(value: Any) -> float | None:
    """A finite number as a float; None if it is no such number."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of torch and numpy
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _innermost(function: Any) -> Any:
    """What partials and a `GeneratorEnvironment` call in the end."""
    while isinstance(function, GeneratorEnvironment | partial):
        function = function.function if isinstance(function, GeneratorEnvironment) else function.func
    return function
