"""Calling reward functions: in this process, in workers, or as coroutines; what they return is checked."""

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

if TYPE_CHECKING:  # types imports torch, which worker processes can do without
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
    for name, spec in rewards.items():
        try:
            missing = arguments(spec.function, known)[0]
        except (TypeError, ValueError) as error:
            problems.append(f"reward {name!r}: its signature cannot be read: {error}")
            continue
        problems += [
            f"reward {name!r}: parameter {parameter!r} is no column of the data; there are {sorted(column_names)}"
            for parameter in missing
        ]
    if problems:
        raise RewardError("; ".join(problems))


@dataclass(frozen=True)
class Scores:
    """What every reward gave the completions."""

    values: Mapping[str, Sequence[Score]]
    """Name -> [B] as the functions returned them: a number, the steps, or None where it does not apply."""
    failed: Mapping[str, float]
    """Name -> the fraction of the completions on which a reward with a timeout, or a coroutine, failed."""


class Scoring:
    """Scores the completions of one rollout, each of which may be passed as soon as it is there.

    Rewards with a ``timeout`` work on it in worker processes meanwhile, and coroutine functions on an event loop; the
    others are called once, with all rows. A function receives by name what its signature names of ``prompts``,
    ``completions``, ``completion_ids`` and the columns; all of it if it has ``**kwargs``. Where a reward has
    ``messages``, each prompt and each completion is a list of chat messages.

    Args:
        rewards: Name -> function and settings.
        prompts: [B] the prompt of each completion.
        columns: Name -> [B] what else the data set knows of the row.
        poll: Called while results are waited for; may raise to give up.

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
        self._rewards, self._poll = rewards, poll
        self._inputs = {"prompts": prompts, **columns}
        _check_lengths(self._inputs, len(prompts))
        self._calls = {
            name: coroutines.Calls(name, spec) for name, spec in rewards.items() if is_coroutine_function(spec.function)
        }
        self._pending: dict[str, dict[int, workers.Pending | coroutines.Pending]] = {
            name: {} for name, spec in rewards.items() if spec.timeout or name in self._calls
        }

    @property
    def may_begin(self) -> bool:
        """Whether `begin` does anything: whether a reward has a timeout or is a coroutine."""
        return bool(self._pending)

    def begin(self, row: int, text: str, ids: Sequence[int]) -> None:
        """Start on one completion, given its row, its text and its token ids, with the rewards that need not wait."""
        for name in self._pending:
            self._submit(name, row, {"completions": text, "completion_ids": ids})

    def finish(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]] | None) -> Scores:
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
        _check_lengths(inputs, len(completions))
        for name, begun in self._pending.items():
            for row in range(len(completions)):
                if row not in begun:
                    self._submit(name, row, {key: values[row] for key, values in sampled.items()})
        scores: dict[str, list[Score]] = {}
        failed: dict[str, float] = {}
        try:
            for name, spec in self._rewards.items():
                if name in self._pending:
                    scores[name], failed[name] = self._collect(name, spec, completions)
                else:
                    scores[name] = _checked(name, _call(name, spec, inputs), completions)
        finally:
            for calls in self._calls.values():
                calls.cancel()
        return Scores(scores, failed)

    def _submit(self, name: str, row: int, sampled: Mapping[str, Any]) -> None:
        spec = self._rewards[name]
        inputs = {key: [values[row]] for key, values in self._inputs.items()}
        call = _arguments(spec, inputs | {key: [value] for key, value in sampled.items()})
        self._pending[name][row] = (
            self._calls[name].submit(call)
            if name in self._calls
            else workers.submit(spec.function, call, seconds=spec.timeout or 0.0)
        )

    def _collect(self, name: str, spec: RewardSpec, completions: Sequence[str]) -> tuple[list[Score], float]:
        """Wait for a reward's calls: [B] scores, and the fraction of the completions on which it failed."""
        values: list[Any] = []
        failures: dict[int, workers.Failure] = {}
        for row in range(len(completions)):
            value = self._pending[name][row].result(self._poll)
            if isinstance(value, workers.Failure):
                failures[row], value = value, [None]
            if not isinstance(value, list) or len(value) != 1:
                raise RewardError(
                    f"reward {name!r}: expected a list with one score for one completion, got {value!r:.80}"
                )
            values += value
            if len(failures) > spec.max_failed * len(completions):  # the others might take their time, too
                first, failure = next(iter(failures.items()))
                raise RewardError(
                    f"reward {name!r} failed on {len(failures)} of {row + 1} completions (allowed fraction of all "
                    f"{len(completions)}: reward.{name}.max_failed={spec.max_failed}); first on row {first}, "
                    f"{failure.kind}: {failure.message}, completion {_beginning(completions[first])}"
                )
        scores = _checked(name, values, completions)
        filled = [spec.failed_score if row in failures else score for row, score in enumerate(scores)]
        return filled, len(failures) / max(len(completions), 1)


