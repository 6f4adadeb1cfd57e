"""A language model that judges completions by a rubric."""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import regex

from grpo_lightning.allowed import is_pair
from grpo_lightning.output.terminal import one_line
from grpo_lightning.reward.judge.answers import Answers
from grpo_lightning.reward.judge.endpoint import Endpoint
from grpo_lightning.reward.judge.request import columns, message

_SEARCH_SECONDS = 1.0
_OF_THE_JUDGE = ("model", "messages", "stream", "n", "tools")
"""Fields of a request that are not for settings."""


class ChatJudge:
    """A reward from 0 to 1: the score that a language model gives a completion, asked of an OpenAI-compatible server.

    Each completion is a request of its own. An answer without a score in the scale is a failure, as is a server that
    cannot be reached; what the reward's ``retries`` and ``failed_score`` say applies.

    Args:
        base_url: Of the server, such as https://api.openai.com/v1.
        model: Its name there.
        rubric: What completions are judged by.
        template: The message; see `grpo_lightning.reward.judge.request.message`. Columns that it names are required.
        scale: The [lowest, highest] score, which become 0 and 1.
        pattern: A regular expression of the package regex with one group, the score: its last match counts.
        request: Further fields of the request, such as temperature.
        api_key_env: The environment variable that holds the key; None: no key is sent.
        allow_http: Whether other machines than this one may be asked without encryption.
        cache: A file of answers that were given before, which is made where there is none; None: none is kept.

    Raises:
        ValueError: An argument is of no use. Neither the environment nor the network is asked yet.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        rubric: str,
        template: str,
        scale: Sequence[float],
        pattern: str,
        request: Mapping[str, Any],
        api_key_env: str | None,
        allow_http: bool,
        cache: str | None,
    ) -> None:
        self._endpoint = Endpoint(base_url, api_key_env=api_key_env, allow_http=allow_http)
        self._model, self._rubric, self._template = _text("model", model), _text("rubric", rubric), template
        self._scale, self._pattern, self._request = _scale(scale), _pattern(pattern), _request(request)
        self._answers = None if cache is None else Answers(Path(cache).expanduser())
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        named = ("completions", "prompts", *columns(_text("template", template)))
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
        )

    async def __call__(
        self, *, completions: Sequence[Any], prompts: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        """The scores of completions, which are usually one: `grpo_lightning.reward.Scoring` asks for each by itself."""
        rows = [
            {"completion": completion, "prompt": prompt, **{name: values[row] for name, values in columns.items()}}
            for row, (completion, prompt) in enumerate(zip(completions, prompts, strict=True))
        ]
        return [await self._judged(row) for row in rows]

    async def aclose(self) -> None:
        """Close the connections, on the loop that they were opened on."""
        await self._endpoint.aclose()

    async def _judged(self, texts: Mapping[str, Any]) -> float:
        text = message(self._template, texts, rubric=self._rubric, scale=self._scale)
        asked = {**self._request, "model": self._model, "messages": [{"role": "user", "content": text}]}
        body = json.dumps(asked, sort_keys=True).encode()
        read = json.dumps([self._pattern.pattern, self._scale]).encode()
        key = hashlib.sha256(body + read).hexdigest()
        lock = self._asking.setdefault(key, asyncio.Lock())  # held here, so that it stays
        async with lock:  # of equal completions one is asked about
            return await self._known_or_asked(key, body)

    async def _known_or_asked(self, key: str, body: bytes) -> float:
        if self._answers is not None and (known := self._answers.get(key)) is not None:
            return self._score(known)
        answer = await self._endpoint.ask(body)
        score = self._score(answer)
        if self._answers is None:
            return score
        return self._score(self._answers.put(key, answer, model=self._model, score=score))

    def _score(self, answer: str) -> float:
        """The last score in an answer, from 0 to 1.

        Raises:
            ValueError: There is none, or it is outside of the scale.
        """
        found = [match[1] for match in self._pattern.finditer(answer, timeout=_SEARCH_SECONDS)]
        lowest, highest = self._scale
        try:
            number = float(found[-1])
        except (IndexError, ValueError, TypeError):
            raise ValueError(f"the judge gives no score: {one_line(answer[-80:])!r}") from None
        if not lowest <= number <= highest:
            raise ValueError(f"the judge gives {number:g}, which is not from {lowest:g} to {highest:g}")
        return (number - lowest) / (highest - lowest)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}: expected a text that is not empty, got {value!r:.80}")
    return value


def _scale(scale: Any) -> tuple[float, float]:
    if not (is_pair(scale) and scale[0] < scale[1]):
        raise ValueError(f"scale: expected [lowest, highest], two numbers, got {scale!r:.80}")
    return float(scale[0]), float(scale[1])


def _pattern(expression: Any) -> "regex.Pattern[str]":
    try:
        compiled = regex.compile(expression)
    except (regex.error, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"pattern: expected a regular expression, got {expression!r:.80}: {error}") from error
    if compiled.groups != 1:
        raise ValueError(f"pattern: expected a regular expression with one group, the score, got {expression!r:.80}")
    return compiled


def _request(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or set(_OF_THE_JUDGE) & set(given):
        raise ValueError(f"request: expected fields other than {', '.join(_OF_THE_JUDGE)}, got {given!r:.80}")
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"request: expected what JSON can hold, got {given!r:.80}: {error}") from error
    return dict(given)
