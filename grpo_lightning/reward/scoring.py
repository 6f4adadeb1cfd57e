"""Calling reward functions: in this process, in workers, or as coroutines; what they return is checked."""

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from grpo_lightning.console import single_line
from grpo_lightning.distributed import signals
from grpo_lightning.reward.spec import (
    ARGUMENTS,
    Failure,
    RewardError,
    RewardSpec,
    Score,
    applies,
    arguments,
    describe_error,
    innermost,
    is_coroutine_function,
    is_missing,
    to_plain,
)

if TYPE_CHECKING:  # types imports torch, which worker processes can do without
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_CHECKED = (
    *("exact", "numeric", "math", "countdown", "code"),
    *("repetition", "length", "soft_overlong", "pattern", "json_schema"),
)
"""Rewards that are fast on an empty completion, and refuse right answers and settings that are of no use."""
_ROLES = {"prompts": "user", "completions": "assistant"}
_SHOWN_CHARACTERS = 80
_ONE_COMPLETION = ("completion", "prompt", "response", "solution_str", "predict", "prediction", "predict_str")
"""Parameters of functions that score one completion, as verl and its relatives call them."""


def check_columns(rewards: Mapping[str, RewardSpec], column_names: Collection[str]) -> None:
    """Check that every reward can be called with these columns, before a run; a RewardError names all problems."""
    problems = [] if rewards else ["reward: expected at least one, got none"]
    taken = [name for name in (*ARGUMENTS, "prefills") if name in column_names]
    problems += [f"column {name!r} has the name of a reward's argument" for name in taken]
    known = dict.fromkeys((*ARGUMENTS, *column_names), ())
    for name, spec in rewards.items():
        for parameter in arguments(spec.function, known)[0]:
            hint = f"data.columns takes it from another one, or from a field: {{…, {parameter}: COLUMN.FIELD}}"
            if parameter in _ONE_COMPLETION:
                hint = "a function of one completion is a PerCompletion: reward=custom_per_completion"
            elif parameter == "trainer_state":
                hint = f"rewards do not see the trainer; reward.{name}.weight may change with the steps"
            problems.append(
                f"reward {name!r}: parameter {parameter!r} is no column of the data; there are {sorted(column_names)} "
                f"({hint})"
            )
    if problems:
        raise RewardError("; ".join(problems))


