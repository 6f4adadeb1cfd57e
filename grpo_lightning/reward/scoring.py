"""Calling rewards with what they name: in this process, in workers, or as coroutines; what they return is checked."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from grpo_lightning.distributed import signals
from grpo_lightning.reward import coroutines, workers
from grpo_lightning.reward.spec import (
    ARGUMENTS,
    RewardError,
    RewardSpec,
    Score,
    arguments,
    describe_error,
    is_coroutine_function,
    scalar,
    to_plain,
)
from grpo_lightning.supervisor import doing

if TYPE_CHECKING:  # batch imports torch, which rewards, and the processes some of them run in, can do without
    from grpo_lightning.types import Prompt

_ROLES = {"prompts": "user", "completions": "assistant"}
_SHOWN_CHARACTERS = 80


def check_columns(rewards: Mapping[str, RewardSpec], column_names: Collection[str]) -> None:
    """Check that every reward can be called with these columns; needs no data, so that a run can do it first.

    Raises:
        RewardError: No rewards, a column named like an argument, a signature that cannot be read, or required
            parameters that are no column: all of the problems, with the rewards and the columns there are.
    """
    problems = [] if rewards else ["reward: expected at least one, got none"]
    problems += [f"column {name!r} has the name of a reward's argument" for name in ARGUMENTS if name in column_names]
    known = dict.fromkeys((*ARGUMENTS, *column_names), ())
    for name, weighted in rewards.items():
        try:
            missing = arguments(weighted.function, known)[0]
        except (TypeError, ValueError) as error:
            problems.append(f"reward {name!r}: its signature cannot be read: {error}")
            continue
        problems += [
            f"reward {name!r}: parameter {parameter!r} is no column of the data; there are {sorted(column_names)}"
            for parameter in missing
        ]
    if problems:
        raise RewardError("; ".join(problems))


class Scoring:
    """What the rewards give some completions, each of which may be handed over as soon as it is there.

    Rewards with a ``timeout`` work on it in worker processes meanwhile, and coroutine functions on an event loop; the
    others are called once, with all rows. A function receives by name what its signature names of ``prompts``,
    ``completions``, ``completion_ids`` and the columns; all of it if it has ``**kwargs``. What `functools.partial`
    bound is never replaced by a column. Where a reward has ``messages``, each prompt and each completion is a list of
    chat messages; what is returned, and errors, are about the texts all the same.

    Args:
        rewards: Name -> function and weight.
        prompts: [B] the prompt of each completion.
        columns: Name -> [B] what else the data set knows of the row.
        poll: Called while workers are waited for; may raise to give up.

    Raises:
        RewardError: What `check_columns` finds, or columns of another length than ``prompts``.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardSpec],
        prompts: "Sequence[Prompt]",
        columns: Mapping[str, Sequence[Any]],
        poll: Callable[[], None] | None = None,
    ) -> None:
        check_columns(rewards, columns)
        for name, values in columns.items():
            if len(values) != len(prompts):
                raise RewardError(f"{name!r}: expected {len(prompts)} values, got {len(values)}")
        self._rewards = rewards
        self._poll = poll
        self._inputs = {"prompts": prompts, **columns}
        self._calls = {
            name: coroutines.Calls(
                name, one.function, seconds=one.timeout, retries=one.retries, concurrency=one.concurrency
            )
            for name, one in rewards.items()
            if is_coroutine_function(one.function)
        }
        self._begun: dict[str, dict[int, workers.Pending | coroutines.Pending]] = {
            name: {} for name in rewards if rewards[name].timeout or name in self._calls
        }

    @property
    def may_begin(self) -> bool:
        """Whether `begin` does anything: whether a reward has a timeout or is a coroutine."""
        return bool(self._begun)

    def begin(self, row: int, text: str, ids: Sequence[int]) -> None:
        """Start on one completion, given its row, its text and its token ids, with the rewards that need not wait."""
        for name in self._begun:
            self._submit(name, row, {"completions": text, "completion_ids": ids})

    def finish(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]] | None) -> "Scores":
        """Start on the completions that were not begun, and wait for all.

        Args:
            completions: [B]
            completion_ids: [B] their tokens; None: no reward may ask for them.

        Raises:
            RewardError: Arguments of unequal length; a function that raises in this process, or does not return one
                finite number, list of steps or None per completion; or one that failed in its workers for more than
                its ``max_failed``. It names the reward, the row and the text's beginning.
        """
        sampled: dict[str, Sequence[Any]] = {"completions": completions}
        if completion_ids is not None:
            sampled["completion_ids"] = completion_ids
        inputs = {**self._inputs, **sampled}
        for name, values in inputs.items():
            if len(values) != len(completions):
                raise RewardError(f"{name!r}: expected {len(completions)} values, got {len(values)}")
        for name, begun in self._begun.items():
            for row in range(len(completions)):
                if row not in begun:
                    self._submit(name, row, {key: values[row] for key, values in sampled.items()})
        scores: dict[str, list[Score]] = {}
        failed: dict[str, float] = {}
        try:
            for name, weighted in self._rewards.items():
                if name in self._begun:
                    scores[name], failed[name] = self._awaited(name, weighted, completions)
                else:
                    scores[name] = checked(name, _call(name, weighted, inputs), completions)
        finally:
            for calls in self._calls.values():
                calls.cancel()
        return Scores(scores, failed)

    def _awaited(self, name: str, weighted: RewardSpec, completions: Sequence[str]) -> tuple[list[Score], float]:
        """What a reward gives that is called for each completion by itself, and the fraction on which it failed."""
        outcomes: list[Any] = []
        failures: list[tuple[int, workers.Failure]] = []
        most = weighted.max_failed * len(completions)
        for row in range(len(completions)):
            outcomes += self._begun[name][row].result(self._poll)
            if isinstance(outcomes[row], workers.Failure):
                failures.append((row, outcomes[row]))
            if len(failures) > most and name in self._calls:
                break  # each of the others might take its time, too
        if len(failures) > most:
            row, failure = failures[0]
            rest = len(completions) - len(outcomes)
            raise RewardError(
                f"reward {name!r} failed on {len(failures)} of {len(completions)} completions (allowed fraction: "
                f"reward.{name}.max_failed={weighted.max_failed}); first on row {row}, {failure.kind}: "
                f"{failure.message}, completion {beginning(completions[row])}"
                + (f"; the last {rest} were not waited for" if rest else "")
            )
        values = checked(name, single(name, outcomes), completions)
        kept = [
            weighted.failed_score if isinstance(outcome, workers.Failure) else value
            for outcome, value in zip(outcomes, values, strict=True)
        ]
        return kept, len(failures) / max(len(completions), 1)

    def _submit(self, name: str, row: int, sampled: Mapping[str, Any]) -> None:
        weighted = self._rewards[name]
        known = {key: [values[row]] for key, values in self._inputs.items()}
        call = _passed(weighted, known | {key: [value] for key, value in sampled.items()})
        self._begun[name][row] = (
            self._calls[name].submit(call)
            if name in self._calls
            else workers.submit(weighted.function, [call], seconds=weighted.timeout or 0.0)
        )


