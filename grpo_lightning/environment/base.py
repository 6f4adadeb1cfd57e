"""Multi-turn environments: functions that reply to the model, and the episodes that one rollout plays in them."""

import copy
import hashlib
import inspect
import logging
import math
import random
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, Any

from grpo_lightning.config.rules import ENVIRONMENT, problems
from grpo_lightning.console import single_line
from grpo_lightning.distributed import signals
from grpo_lightning.reward import workers
from grpo_lightning.reward.spec import Failure, arguments, describe_error, is_coroutine_function

if TYPE_CHECKING:  # it imports torch, which worker processes can do without
    from grpo_lightning.types import Prompt

ARGUMENTS = ("turns", "replies", "prompt", "rng")
"""Arguments that every environment may name, beside the columns."""
log = logging.getLogger(__name__)
_warned: set[str] = set()


class EpisodeError(ValueError):
    """An environment that cannot be called, or has failed too often."""

    def __init__(self, message: str) -> None:
        super().__init__(single_line(message))  # it may hold texts of the function or the model


class BadCall(str):
    """A reply that says what is wrong with what the model has asked for; it is counted as ``episode/bad_calls``."""

    __slots__ = ()


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
    def parse(cls, returned: Any, max_reply: int | None = None) -> "StepResult":
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


def _number(value: Any) -> float | None:
    """Convert a finite number to a float; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of torch and numpy
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


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
        if any(map(inspect.isgeneratorfunction, (self.function, type(self.function).__call__))):
            object.__setattr__(self, "function", GeneratorEnvironment(self.function))
        if errors := problems(ENVIRONMENT, {**vars(self), "role": self.reply_role}):
            raise ValueError("; ".join(errors))

    def __call__(self, *, named: Mapping[str, Any], seed: Sequence[int] | None) -> StepResult:
        """Call the function with copies of ``named``, in this process or in a worker.

        ``seed`` is of the generator ``rng``, which is the same on any machine; None: the function takes none.
        """
        passed = copy.deepcopy(dict(named))
        if seed is not None:
            digest = hashlib.sha256(",".join(map(str, seed)).encode()).digest()
            passed["rng"] = random.Random(int.from_bytes(digest, "big"))
        return StepResult.parse(self.function(**passed), self.max_reply)

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
                reply = None if is_over else StepResult.parse(value, None if before is None else len(before)).reply
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


def _innermost(function: Any) -> Any:
    """What partials and a `GeneratorEnvironment` call in the end."""
    while isinstance(function, GeneratorEnvironment | partial):
        function = function.function if isinstance(function, GeneratorEnvironment) else function.func
    return function


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


@dataclass
class _Episode:
    """The episode of one completion."""

    turns: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    is_over: bool = False
    failure: Failure | None = None
    pending: Callable[[], Any] | None = None
    """Gives the result of the last turn, which is still to come."""
    reply: str | None = None
    """To the last turn."""


class Episodes:
    """Episodes of the B completions of one rollout, in one environment.

    Samplers `step` with each turn of the model and read the `reply`, see `grpo_lightning.sampler.Responder`. The
    rest is read after sampling, and waits for results that are still to come.

    Args:
        environment: Its function and settings.
        prompts: [B] the prompt of each completion.
        columns: Name -> [B] what else the data set knows of the row.
        seeds: [B] (the step's seed, number of the prompt, number of the completion in its group): what ``rng`` is a
            function of.
        poll: Called while workers are waited for; may raise to give up.

    Raises:
        EpisodeError: See `check_columns`.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: "Sequence[Prompt]",
        columns: Mapping[str, Sequence[Any]],
        seeds: Sequence[tuple[int, int, int]],
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._takes = frozenset(check_columns(environment, columns))
        self._environment, self._seeds, self._poll = environment, seeds, poll
        self._columns = {**columns, "prompt": prompts}
        self._episodes = [_Episode() for _ in prompts]
        self._num_bad_calls = self._num_cut = 0
        self.is_slow = environment.timeout is not None
        """Whether replies come from workers, and should be asked for late."""
        self.role = environment.reply_role
        """Role of the replies, user or tool; None: what the policy's settings say."""
        self.seconds = 0.0
        """That the environment has taken, or was waited for."""

    def step(self, row: int, text: str) -> None:
        """Give the text of a turn that the model has ended in completion ``row``, 0 <= row < B."""
        episode, environment = self._episodes[row], self._environment
        episode.turns.append(text)
        available = {name: values[row] for name, values in self._columns.items()}
        available |= {"turns": episode.turns, "replies": episode.replies}
        named = {name: value for name, value in available.items() if name in self._takes}
        call = {"named": named, "seed": self._seeds[row] if "rng" in self._takes else None}
        if environment.timeout is None:
            episode.pending = partial(self._call_here, call)
        else:
            episode.pending = partial(workers.submit(environment, call, seconds=environment.timeout).result, self._poll)

    def reply(self, row: int) -> str | None:
        """The reply to that turn; None: the episode is over, by the environment, a failure, or ``max_turns``."""
        return self._finish_turn(row).reply

    def reject(self, row: int, problem: str) -> None:
        """Fail the episode of completion ``row``, whose last reply the policy cannot read."""
        episode = self._episodes[row]
        episode.failure, episode.reply = Failure("reply", problem), None
        episode.replies.pop()

    @property
    def scores(self) -> list[tuple[tuple[int, float], ...]]:
        """[B] (number of the turn from 0, score) pairs, the environment's own."""
        return [tuple(episode.scores) for episode in self._finish_turns()]

    @property
    def over(self) -> list[bool]:
        """[B] whether the environment has ended the episode; else it failed, or was cut at some limit."""
        return [episode.is_over for episode in self._finish_turns()]

    @property
    def failed(self) -> list[str | None]:
        """[B] what went wrong; None: nothing."""
        failures = [episode.failure for episode in self._finish_turns()]
        return [None if failure is None else f"{failure.kind}: {failure.message}" for failure in failures]

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> mean over the episodes."""
        num_failed = sum(problem is not None for problem in self.failed)
        counts = {"failed": num_failed, "bad_calls": self._num_bad_calls, "cut_replies": self._num_cut}
        return {f"episode/{name}": count / max(len(self._episodes), 1) for name, count in counts.items()}

    def check(self) -> None:
        """Raise `EpisodeError` where more than ``max_failed`` of the episodes have failed; warn of fewer."""
        failed = [(row, problem) for row, problem in enumerate(self.failed) if problem is not None]
        if not failed:
            return
        environment, size, (row, problem) = self._environment, len(self._episodes), failed[0]
        turns = self._episodes[row].turns
        message = (
            f"environment {environment.name} failed in {len(failed)} of {size} episodes (allowed fraction: "
            f"environment.max_failed={environment.max_failed}); first on row {row}, {problem}, turn {len(turns)}: "
            f"{turns[-1]!r:.80}"
        )
        if len(failed) > environment.max_failed * size:
            raise EpisodeError(message)
        if environment.name not in _warned:
            _warned.add(environment.name)
            log.warning("%s; they are counted as episode/failed from now on", single_line(message))

    def _finish_turns(self) -> list[_Episode]:
        return [self._finish_turn(row) for row in range(len(self._episodes))]

    def _finish_turn(self, row: int) -> _Episode:
        """Wait for the environment's result of a row's last turn, and add it to the episode."""
        episode = self._episodes[row]
        if episode.pending is None:
            return episode
        start = perf_counter()
        try:
            result = episode.pending()
        finally:
            self.seconds += perf_counter() - start
        episode.pending = episode.reply = None
        if isinstance(result, Failure):
            episode.failure = result
            return episode
        self._num_bad_calls += result.is_bad_call
        self._num_cut += result.is_cut
        if result.score is not None:
            episode.scores.append((len(episode.turns) - 1, result.score))
        episode.is_over = result.reply is None
        if result.reply is not None and len(episode.turns) < self._environment.max_turns:
            episode.replies.append(result.reply)
            episode.reply = result.reply
        return episode

    def _call_here(self, call: Mapping[str, Any]) -> StepResult | Failure:
        result: StepResult | Failure
        try:
            result = self._environment(**call)
        except (Exception, SystemExit) as error:
            result = Failure("exception", describe_error(error))
        signals.current_signals().check()  # a signal may have come while the environment took long
        return result
