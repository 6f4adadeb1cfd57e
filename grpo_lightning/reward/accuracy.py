"""Rewards for the right answer: [B] scores for [B] completions and columns.

Odd text of the model scores 0, and a missing right answer gives None. Completions are untrusted: they are read in time
that grows linearly with the text, and what a verifier would evaluate as Python is checked before.
"""

import logging
import math
import numbers
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpo_lightning.console import single_line
from grpo_lightning.reward.spec import Failure, arguments, describe_error, is_missing, score_rows

log = logging.getLogger(__name__)

FENCE = "```"  # begins and ends a block of code
MAX_SECONDS = 5.0  # of a verifier in a worker; a right answer takes less than half a second
_MAX_CHARACTERS = 10_000  # of an answer for a verifier; right ones of the default configurations have up to about 5,000
_WINDOW = 200  # characters before the last digit that can belong to its number
_MAX_DIGITS = 50
_FRAC = re.compile(r"\\[dt]?frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}")
_VALUE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}%])[-\u2212])?\$?(?P<number>{_VALUE})(?:[eE](?P<exponent>[-+]?[0-9]+))?"
    rf"(?: ?/ ?(?P<divisor>{_VALUE}))?",
    re.ASCII,
)
_FORMULA = re.compile(
    r"\\(?!(?:text|mathrm|mbox|[dt]?frac|circ|degree|left|right|boxed|quad)(?![A-Za-z]))[A-Za-z]"
    r"|\^(?!\s?\{?\s?\\circ)|[<>\u2264\u2265\u221e\u00b1\u221a\u03c0\u222a]"
)
"""What a right answer holds that is no single number: a root, a power, an interval, a relation."""
_OPENING = re.compile("<think>|<answer>")
_NO_WIDTH = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"))
_verifiers: dict[str, "Verifier"] = {}
_warned: set[str] = set()


# --- reading a completion


def prepend_prefills(completions: Sequence[str], prefills: Sequence[str]) -> list[str]:
    """[B] completions, each with the `prefill` of its prompt in front; ``prefills=()`` for none."""
    return [begun + text for begun, text in zip(prefills, completions, strict=True)] if prefills else [*completions]


def prefill(opening: str) -> str:
    """What a prompt has written of the model's turn, from its first tag on, such as "<think>" by a chat template."""
    first = _OPENING.search(opening)
    return opening[first.start() :] if first else ""


def tag(text: str, name: str) -> str | None:
    """The stripped content of the last complete ``<name>…</name>``, of nested ones the innermost, or None."""
    opening, closing = f"<{name}>", f"</{name}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)].strip()


def answer_text(completion: str) -> str:
    """What the model answers: the last complete ``<answer>…</answer>``, else all but its thoughts; stripped.

    Thoughts are ``<think>…</think>``, and also a part whose ``<think>`` stands in the prompt or whose ``</think>`` was
    cut off by the length limit: a number that the model was still thinking about is no answer.
    """
    answer = tag(completion, "answer")
    return strip_thoughts(completion) if answer is None else answer


def strip_thoughts(text: str) -> str:
    """All but the thoughts of a text, stripped, see `answer_text`."""
    kept, position = [], 0
    while position >= 0:
        start = text.find("<think>", position)
        kept.append(text[position:start] if start >= 0 else text[position:])
        end = text.find("</think>", start) if start >= 0 else -1
        position = end + len("</think>") if end >= 0 else -1
    return "".join(kept).rpartition("</think>")[2].strip()


def fenced_blocks(text: str, languages: Collection[str]) -> list[str]:
    """The contents of the complete code blocks in some languages: "" is that of a fence without a language."""
    blocks: list[str] = []
    lines: list[str] | None = None
    is_wanted = False
    for line in text.split("\n"):
        mark = line.strip()
        if lines is None and mark.startswith(FENCE):
            lines, is_wanted = [], mark[len(FENCE) :].strip().lower() in languages
        elif lines is not None and mark == FENCE:
            blocks += ["\n".join(lines) + "\n"] if is_wanted else []
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks


