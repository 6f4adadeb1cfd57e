"""LLM judge: a language model's opinion as a reward, asked of an OpenAI-compatible server."""

import asyncio
import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any
from weakref import WeakValueDictionary

import regex

from grpo_lightning.config.redaction import single_line
from grpo_lightning.config.rules import is_pair
from grpo_lightning.reward.chat_client import ChatClient
from grpo_lightning.reward.spec import RewardError

_SEARCH_SECONDS = 1.0
_RESERVED = ("model", "messages", "stream", "n", "tools")
"""Fields of a request that settings may not change."""
_FENCED = ("prompt", "completion")
"""Fields of a template whose texts stand between fences."""
_OWN_FIELDS = (*_FENCED, "rubric", "fence", "lowest", "highest")
"""Fields of a template that are no column."""
_MIN_FENCE = 8
_MESSAGE_MARK = re.compile(
    r"<(?=[|\uff5c]|\w{1,40}[|\uff5c]>|/?s>|(?:start|end)_of_turn>|/?(?:bos|eos|pad)>|</?SYS>>)|\[(?=/?[A-Z_]{3,}\])",
    re.IGNORECASE,
)
"""The first character of what servers take for the beginning or the end of a message."""


class ChatJudge:
    """A reward from 0 to 1: the score that a language model gives a completion.

    Each completion is a request of its own. An answer without a score in the scale is a failure, as is a server that
    cannot be reached; what the reward's ``retries`` and ``failed_score`` say applies.

    Args:
        base_url: Of the server, such as https://api.openai.com/v1.
        model: Its name there.
        rubric: The criterion.
        template: The message, see `message`. Columns that it names are required.
        scale: The [lowest, highest] score, which become 0 and 1.
        pattern: A regular expression of the package regex with one group, the score: its last match counts.
        request: Further fields of the request, such as temperature.
        api_key_env: The environment variable that holds the key; None: no key is sent.
        allow_http: Whether other machines than this one may be asked without encryption.
        cache: A file of answers, see `AnswerCache`; None: none is kept.

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
        self._client = ChatClient(base_url, api_key_env=api_key_env, allow_http=allow_http)
        for name, value in (("model", model), ("rubric", rubric), ("template", template)):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}: expected a text that is not empty, got {value!r:.80}")
        if not (is_pair(scale) and scale[0] < scale[1]):
            raise ValueError(f"scale: expected [lowest, highest], two numbers, got {scale!r:.80}")
        if not isinstance(request, Mapping) or set(_RESERVED) & set(request):
            raise ValueError(f"request: expected fields other than {', '.join(_RESERVED)}, got {request!r:.80}")
        self._model, self._rubric, self._template, self._request = model, rubric, template, dict(request)
        self._scale, self._pattern = (float(scale[0]), float(scale[1])), _compiled(pattern)
        self._cache = None if cache is None else AnswerCache(Path(cache).expanduser())
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        named = ("completions", "prompts", *template_columns(template))
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
        return [await self._judge(row) for row in rows]

    async def aclose(self) -> None:
        """Close the connections, on the loop that they were opened on."""
        await self._client.aclose()

    async def _judge(self, texts: Mapping[str, Any]) -> float:
        text = message(self._template, texts, rubric=self._rubric, scale=self._scale)
        fields = {**self._request, "model": self._model, "messages": [{"role": "user", "content": text}]}
        body = json.dumps(fields, sort_keys=True).encode()
        key = hashlib.sha256(body + json.dumps([self._pattern.pattern, self._scale]).encode()).hexdigest()
        lock = self._locks.setdefault(key, asyncio.Lock())  # held here, so that it stays
        async with lock:  # equal completions are one request
            answer = self._cache.get(key) if self._cache else None
            if answer is None:
                answer = await self._client.ask(body)
                score = self._score(answer)
                if self._cache:
                    answer = self._cache.put(key, answer, model=self._model, score=score)
        return self._score(answer)

    def _score(self, answer: str) -> float:
        """The last score in an answer, from 0 to 1; a ValueError if there is none in the scale."""
        matches = [match[1] for match in self._pattern.finditer(answer, timeout=_SEARCH_SECONDS)]
        lowest, highest = self._scale
        try:
            number = float(matches[-1])
        except (IndexError, ValueError, TypeError):
            raise ValueError(f"the judge gives no score: {single_line(answer[-80:])!r}") from None
        if not lowest <= number <= highest:
            raise ValueError(f"the judge gives {number:g}, which is not from {lowest:g} to {highest:g}")
        return (number - lowest) / (highest - lowest)


class AnswerCache:
    """Answers to requests in a JSON Lines file, so that what was asked once is not asked again.

    A resumed run so scores what it repeats as it did before, and jobs of a sweep may share a file. Each line is written
    at once; of several answers to one request the first in the file counts, for all processes that use it. Unfinished
    and damaged lines count as absent.

    Args:
        path: It is made at the first answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, str] = {}
        self._num_read = 0  # bytes, up to the end of a line

    def get(self, request: str) -> str | None:
        """The answer to a request, given by its hash; None if there is none."""
        if request not in self._answers:
            self._refresh()
        return self._answers.get(request)

    def put(self, request: str, answer: str, **more: Any) -> str:
        """Write an answer down, with further fields; returns the one that counts: another process may have been first.

        Raises:
            RewardError: The file cannot be written.
        """
        line = json.dumps({"request": request, **more, "answer": answer}).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise RewardError(f"cache={self._path} cannot be written: {error.strerror or error}") from error
        self._refresh()
        return self._answers.setdefault(request, answer)

    def _refresh(self) -> None:
        """Read what was added since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._num_read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # not written to its end
                self._num_read += len(line)
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._answers.setdefault(row["request"], row["answer"])


def template_columns(template: str) -> list[str]:
    """The fields of a template that columns fill; each field is a plain name in braces."""
    try:
        fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"template: expected fields such as {{prompt}}, got {template!r:.80}: {error}") from None
    if any(spec or conversion or not str(name).isidentifier() for name, spec, conversion in fields):
        raise ValueError(
            f"template: expected fields that are names in braces, and {{{{ and }}}} for braces, got {template!r:.80}"
        )
    named = [str(name) for name, _, _ in fields]
    if "completion" not in named or {"prompts", "completions", "completion_ids"} & {*named}:
        raise ValueError(f"template: expected a text with {{completion}} and names of columns, got {template!r:.80}")
    return [name for name in dict.fromkeys(named) if name not in _OWN_FIELDS]


def message(template: str, texts: Mapping[str, Any], *, rubric: str, scale: Sequence[float]) -> str:
    """A template with its fields filled.

    Prompt and completion stand between two fences, lines of more ~ than stand in a row anywhere in the texts. In the
    texts, what a server would read as the end of a message is broken up by a space.

    Args:
        template: With {completion}, and with {prompt}, {rubric}, {fence}, {lowest}, {highest} and columns if it likes.
        texts: Field -> a text, chat messages, or what a column holds.
        rubric: The criterion.
        scale: Lowest and highest score.
    """
    plain = {name: _sendable(value) for name, value in texts.items()}
    longest = max((len(run) for text in plain.values() for run in re.findall("~+", text)), default=0)
    fence = "~" * max(_MIN_FENCE, longest + 1)
    own = {"rubric": rubric, "fence": fence, "lowest": f"{scale[0]:g}", "highest": f"{scale[1]:g}"}
    filled = {name: f"{fence}\n{text}\n{fence}" if name in _FENCED else text for name, text in plain.items()}
    return template.format(**filled, **own)


def _sendable(value: Any) -> str:
    """A value as text that can be sent: chat messages with their roles, unless it is one."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        turns = [f"{item.get('role', '')}: {item.get('content', '')}" for item in value]
        value = value[0].get("content", "") if len(value) == 1 else "\n\n".join(turns)
    text = str(value).encode("utf-8", errors="replace").decode()
    return _MESSAGE_MARK.sub(lambda mark: f"{mark[0]} ", text)


def _compiled(expression: Any) -> "regex.Pattern[str]":
    try:
        compiled = regex.compile(expression)
    except (regex.error, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"pattern: expected a regular expression, got {expression!r:.80}: {error}") from error
    if compiled.groups != 1:
        raise ValueError(f"pattern: expected a regular expression with one group, the score, got {expression!r:.80}")
    return compiled
