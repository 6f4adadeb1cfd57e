"""The episodes of one rollout: what an environment says to the model's turns."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from grpo_lightning.config.redaction import single_line
from grpo_lightning.distributed import signals
from grpo_lightning.environment.answer import Answer, shown
from grpo_lightning.environment.call import ARGUMENTS, Asked, taken
from grpo_lightning.reward import workers
from grpo_lightning.reward.spec import describe_error
from grpo_lightning.supervisor import doing

if TYPE_CHECKING:  # batch imports torch, which worker processes can do without
    from grpo_lightning.environment.environment import Environment
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_told: set[tuple[str, str]] = set()


class EpisodeError(ValueError):
    """An environment that cannot be called, or has failed too often.

    Args:
        message: What happened; control characters, which a function's own texts may hold, become escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(single_line(message))


def check_columns(environment: "Environment", column_names: Collection[str]) -> None:
    """Check that an environment can be called with these columns; needs no data, so that a run can do it first.

    Raises:
        EpisodeError: A required parameter that is no column, a column that has the name of an argument that the
            function takes, or a signature that cannot be read: all of the problems, with the columns there are.
    """
    try:
        missing, takes = taken(environment.function, [*ARGUMENTS, *column_names])
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"environment {environment.name}: its signature cannot be read: {error}") from error
    problems = [
        f"environment {environment.name}: parameter {name!r} is no column of the data; there are {sorted(column_names)}"
        for name in missing
    ]
    problems += [
        f"column {name!r} has the name of an argument of environment {environment.name}"
        for name in ARGUMENTS
        if name in column_names and name in takes
    ]
    if problems:
        raise EpisodeError("; ".join(problems))


@dataclass
class _Episode:
    """One row: what was said so far, and what the environment has yet to say."""

    turns: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    is_ended: bool = False
    """Whether the environment has ended it."""
    failure: workers.Failure | None = None
    is_asked: bool = False
    """Whether the answer to the last turn is still to come."""
    pending: workers.Pending | None = None
    reply: str | None = None
    """To the last turn."""


