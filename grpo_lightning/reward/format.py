"""Rewards for the form of a completion: [B] scores in [0, 1] for [B] texts. Odd text of the model scores 0."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from grpo_lightning.reward.accuracy import answer_text, prepend_prefills

log = logging.getLogger(__name__)

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_STEP = re.compile(
    r"Step [0-9]{1,3}:|^[ \t]{0,8}(?:[0-9]{1,3}\.|[-*\u2022])(?=[ \t])|\b(?:First|Second|Next|Finally),", re.MULTILINE
)
_MAX_JSON = 20_000  # characters of an answer

_warned: set[str] = set()


def format(completions: Sequence[str], *, prefills: Sequence[str] = (), **_: Any) -> list[float | None]:
    """1.0 if the whole completion is ``<think>…</think><answer>…</answer>``, else 0.0.

    Whitespace may surround and separate the two parts; each of the four tags stands there exactly once. A tag that the
    prompt has opened for the model counts as written.
    DeepSeek-R1, arXiv:2501.12948, section 2.2.2, made strict.
    """
    return [float(_is_formatted(completion.strip())) for completion in prepend_prefills(completions, prefills)]


def _is_formatted(text: str) -> bool:
    if not (text.startswith("<think>") and text.endswith("</answer>")) or any(text.count(tag) != 1 for tag in _TAGS):
        return False
    end, start = text.find("</think>"), text.find("<answer>")
    return end < start and not text[end + len("</think>") : start].strip()


def tag_count(completions: Sequence[str], *, prefills: Sequence[str] = (), **_: Any) -> list[float | None]:
    """A quarter for each of the four tags that stands in the completion exactly once; the prompt may have opened it."""
    return [sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for text in prepend_prefills(completions, prefills)]


def reasoning_steps(completions: Sequence[str], *, target: int, **_: Any) -> list[float | None]:
    """The number of markers of steps over ``target``, at most 1.

    Markers are "Step 1:", lines with "1." or a bullet, "First,", "Second,", "Next," and "Finally,".

    Open R1's reward of that name, github.com/huggingface/open-r1, src/open_r1/rewards.py, whose target is 3. There
    "1." counts at the beginning of the text only, here on every line; "1." and bullets (- * •) need a space after them.
    """
    return [min(1.0, sum(1 for _ in _STEP.finditer(completion)) / target) for completion in completions]


def keyword(completions: Sequence[str], *, words: Sequence[str], **_: Any) -> list[float | None]:
    """The fraction of the words that the completion contains; case is ignored, and a part of a longer word counts."""
    if isinstance(words, str) or not words:
        raise ValueError(f"words: expected a list of texts, got {words!r:.80}")
    folded = [word.casefold() for word in words]
    texts = [completion.casefold() for completion in completions]
    return [sum(word in text for word in folded) / len(folded) for text in texts]


def pattern(completions: Sequence[str], *, expression: str, seconds: float, **_: Any) -> list[float | None]:
    """1.0 if the regular expression is found in the completion within some seconds, else 0.0.

    It has the syntax of the package regex; (?i) at its beginning ignores case. A search that takes longer is logged
    once.
    """
    compiled = regex.compile(expression)

    def is_found(text: str) -> bool:
        try:
            return compiled.search(text, timeout=seconds) is not None
        except TimeoutError:
            if expression not in _warned:
                _warned.add(expression)
                message = "pattern %.80r: a search took more than %s s, which scores 0 (logged once)"
                log.warning(message, expression, seconds)
            return False

    return [float(is_found(completion)) for completion in completions]


def json_schema(
    completions: Sequence[str], *, schema: Mapping[str, Any] | str, prefills: Sequence[str] = (), **_: Any
) -> list[float | None]:
    """1.0 if the answer text is JSON that is valid under the schema, else 0.0.

    A fence of ```json … ``` around all of it is ignored. NaN and Infinity are no JSON, and neither is what has more
    than 20,000 characters, is nested too deeply for Python or has an integer of more than 4,300 digits.
    JSON Schema, json-schema.org, of the draft that ``$schema`` names, else the newest; nothing is fetched for a $ref.

    Args:
        completions: [B]
        schema: The schema, or the path of a JSON file that holds it.
        prefills: [B] see `prepend_prefills`.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    loaded = json.loads(Path(schema).read_text(encoding="utf-8")) if isinstance(schema, str) else schema
    kind = validator_for(loaded, default=Draft202012Validator)
    kind.check_schema(loaded)
    validator = kind(loaded, registry=Registry())

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    def is_valid(text: str) -> bool:
        text = re.sub(r"\A```(?:json)?\s*?\n?|```\Z", "", text[: _MAX_JSON + 1])
        try:
            return len(text) <= _MAX_JSON and bool(validator.is_valid(json.loads(text, parse_constant=refuse)))
        except (ValueError, ArithmeticError, RecursionError):
            return False

    return [float(is_valid(answer_text(completion))) for completion in prepend_prefills(completions, prefills)]