@dataclass(frozen=True)
class Scores:
    """What every reward gave the completions."""

    values: Mapping[str, Sequence[Score]]
    """Name -> [B] as the functions returned them: a number, the steps, or None where it does not apply."""
    failed: Mapping[str, float]
    """Name -> the fraction of the completions on which a reward with a timeout, or a coroutine, failed."""


def score(
    rewards: Mapping[str, RewardSpec],
    prompts: "Sequence[Prompt]",
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> dict[str, list[float | None]]:
    """What each reward gives each completion; arguments, errors and order as in `Scoring`.

    Returns:
        Name -> [B] finite numbers, or None where the reward does not apply; of steps, their mean.
    """
    scores = Scoring(rewards, prompts, columns).finish(completions, completion_ids)
    return {name: [scalar(value) for value in values] for name, values in scores.values.items()}


def _call(name: str, weighted: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """Call a reward in this process; an exception becomes one that names the first row that raises by itself."""
    with doing(f"reward {name!r}"):
        try:
            scores = _invoke(weighted, inputs)
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"reward {name!r} raised {describe_error(error)}; {_culprit(weighted, inputs)}. "
                f"(reward.{name}.timeout=SECONDS scores completions in worker processes, where up to "
                "reward.NAME.max_failed of them may fail)"
            ) from error
    signals.current().check()  # a signal may have come while the reward took long
    return scores


def _invoke(weighted: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """What the function returns, as plain values: a generator raises only when it is read."""
    passed = _passed(weighted, inputs)
    parameters = inspect.signature(weighted.function).parameters.values()
    first = [passed.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in passed]
    return to_plain(weighted.function(*first, **passed))


def _passed(weighted: RewardSpec, known: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The arguments that the function takes, copied, so that one reward cannot reorder what the next one sees."""
    passed = {name: list(values) for name, values in arguments(weighted.function, known)[1].items()}
    if weighted.messages:
        passed |= {
            name: [_messages(value, _ROLES[name]) for value in passed[name]] for name in _ROLES if name in passed
        }
    return passed


def _messages(given: "Prompt", role: str) -> list[dict[str, str]]:
    """A text as one chat message of ``role``; chat messages as they are, copied; token ids as their numbers."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    return [dict(one) if isinstance(one, dict) else {"role": role, "content": str(one)} for one in given]


def _culprit(weighted: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> str:
    for row, text in enumerate(inputs["completions"]):
        try:
            _invoke(weighted, {name: values[row : row + 1] for name, values in inputs.items()})
        except (Exception, SystemExit) as error:
            return f"row {row} raises {describe_error(error)}, completion {beginning(text)}"
    return "no row raises when it is scored alone"


def single(name: str, outcomes: Sequence[Any]) -> list[Any]:
    """What a function returned that was called with one completion at a time; None for failures."""
    values = []
    for outcome in outcomes:
        listed = [None] if isinstance(outcome, workers.Failure) else outcome
        if not isinstance(listed, list | tuple) or len(listed) != 1:
            raise RewardError(f"reward {name!r}: expected a list with one score for one completion, got {listed!r:.80}")
        values.append(listed[0])
    return values


def checked(name: str, result: Any, completions: Sequence[str]) -> list[Score]:
    """``result`` as to_plain floats, steps and Nones, one per completion."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise RewardError(f"reward {name!r}: expected a list with a number or None per completion, got {result!r:.80}")
    values = list(result)
    if len(values) != len(completions):
        raise RewardError(f"reward {name!r}: expected {len(completions)} scores, got {len(values)}")
    scores: list[Score] = []
    for row, (value, text) in enumerate(zip(values, completions, strict=True)):
        score = (
            _steps(value, len(text)) if isinstance(value, list | tuple) else None if value is None else _number(value)
        )
        if isinstance(score, float) and not math.isfinite(score):
            raise RewardError(
                f"reward {name!r}: expected a finite number, (end, score) pairs with ends from 1 to {len(text)}, or "
                f"None, got {value!r:.80} for row {row}, completion {beginning(text)}"
            )
        scores.append(score)
    return scores


def _steps(pairs: Sequence[Any], length: int) -> Score:
    """``pairs`` as (end, score) tuples in the order of their ends; NaN if they are no such pairs."""
    steps: list[tuple[int, float]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return math.nan
        end, value = _number(pair[0]), _number(pair[1])
        if not (end.is_integer() and 1 <= end <= length and math.isfinite(value)):
            return math.nan
        steps.append((int(end), value))
    return tuple(sorted(steps))


def _number(value: Any) -> float:
    """``value`` as a float; NaN if it is no number."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def beginning(text: str) -> str:
    """The beginning of a text, for messages."""
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
