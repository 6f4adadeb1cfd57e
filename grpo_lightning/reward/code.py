"""A reward for Python programs that pass tests: they run in a sandbox, and the right outputs stay outside."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_lightning.reward.accuracy import FENCE, answer_text, fenced_blocks, prepend_prefills, tag
from grpo_lightning.reward.spec import score_rows
from grpo_lightning.sandbox.client import Limits, Outcome, run

_MAX_CHARACTERS = 100_000  # characters of a program
_LANGUAGES = ("", "py", "python", "python3")
_TOLERANCE = 1e-9  # of numbers with a fraction, as they come from sums in another order
_MAX_DEPTH = 100  # lists and mappings in one another, of a result

_CALL = """
def __call(name, arguments):
    import json, sys
    owner, _, own = name.rpartition(".")
    function = getattr(globals()[owner](), own) if owner else globals()[own]
    sys.stdout.write("\\n" + json.dumps(function(*json.loads(arguments))))
__call(%r, %r)
"""
"""Appended to a program whose function is called: the result is its last line, in JSON."""


class Case(NamedTuple):
    """One test of a program."""

    stdin: str
    expected: Any  # stays out of the sandbox
    call: str = ""  # appended to call a function


def code(
    completions: Sequence[str],
    tests: Sequence[Any],
    *,
    all_or_nothing: bool,
    seconds: float,
    cpu_seconds: int,
    seconds_in_all: float,
    memory_mb: int,
    prefills: Sequence[str] = (),
    **_: Any,
) -> list[float | None]:
    """The share of the tests that the program in the completion passes, see `program`; 0.0 without a program.

    A test passes if the program ends in its sandbox with status 0 and has printed what is expected, white space at the
    ends of lines and of the text aside, or if its function has returned it. The first that runs out of time ends the
    rest, which count as failed.

    Args:
        completions: [B]
        tests: [B] lists of ``{input: text, output: text}``, or of ``{function: name, args: [...], output: value}``, or
            such a list as JSON. Numbers that a function returns may be off by a billionth if they have fractions.
        all_or_nothing: Whether a program gets 1.0 for passing all tests and else 0.0.
        seconds: Wall-clock time for one test.
        cpu_seconds: CPU time for one test.
        seconds_in_all: Wall-clock time for all tests of a completion; those that are not begun then count as failed.
        memory_mb: Of address space, in units of 2**20 bytes.
        prefills: [B] see `prepend_prefills`.

    Raises:
        ValueError: Tests are not as above.
        Unavailable: The machine has no sandbox.
    """
    limits = Limits(seconds=seconds, cpu_seconds=cpu_seconds, memory_mb=memory_mb)

    def score(completion: str, given: Any) -> float:
        cases, text = _cases(given), program(completion)
        passed = 0 if text is None else _count_passed(text, cases, limits, seconds_in_all, all_or_nothing)
        return float(passed == len(cases)) if all_or_nothing else passed / len(cases)

    return score_rows(score, prepend_prefills(completions, prefills), tests)


def program(completion: str) -> str | None:
    """The program that a completion gives as its answer, or None.

    It is the last complete block between fences ```python (or py, python3, or no language) of the answer text, and of
    an answer in tags without a fence all of it.
    """
    answer = answer_text(completion)
    whole = [answer] if FENCE not in answer and tag(completion, "answer") else []
    found = (fenced_blocks(answer, _LANGUAGES) or whole or [""])[-1]
    return found if found.strip() and len(found) <= _MAX_CHARACTERS else None


def _cases(given: Any) -> list[Case]:
    """The tests of a row, checked."""
    listed = json.loads(given) if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"tests: expected a list with at least one test, got {given!r:.80}")
    cases = [_case(one) for one in listed]
    if all(not case.call and not case.expected.strip() for case in cases):
        raise ValueError(f"tests: no test expects any output, so every silent program passes; got {given!r:.80}")
    return cases


def _case(given: Any) -> Case:
    # Rows of parquet have all keys, with null where a test has none.
    known = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if known.keys() == {"input", "output"} and all(isinstance(value, str) for value in known.values()):
        return Case(known["input"], known["output"])
    if known.keys() != {"function", "args", "output"}:
        raise ValueError(
            "tests: expected {input: text, output: text} or {function: NAME or CLASS.METHOD, args: [...], output: "
            f"value other than null}}, got {given!r:.80}"
        )
    return Case("", known["output"], _CALL % (known["function"], json.dumps(known["args"])))


def _count_passed(text: str, cases: Sequence[Case], limits: Limits, seconds_in_all: float, all_or_nothing: bool) -> int:
    passed, late = 0, time.monotonic() + seconds_in_all
    for case in cases:
        if time.monotonic() >= late:
            break
        outcome = run(f"{text}\n{case.call}" if case.call else text, case.stdin, limits)
        is_right = outcome.is_well and _is_right(outcome, case)
        passed += is_right
        if outcome.ended == "time" or (all_or_nothing and not is_right):
            break
    return passed


def _is_right(outcome: Outcome, case: Case) -> bool:
    if not case.call:
        return _lines(outcome.stdout) == _lines(case.expected)
    try:
        return _are_equal(json.loads(outcome.stdout.rpartition("\n")[2]), case.expected, _MAX_DEPTH)
    except (ValueError, ArithmeticError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _are_equal(given: Any, expected: Any, depth: int) -> bool:
    """Whether two values of JSON are the same; true is no 1."""
    if depth == 0 or isinstance(given, bool) != isinstance(expected, bool):
        return False
    if isinstance(expected, list | tuple):
        is_list = isinstance(given, list) and len(given) == len(expected)
        return is_list and all(_are_equal(*pair, depth - 1) for pair in zip(given, expected, strict=True))
    if isinstance(expected, Mapping):
        is_same = isinstance(given, Mapping) and given.keys() == expected.keys()
        return is_same and all(_are_equal(given[key], value, depth - 1) for key, value in expected.items())
    if isinstance(expected, int | float) and isinstance(given, int | float):
        if isinstance(expected, int) and isinstance(given, int):
            return given == expected
        return math.isclose(given, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return type(given) is type(expected) and bool(given == expected)