def score(
    rewards: Mapping[str, RewardSpec],
    prompts: "Sequence[Prompt]",
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> dict[str, list[float | None]]:
    """Score completions; arguments, errors and order as in `Scoring`.

    Returns:
        Name -> [B] finite numbers, or None where the reward does not apply; of steps, their mean.
    """
    scores = Scoring(rewards, prompts, columns).finish(completions, completion_ids)
    return {name: [scalar(value) for value in values] for name, values in scores.values.items()}


def _check_lengths(inputs: Mapping[str, Sequence[Any]], size: int) -> None:
    for name, values in inputs.items():
        if len(values) != size:
            raise RewardError(f"{name!r}: expected {size} values, got {len(values)}")


def _call(name: str, spec: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """Call a reward in this process; an exception becomes one that names the first row that raises by itself."""

    def invoke(rows: slice) -> Any:  # a generator raises only when it is read, as plain values
        return to_plain(spec.function(**_arguments(spec, {key: values[rows] for key, values in inputs.items()})))

    with doing(f"reward {name!r}"):
        try:
            scores = invoke(slice(None))
        except (Exception, SystemExit) as error:
            culprit = "no row raises when it is scored alone"
            for row, text in enumerate(inputs["completions"]):
                try:
                    invoke(slice(row, row + 1))
                except (Exception, SystemExit) as found:
                    culprit = f"row {row} raises {describe_error(found)}, completion {_beginning(text)}"
                    break
            raise RewardError(
                f"reward {name!r} raised {describe_error(error)}; {culprit}. (With reward.{name}.timeout=SECONDS it "
                f"runs in worker processes, where a fraction of reward.{name}.max_failed may fail.)"
            ) from error
    signals.current().check()  # a signal may have come while the reward took long
    return scores


def _arguments(spec: RewardSpec, known: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The arguments that the function takes, copied, so that one reward cannot change what the next one sees."""
    passed = {name: list(values) for name, values in arguments(spec.function, known)[1].items()}
    for name, role in _ROLES.items() if spec.messages else ():
        if name in passed:
            passed[name] = [_messages(value, role) for value in passed[name]]
    return passed


def _messages(given: "Prompt", role: str) -> list[dict[str, str]]:
    """A text as one chat message of ``role``; chat messages as they are, copied; token ids as their numbers."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    return [dict(item) if isinstance(item, dict) else {"role": role, "content": str(item)} for item in given]


def _checked(name: str, result: Any, completions: Sequence[str]) -> list[Score]:
    """What a reward returned as plain floats, steps and Nones, one per completion."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise RewardError(f"reward {name!r}: expected a list with a number or None per completion, got {result!r:.80}")
    values = list(result)
    if len(values) != len(completions):
        raise RewardError(f"reward {name!r}: expected {len(completions)} scores, got {len(values)}")
    scores: list[Score] = []
    for row, (value, text) in enumerate(zip(values, completions, strict=True)):
        score: Score = None
        if isinstance(value, list | tuple):
            score = _steps(value, len(text))
        elif value is not None:
            score = _number(value)
        if isinstance(score, float) and not math.isfinite(score):
            raise RewardError(
                f"reward {name!r}: expected a finite number, (end, score) pairs with ends from 1 to {len(text)}, or "
                f"None, got {value!r:.80} for row {row}, completion {_beginning(text)}"
            )
        scores.append(score)
    return scores


def _steps(pairs: Sequence[Any], length: int) -> Score:
    """(end, score) tuples in the order of their ends; NaN if ``pairs`` are no such pairs."""
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


def _beginning(text: str) -> str:
    """The beginning of a text, for messages."""
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