def normalize(text: str) -> str:
    """``text`` in the Unicode form NFKC, without characters of no width and white space at its ends."""
    return unicodedata.normalize("NFKC", text).translate(_NO_WIDTH).strip()


def numbers_in(text: str) -> list[str]:
    """The numbers in ``text`` as they are written, see `numeric`."""
    return [match[0] for match in _NUMBER.finditer(_FRAC.sub(r" \1/\2", text))]


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, or None: there is none, its divisor is 0, or it has more than 50 digits."""
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    matches = list(_NUMBER.finditer(_FRAC.sub(r"\1/\2", text[max(end - _WINDOW, 0) : end + 1])))
    if not matches:
        return None
    last = matches[-1]
    number, divisor = (last[group] or "1" for group in ("number", "divisor"))
    exponent = last["exponent"] or "0"
    if max(len(number), len(divisor), len(exponent)) > _MAX_DIGITS or abs(int(exponent)) > _MAX_DIGITS:
        return None
    bottom = Fraction(divisor.replace(",", ""))
    if not bottom:
        return None
    value = Fraction(number.replace(",", "")) * Fraction(10) ** int(exponent) / bottom
    return -value if last["sign"] else value


# --- the right answer


def right_text(answer: Any) -> str:
    """A right answer as text: of a list of one that, see `answer_text`, and a whole number without ".0"."""
    value = answer
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    is_text = isinstance(value, str)
    if isinstance(value, bool) or not (is_text or isinstance(value, numbers.Real)) or not str(value).strip():
        remedy = "data.map_row makes it one, reward=[code] runs tests"
        raise ValueError(f"answer: expected text or a number, got {answer!r:.80} ({remedy})")
    if not is_text and math.isfinite(value) and value == int(value):
        return str(int(value))
    return answer_text(str(value)) or str(value).strip()


def exact(
    completions: Sequence[str], answer: Sequence[Any], *, prefills: Sequence[str] = (), **_: Any
) -> list[float | None]:
    """1.0 if the answer text is the right answer, else 0.0.

    Both are `normalize`. The float 21.0 as a right answer, which pandas makes of 21 in a column with missing values,
    is "21" as well as "21.0".
    """

    def score(completion: str, right: Any) -> float:
        return float(normalize(answer_text(completion)) in (normalize(right_text(right)), normalize(str(right))))

    return score_rows(score, prepend_prefills(completions, prefills), answer)


def numeric(
    completions: Sequence[str],
    answer: Sequence[Any],
    *,
    tolerance: float = 1e-6,
    prefills: Sequence[str] = (),
    **_: Any,
) -> list[float | None]:
    r"""1.0 if the last number of the answer text is the right one, |given − right| ≤ tolerance, else 0.0.

    Numbers are 1,234.5 or -3 or 1e-3 or 3/4 or \frac{3}{4}; a percent or dollar sign is ignored, so 50% is 50.
    The tolerance is absolute, since a relative one lets large integers be off by one.

    The right answer is what follows the last ####, if there is one, and then what follows the = of an equation.

    Raises:
        ValueError: A right answer holds no number, or more than one, as lists, intervals, dates and formulas do.
    """

    def score(completion: str, right: Any) -> float:
        given, expected = last_number(answer_text(completion)), _only_number(right)
        return float(given is not None and abs(given - expected) <= tolerance)

    return score_rows(score, prepend_prefills(completions, prefills), answer)


def demonstrated(
    completions: Sequence[str],
    completion: Sequence[str | Sequence[Mapping[str, str]]],
    answer: Sequence[Any] | None = None,
    task: Sequence[str] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    prefills: Sequence[str] = (),
) -> list[float | None]:
    """1.0 if the answer text is that of the demonstration; of reasoning_gym's tasks, what their verifiers give it.

    The right answer is the column ``answer``, else the answer text of the demonstration in ``completion``, a text or
    the messages of several turns.
    """
    if task is not None and metadata is not None:
        return reasoning_gym(completions, answer or [None] * len(completions), task, metadata, prefills=prefills)
    if answer is None:
        answer = [
            None if is_missing(text) else answer_text(text if isinstance(text, str) else text[-1]["content"])
            for text in completion
        ]
    return exact(completions, answer, prefills=prefills)


def of_source(
    completions: Sequence[str], data_verifier: Sequence[str], *, prefills: Sequence[str] = (), **columns: Sequence[Any]
) -> list[float | None]:
    """What the verifier of each row's source in a mixture gives it: a function of this module, by its name."""
    scores: list[float | None] = [None] * len(completions)
    inputs = {"completions": completions, **columns} | ({"prefills": prefills} if prefills else {})
    for name in dict.fromkeys(data_verifier):
        rows = [row for row, one in enumerate(data_verifier) if one == name]
        passed = arguments(globals()[name], {key: [values[row] for row in rows] for key, values in inputs.items()})[1]
        for row, score in zip(rows, globals()[name](**passed), strict=True):
            scores[row] = score
    return scores