class Episodes:
    """What an environment says in one rollout, to each of B completions.

    It is a partner in the sense of the policy: `said` takes a turn of the model, `reply` gives what it is told. The
    rest is read after sampling, and waits for answers that are still to come.

    Args:
        environment: Its function and settings.
        prompts: [B] the prompt of each completion.
        columns: Name -> [B] what else the data set knows of the row.
        seeds: [B] numbers that the generator ``rng`` of a row is a function of.
        poll: Called while workers are waited for; may raise to give up.

    Raises:
        EpisodeError: What `check_columns` finds, or arguments of unequal length.
    """

    def __init__(
        self,
        environment: "Environment",
        prompts: "Sequence[Prompt]",
        columns: Mapping[str, Sequence[Any]],
        seeds: Sequence[tuple[int, int, int]],
        poll: Callable[[], None] | None = None,
    ) -> None:
        check_columns(environment, columns)
        for name, values in {**columns, "seeds": seeds}.items():
            if len(values) != len(prompts):
                raise EpisodeError(f"{name!r}: expected {len(prompts)} values, got {len(values)}")
        self._environment, self._prompts, self._columns, self._seeds = environment, prompts, columns, seeds
        self._poll = poll
        self._takes = frozenset(taken(environment.function, [*ARGUMENTS, *columns])[1])
        self._asked = Asked(environment.function, environment.max_reply)
        self._episodes = [_Episode() for _ in prompts]
        self._num_bad_calls = self._num_cut = 0
        self.seconds = 0.0
        """That the environment has taken, or was waited for."""

    @property
    def waits(self) -> bool:
        """Whether replies take time: they come from workers."""
        return self._environment.timeout is not None

    @property
    def role(self) -> str | None:
        """Who replies, user or tool; None: what the policy's settings say."""
        return self._environment.reply_role

    def said(self, row: int, text: str) -> None:
        """Take note that the model has ended a turn of completion ``row``, 0 <= row < B, with this text.

        Raises:
            ValueError: The episode is over, or its last turn was not replied to.
        """
        episode = self._episodes[row]
        if episode.is_asked or len(episode.replies) < len(episode.turns):
            raise ValueError(f"row {row}: a turn before the last one was replied to, or after the end of its episode")
        episode.turns.append(text)
        episode.is_asked = True
        if self._environment.timeout is not None:
            # Its own pickles say what cannot be pickled: an error of the settings, not of the row.
            episode.pending = workers.submit(self._asked, [self._call(row)], seconds=self._environment.timeout)

    def reply(self, row: int) -> str | None:
        """What the model is told; None: the episode is over, by the environment, a failure, or ``max_turns``.

        Raises:
            ValueError: A worker cannot import the function.
            RuntimeError: Workers cannot be started.
        """
        self._settle(row)
        return self._episodes[row].reply

    def unread(self, row: int, problem: str) -> None:
        """The policy cannot read the last reply to completion ``row``: its episode has failed."""
        episode = self._episodes[row]
        episode.failure, episode.reply = workers.Failure("reply", problem), None
        episode.replies.pop()

    @property
    def turns(self) -> list[list[str]]:
        """[B] what the model has said."""
        return [list(episode.turns) for episode in self._episodes]

    @property
    def replies(self) -> list[list[str]]:
        """[B] what it was told."""
        return [list(episode.replies) for episode in self._episodes]

    @property
    def scores(self) -> list[tuple[tuple[int, float], ...]]:
        """[B] (number of the turn from 0, score) pairs, the environment's own."""
        return [tuple(episode.scores) for episode in self._settled()]

    @property
    def over(self) -> list[bool]:
        """[B] whether the environment has ended the episode; else it failed, or was cut at some limit."""
        return [episode.is_ended for episode in self._settled()]

    @property
    def failed(self) -> list[str | None]:
        """[B] what went wrong; None: nothing."""
        return [
            None if episode.failure is None else f"{episode.failure.kind}: {episode.failure.message}"
            for episode in self._settled()
        ]

    @property
    def metrics(self) -> dict[str, float]:
        """What there is to say of the episodes, each a mean over them."""
        failed = sum(problem is not None for problem in self.failed)
        size = max(len(self._episodes), 1)
        return {
            "episode/failed": failed / size,
            "episode/bad_calls": self._num_bad_calls / size,
            "episode/cut_replies": self._num_cut / size,
        }

    def check(self) -> None:
        """Look whether the environment has failed in too many episodes.

        Raises:
            EpisodeError: In more than ``max_failed`` of them; names the first.
        """
        failures = [(row, one.failure) for row, one in enumerate(self._settled()) if one.failure is not None]
        if not failures:
            return
        environment, size = self._environment, len(self._episodes)
        row, failure = failures[0]
        said = shown(self._episodes[row].turns[-1])
        told = (
            f"environment {environment.name} failed in {len(failures)} of {size} episodes (allowed fraction: "
            f"environment.max_failed={environment.max_failed}); first on row {row}, {failure.kind}: {failure.message}, "
            f"turn {len(self._episodes[row].turns)}: {said}"
        )
        if len(failures) > environment.max_failed * size:
            raise EpisodeError(told)
        if (environment.name, failure.kind) not in _told:
            _told.add((environment.name, failure.kind))
            log.warning("%s; they are counted as episode/failed from now on", single_line(told))

    def _settled(self) -> list[_Episode]:
        """All episodes, without answers that are still to come."""
        for row in range(len(self._episodes)):
            self._settle(row)
        return self._episodes

    def _settle(self, row: int) -> None:
        """Get the answer to the last turn of ``row``, unless it is there."""
        episode = self._episodes[row]
        if not episode.is_asked:
            return
        began = perf_counter()
        try:
            answer = self._here(row) if episode.pending is None else episode.pending.result(self._poll)[0]
        finally:
            self.seconds += perf_counter() - began
        episode.is_asked, episode.pending, episode.reply = False, None, None
        if isinstance(answer, workers.Failure):
            episode.failure = answer
            return
        self._num_bad_calls += answer.is_bad_call
        self._num_cut += answer.is_cut
        if answer.score is not None:
            episode.scores.append((len(episode.turns) - 1, answer.score))
        episode.is_ended = answer.reply is None
        if answer.reply is not None and len(episode.turns) < self._environment.max_turns:
            episode.replies.append(answer.reply)
            episode.reply = answer.reply

    def _here(self, row: int) -> Answer | workers.Failure:
        """The answer of a function that is called in this process."""
        with doing(f"environment {self._environment.name}"):
            try:
                answer = self._asked(**self._call(row))
            except (Exception, SystemExit) as error:
                answer = workers.Failure("exception", describe_error(error))
        signals.current().check()  # a signal may have come while the environment took long
        return answer

    def _call(self, row: int) -> dict[str, Any]:
        """The arguments of one call, by name, and the seed of its generator."""
        episode = self._episodes[row]
        known = {name: values[row] for name, values in self._columns.items()}
        known |= {"turns": list(episode.turns), "replies": list(episode.replies), "prompt": self._prompts[row]}
        given = {name: value for name, value in known.items() if name in self._takes}
        return {"given": given, "seed": self._seeds[row] if "rng" in self._takes else None}