def check_rows(rewards: Mapping[str, RewardSpec], rows: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
    """Try rewards of this package on (prompt, columns) pairs before a run, as if all completions were empty.

    A right answer that a reward does not apply to is a warning, as long as it applies to others.

    Raises:
        RewardError: A right answer, or a setting of a reward, is of no use.
    """
    for name, spec in rewards.items():
        function = innermost(spec.function)
        if getattr(function, "__name__", "") not in _CHECKED or "grpo_lightning.reward." not in function.__module__:
            continue
        required = arguments(spec.function, dict.fromkeys(ARGUMENTS))[0]
        tried = [
            row
            for row, (_, columns) in enumerate(rows)
            if applies(name, columns.get("data_rewards")) and not any(is_missing(columns[key]) for key in required)
        ]
        refused, unscored = {}, {}
        for row in tried if required else tried[:1]:  # settings are the same for all
            prompt, columns = rows[row]
            inputs = {"prompts": prompt, **columns, "completions": "", "completion_ids": []}
            try:
                if None in spec.function(**_arguments(spec, {key: [value] for key, value in inputs.items()})):
                    unscored[row] = f"{columns[required[0]]!r:.80} cannot be compared; reward=[exact] takes any text"
            except Exception as error:
                refused[row] = describe_error(error)
        for row, problem in [*refused.items(), *unscored.items()][:1]:
            count = len(refused) + len(unscored)
            text = f"reward {name!r} cannot score {count} of {len(tried)} rows, first this: {problem}"
            if refused or count == len(tried):
                raise RewardError(text, row=row)
            log.warning("%s (prompt %s)", single_line(text), _beginning(str(rows[row][0])))


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
    ``completions``, ``completion_ids`` and the columns; all of it if it has ``**kwargs``.

    Args:
        rewards: Name -> function and settings.
        prompts: [B] the prompt of each completion.
        columns: Name -> [B] what else the data set knows of the row.
        poll: Called while results are waited for; may raise to give up.
        prefills: [B] what the rendered prompt has begun of the model's turn, see `accuracy.prefill`; functions get it
            where there is any.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardSpec],
        prompts: "Sequence[Prompt]",
        columns: Mapping[str, Sequence[Any]],
        poll: Callable[[], None] | None = None,
        prefills: Sequence[str] = (),
    ) -> None:
        check_columns(rewards, columns)
        self._rewards, self._poll = rewards, poll
        self._inputs = {"prompts": prompts, **columns} | ({"prefills": prefills} if any(prefills) else {})
        listed = columns.get("data_rewards") or [None] * len(prompts)
        self._rows = {name: [row for row, one in enumerate(listed) if applies(name, one)] for name in rewards}
        coroutines = {name for name, spec in rewards.items() if is_coroutine_function(spec.function)}
        self._results: dict[str, dict[int, Any]] = {
            name: {} for name, spec in rewards.items() if spec.timeout or name in coroutines
        }
        if self._results:
            from grpo_lightning.reward import workers

            self._workers = workers
            self._coroutines = {name: workers.Coroutines(name, rewards[name]) for name in coroutines}

    @property
    def may_begin(self) -> bool:
        """Whether a reward has a timeout or is a coroutine, so that `begin` does something."""
        return bool(self._results)

    def begin(self, row: int, text: str, ids: Sequence[int]) -> None:
        """Start to score one completion with the rewards that have a timeout or are coroutines."""
        for name in self._results:
            if row in self._rows[name]:
                self._submit(name, row, {"completions": text, "completion_ids": ids})

    def finish(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]] | None) -> Scores:
        """Start on the completions that were not begun, and wait for all.

        Args:
            completions: [B]
            completion_ids: [B] their tokens; None: no reward may ask for them.

        Raises:
            RewardError: A function raises in this process, does not return one finite number, list of steps or None
                per completion, or failed in its workers for more than its ``max_failed``.
        """
        sampled: dict[str, Sequence[Any]] = {"completions": completions}
        if completion_ids is not None:
            sampled["completion_ids"] = completion_ids
        inputs = {**self._inputs, **sampled}
        for key, rows in inputs.items():
            if len(rows) != len(completions):
                raise RewardError(f"{key!r}: expected {len(completions)} values, got {len(rows)}")
        for name, begun in self._results.items():
            for row in self._rows[name]:
                if row not in begun:
                    self._submit(name, row, {key: values[row] for key, values in sampled.items()})
        scores: dict[str, list[Score]] = {}
        failed: dict[str, float] = {}
        try:
            for name, spec in self._rewards.items():
                if name in self._results:
                    scores[name], failed[name] = self._collect(name, spec, completions)
                else:
                    scores[name] = self._score(name, spec, inputs)
        except RewardError as error:
            if error.row is not None:
                error.inputs = {key: values[error.row] for key, values in self._inputs.items()}
            raise
        finally:
            for calls in self._coroutines.values() if self._results else ():
                calls.cancel()
        return Scores(scores, failed)

    def _submit(self, name: str, row: int, sampled: Mapping[str, Any]) -> None:
        spec = self._rewards[name]
        inputs = {key: [values[row]] for key, values in self._inputs.items()}
        call = _arguments(spec, inputs | {key: [value] for key, value in sampled.items()})
        self._results[name][row] = (
            self._coroutines[name].submit(call)
            if name in self._coroutines
            else self._workers.submit(spec.function, call, seconds=spec.timeout or 0.0).result
        )

    def _score(self, name: str, spec: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> list[Score]:
        """Call a reward in this process with the rows that it applies to."""
        scores: list[Score] = [None] * len(inputs["completions"])
        rows = self._rows[name]
        chosen = inputs
        if len(rows) < len(scores):
            chosen = {key: [values[row] for row in rows] for key, values in inputs.items()}
        try:
            found = _read_scores(name, _call(name, spec, chosen), chosen["completions"]) if rows else []
        except RewardError as error:
            error.row = None if error.row is None else rows[error.row]
            raise
        for row, score in zip(rows, found, strict=True):
            scores[row] = score
        return scores

    def _collect(self, name: str, spec: RewardSpec, completions: Sequence[str]) -> tuple[list[Score], float]:
        """Wait for a reward's calls: [B] scores, and the fraction of the completions on which it failed."""
        values: list[Any] = []
        failures: dict[int, Failure] = {}
        for row in range(len(completions)):
            if row not in self._results[name]:
                values.append(None)
                continue
            value = self._results[name][row](self._poll)
            if isinstance(value, Failure):
                failures[row], value = value, [None]
            values += _check_length(name, value, 1)
            if len(failures) > spec.max_failed * len(completions):  # the others might take their time, too
                first, failure = next(iter(failures.items()))
                raise RewardError(
                    f"reward {name!r} failed on {len(failures)} of {row + 1} completions (allowed fraction of all "
                    f"{len(completions)}: reward.{name}.max_failed={spec.max_failed}); first on row {first}, "
                    f"{failure.kind}: {failure.message}{_advice(name, spec, failure.message)}, completion "
                    f"{_beginning(completions[first])}",
                    row=first,
                )
        scores = _read_scores(name, values, completions)
        filled = [spec.failed_score if row in failures else score for row, score in enumerate(scores)]
        return filled, len(failures) / max(len(completions), 1)


def _call(name: str, spec: RewardSpec, inputs: Mapping[str, Sequence[Any]]) -> Any:
    """Call a reward in this process."""

    def call(rows: Mapping[str, Sequence[Any]]) -> Any:
        return to_plain(spec.function(**_arguments(spec, rows)))  # a generator raises only when it is read

    try:
        scores = call(inputs)
    except (Exception, SystemExit) as error:
        what, failing = describe_error(error), None
        for row in range(len(inputs["completions"])):  # the first that raises the same by itself
            try:
                call({key: [values[row]] for key, values in inputs.items()})
            except (Exception, SystemExit) as own:
                if describe_error(own) == what:
                    what, failing = f"{what} on row {row}, completion {_beginning(inputs['completions'][row])}", row
                    break
        advice = _advice(name, spec, what) or (
            f". (With reward.{name}.timeout=SECONDS it runs in worker processes, where a fraction of "
            f"reward.{name}.max_failed may fail.)"
        )
        raise RewardError(f"reward {name!r} raised {what}{advice}", row=failing) from error
    signals.current_signals().check()  # a signal may have come while the reward took long
    return scores


def _advice(name: str, spec: RewardSpec, problem: str) -> str:
    """What to set where a function seems to read texts as chat messages, as TRL's do for conversational data."""
    is_about_text = re.search(r"^TypeError: string indices must be integers|^AttributeError: 'str' object has", problem)
    if not is_about_text or spec.takes_messages:
        return ""
    return f'; if it reads chat messages, completion[0]["content"], set reward.{name}.messages=true'


def _arguments(spec: RewardSpec, known: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The arguments that the function takes, copied, so that one reward cannot change what the next one sees."""
    passed = {name: list(values) for name, values in arguments(spec.function, known)[1].items()}
    for name, role in _ROLES.items() if spec.takes_messages else ():
        if name in passed:
            passed[name] = [_messages(value, role) for value in passed[name]]
    return passed


def _messages(given: "Prompt", role: str) -> list[dict[str, str]]:
    """A text as one chat message of ``role``; chat messages copied; token ids as their numbers."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    return [dict(item) if isinstance(item, dict) else {"role": role, "content": str(item)} for item in given]


def _check_length(name: str, result: Any, size: int) -> list[Any]:
    if not isinstance(result, list) or len(result) != size:
        got = len(result) if isinstance(result, list) else f"{result!r:.80}"
        raise RewardError(f"reward {name!r}: expected {size} scores, got {got}")
    return result


def _read_scores(name: str, result: Any, completions: Sequence[str]) -> list[Score]:
    """What a reward returned as plain floats, steps and Nones, one per completion."""
    scores: list[Score] = []
    for row, (value, text) in enumerate(zip(_check_length(name, result, len(completions)), completions, strict=True)):
        try:
            if value is not None:
                value = _steps(value, len(text)) if isinstance(value, list | tuple) else _number(value)
            scores.append(value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"reward {name!r}: expected a finite number, (end, score) pairs with ends from 1 to {len(text)}, or "
                f"None, got {value!r:.80} for row {row}, completion {_beginning(text)}",
                row=row,
            ) from None
    return scores


def _steps(pairs: Sequence[Any], length: int) -> Score:
    """(end, score) tuples in the order of their ends."""
    steps = [(_number(end), _number(value)) for end, value in pairs]
    if not all(end.is_integer() and 1 <= end <= length for end, _ in steps):
        raise ValueError
    return tuple(sorted((int(end), value) for end, value in steps))


def _number(value: Any) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _beginning(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
