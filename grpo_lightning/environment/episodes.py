"""The episodes of one rollout: turns of the model in, replies of the environment out."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from grpo_lightning.console import single_line
from grpo_lightning.distributed import signals
from grpo_lightning.environment.base import Environment, EpisodeError, StepResult, check_columns
from grpo_lightning.reward import workers
from grpo_lightning.reward.spec import Failure, describe_error

if TYPE_CHECKING:  # batch imports torch, which worker processes can do without
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_warned: set[str] = set()


@dataclass
class _Episode:
    """One row."""

    turns: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    is_over: bool = False
    failure: Failure | None = None
    is_open: bool = False
    """Whether the result of the last turn is still to come."""
    pending: workers.Pending | None = None
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
        self._environment, self._prompts, self._columns, self._seeds = environment, prompts, columns, seeds
        self._poll = poll
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
        episode = self._episodes[row]
        episode.turns.append(text)
        episode.is_open = True
        if (environment := self._environment).timeout is not None:
            episode.pending = workers.submit(environment, self._arguments(row), seconds=environment.timeout)

    def reply(self, row: int) -> str | None:
        """The reply to that turn; None: the episode is over, by the environment, a failure, or ``max_turns``."""
        self._settle(row)
        return self._episodes[row].reply

    def reject(self, row: int, problem: str) -> None:
        """Fail the episode of completion ``row``, whose last reply the policy cannot read."""
        episode = self._episodes[row]
        episode.failure, episode.reply = Failure("reply", problem), None
        episode.replies.pop()

    @property
    def scores(self) -> list[tuple[tuple[int, float], ...]]:
        """[B] (number of the turn from 0, score) pairs, the environment's own."""
        return [tuple(episode.scores) for episode in self._settled()]

    @property
    def over(self) -> list[bool]:
        """[B] whether the environment has ended the episode; else it failed, or was cut at some limit."""
        return [episode.is_over for episode in self._settled()]

    @property
    def failed(self) -> list[str | None]:
        """[B] what went wrong; None: nothing."""
        failures = [episode.failure for episode in self._settled()]
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

    def _settled(self) -> list[_Episode]:
        """All episodes, without results that are still to come."""
        for row in range(len(self._episodes)):
            self._settle(row)
        return self._episodes

    def _settle(self, row: int) -> None:
        """Get the result of the last turn of ``row``."""
        episode = self._episodes[row]
        if not episode.is_open:
            return
        start = perf_counter()
        try:
            result = self._call_here(row) if episode.pending is None else episode.pending.result(self._poll)
        finally:
            self.seconds += perf_counter() - start
        episode.is_open, episode.pending, episode.reply = False, None, None
        if isinstance(result, Failure):
            episode.failure = result
            return
        self._num_bad_calls += result.is_bad_call
        self._num_cut += result.is_cut
        if result.score is not None:
            episode.scores.append((len(episode.turns) - 1, result.score))
        episode.is_over = result.reply is None
        if result.reply is not None and len(episode.turns) < self._environment.max_turns:
            episode.replies.append(result.reply)
            episode.reply = result.reply

    def _call_here(self, row: int) -> StepResult | Failure:
        """Call the function in this process."""
        result: StepResult | Failure
        try:
            result = self._environment(**self._arguments(row))
        except (Exception, SystemExit) as error:
            result = Failure("exception", describe_error(error))
        signals.current().check()  # a signal may have come while the environment took long
        return result

    def _arguments(self, row: int) -> dict[str, Any]:
        """The arguments of one call, by name, and the seed of its generator."""
        episode = self._episodes[row]
        available = {name: values[row] for name, values in self._columns.items()}
        available |= {"turns": episode.turns, "replies": episode.replies, "prompt": self._prompts[row]}
        named = {name: value for name, value in available.items() if name in self._takes}
        return {"named": named, "seed": self._seeds[row] if "rng" in self._takes else None}