def of_environment(turn_scores: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """The sum of an environment's own scores, given as (number of the turn from 0, score) pairs of each episode.

    With ``advantage=to_go`` each of them counts at the end of its turn.
    """
    return [float(sum(score for _, score in pairs)) for pairs in turn_scores]


def _only_number(answer: Any) -> Fraction:
    text = right_text(answer).rpartition("####")[2]
    if text.count("=") == 1:
        text = text.partition("=")[2]
    value = last_number(text)
    if value is None or len(numbers_in(text)) > 1 or _FORMULA.search(text):
        raise ValueError(
            f"answer: expected one number, got {answer!r:.80}; reward=[math] compares formulas, lists and intervals, "
            "reward=[exact] any text, and of a solution the number that follows #### counts"
        )
    return value


# --- reasoning_gym's verifiers


def reasoning_gym(
    completions: Sequence[str],
    answer: Sequence[str | None],
    task: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    task_config: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    prefills: Sequence[str] = (),
    **_: Any,
) -> list[float | None]:
    """What the task's own verifier gives the answer text, in [0, 1]; 0.0 for text that it cannot be given or raises on.

    Verifiers that evaluate text as Python, or do work that grows with the numbers in it, run in worker processes that
    are ended after a time. Text that could run code does not reach them: it is wrong.

    Args:
        completions: [B]
        answer: [B] the right answers; None in the tasks where any solution counts.
        task: [B] reasoning_gym dataset names.
        metadata: [B] the entries' metadata, unchanged: verifiers read the puzzle from it.
        task_config: [B] the data set's arguments where they are not its defaults; some verifiers read them.
        prefills: [B] see `prepend_prefills`.

    Raises:
        ValueError: An unknown task, a right answer that the verifier itself raises on, or a row of which its verifier
            would evaluate what could run code.
    """
    configs = task_config or [None] * len(completions)
    rows = zip(prepend_prefills(completions, prefills), answer, configs, strict=True)

    def begin(row: tuple[str, str | None, Any], name: str, data: Mapping[str, Any]) -> Callable[[], float]:
        completion, right, config = row
        return _begin_verifier(answer_text(completion), right, name, data, config or {})

    results = score_rows(begin, list(rows), task, metadata)  # all begin before the first is waited for
    return [None if result is None else result() for result in results]


def _begin_verifier(
    text: str, answer: str | None, task: str, metadata: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[[], float]:
    """Start to score an answer: a function that returns the score, in [0, 1].

    Text that the verifier cannot be given, or raises on, scores 0; the first of a task that it raises on is logged.
    """
    source = str(metadata.get("source_dataset", task))  # of a composite, the data set the entry comes from
    own_config = config if source == task else {}
    key = f"{source} {dict(own_config)!r}"
    verifier = _verifiers[key] = _verifiers.get(key) or Verifier(source, own_config)
    name = _EVALUATED.get(source, "")
    evaluated = answer if name == "answer" else metadata.get(name)
    if evaluated is not None and not is_harmless(str(evaluated)):
        raise ValueError(
            f"task {source!r}, {name}={single_line(repr(evaluated)[:80])}: the task's verifier would evaluate it; "
            "expected numbers, letters, lists and elementary functions"
        )
    right = answer.strip() if isinstance(answer, str) else ""
    if not may_be_verified(source, text, right):
        is_right = source in _EVALUATING and text == right != ""
        return lambda: float(is_right)  # of what must not be evaluated, only the data's own text is right
    entry = {"question": "", "answer": answer, "metadata": metadata}
    result = _start(verifier, source, text, entry)

    def score() -> float:
        value = result()
        if not isinstance(value, Failure):
            return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
        if right and value.kind != "timeout" and may_be_verified(source, right, right):
            broken = _start(verifier, source, answer or "", entry)()
            if isinstance(broken, Failure):
                raise ValueError(
                    f"task {source!r}: its verifier raised {broken.message} on the data set's own answer "
                    f"{answer!r:.80}; expected its unchanged `answer` and `metadata`"
                )
        if source not in _warned:
            _warned.add(source)
            message = "task %r: its verifier failed on a completion, which scores 0 (logged once): %.200s"
            log.warning(message, source, value.message)
        return 0.0

    return score


def may_be_verified(task: str, text: str, answer: str) -> bool:
    """Whether the verifier of a task can be given what the model answers; ``answer`` is the right one."""
    if task not in _EVALUATING and text == answer:
        return True
    return len(text) <= max(_MAX_CHARACTERS, 4 * len(answer)) and (task not in _EVALUATING or is_harmless(text))


def is_harmless(text: str) -> bool:
    """Whether `eval` or sympy's parser finds no names in a text but letters and elementary functions, no attributes.

    A text in quotes, which sympy would evaluate once more if it is joined from letters, is passed to no function.
    """
    rest = _DIGITS.sub(" ", text)
    is_quoted_call = "(" in rest and ("'" in rest or '"' in rest)
    names = _NAME.findall(rest)
    return not (is_quoted_call or _ATTRIBUTE.search(rest)) and all(len(n) == 1 or n in _FUNCTIONS for n in names)


_DIGITS = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[^\W\d]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[^\W\d]|\\")  # and no escaped characters of a string
_FUNCTIONS = frozenset(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt"))
_EVALUATING = {
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"),
    *("polynomial_multiplication", "intermediate_integration", "simple_integration"),
}
"""Tasks whose verifiers evaluate the model's text; they run in a worker."""
_SLOW = {"propositional_logic", "coin_flip", "rubiks_cube", "rush_hour"}
"""Others that do so: they try all truth values, or carry out moves one by one."""
_EVALUATED = {
    **dict.fromkeys(("number_sorting", "polynomial_multiplication"), "answer"),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), "integrand"),
    "bitwise_arithmetic": "problem",
}
"""Task -> what its verifier evaluates of a row of data, which may have been downloaded: the answer or its metadata."""


class Verifier:
    """A task's verifier; a worker makes its own when it unpickles it, before the time is counted."""

    def __init__(self, task: str, config: Mapping[str, Any]) -> None:
        from reasoning_gym.factory import create_dataset  # takes two seconds

        self._arguments, self._score = (task, dict(config)), create_dataset(task, **config).score_answer

    def __reduce__(self) -> tuple[Any, ...]:
        return Verifier, self._arguments

    def __call__(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(self._score(answer=answer, entry=entry))


def _start(verifier: Verifier, task: str, text: str, entry: Mapping[str, Any]) -> Callable[[], Any]:
    """Start a verifier, in a worker where it may be slow or run code; returns a function that waits for its score."""
    if task in _EVALUATING or task in _SLOW:
        from grpo_lightning.reward import workers

        return workers.submit(verifier, {"answer": text, "entry": entry}, seconds=MAX_SECONDS).result

    def call() -> float | Failure:
        try:
            return verifier(text, entry)
        except Exception as error:
            return Failure("exception", describe_error(error))

    return call
