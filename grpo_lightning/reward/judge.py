"""A language model that judges completions by a rubric."""

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
from grpo_lightning.reward.chat_client import Endpoint
from grpo_lightning.reward.spec import RewardError

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
        template: The message; see `message`. Columns that it names are required.
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
            raise ValueError(f"the judge gives no score: {single_line(answer[-80:])!r}") from None
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


class Answers:
    """A file of answers, one JSON object per line; unfinished and damaged lines count as absent.

    Args:
        path: It is made at the first answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._read = 0  # bytes, up to the end of a line

    def get(self, request: str) -> str | None:
        """The answer to a request, given by its hash; None if there is none."""
        if request not in self._known:
            self._refresh()
        return self._known.get(request)

    def put(self, request: str, answer: str, **more: Any) -> str:
        """Write an answer down.

        Args:
            request: The hash of what was asked.
            answer: The text.
            more: What else a reader may want to know.

        Returns:
            The answer that counts: another process may have been first.

        Raises:
            RewardError: The file cannot be written.
        """
        line = json.dumps({"request": request, **more, "answer": answer}).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            message = f"{self._path}, the judge's answers, cannot be written: {error.strerror or error}"
            raise RewardError(message) from error
        self._refresh()
        return self._known.setdefault(request, answer)

    def _refresh(self) -> None:
        """Read what was added since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # not written to its end
                self._read += len(line)
                with suppress(ValueError, KeyError, TypeError):
                    found = json.loads(line)
                    self._known.setdefault(found["request"], found["answer"])


FENCED = ("prompt", "completion")
"""Fields of a template whose texts stand between fences."""
_OWN = ("rubric", "fence", "lowest", "highest")
"""Fields that are no column."""
_SHORTEST_FENCE = 8
_TURN = re.compile(
    r"<(?=[|\uff5c]|\w{1,40}[|\uff5c]>|/?s>|(?:start|end)_of_turn>|/?(?:bos|eos|pad)>|</?SYS>>)|\[(?=/?[A-Z_]{3,}\])",
    re.IGNORECASE,
)
"""The first character of what servers take for the beginning or the end of a message."""


def columns(template: str) -> list[str]:
    """The fields of a template that columns fill; each field is a plain name in braces.

    Raises:
        ValueError: It has other braces, or no place for the completion.
    """
    try:
        parsed = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template)]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"template: expected text with fields such as {{prompt}}, got {template!r:.80}: {error}"
        ) from None
    named = [name for name, _, _ in parsed if name is not None]
    if any(spec or conversion for _, spec, conversion in parsed) or not all(name.isidentifier() for name in named):
        raise ValueError(
            f"template: expected fields that are names in braces, and {{{{ and }}}} for braces, got {template!r:.80}"
        )
    if "completion" not in named or {"prompts", "completions", "completion_ids"} & {*named}:
        raise ValueError(f"template: expected a text with {{completion}} and names of columns, got {template!r:.80}")
    return [name for name in dict.fromkeys(named) if name not in (*FENCED, *_OWN)]


def message(template: str, texts: Mapping[str, Any], *, rubric: str, scale: Sequence[float]) -> str:
    """A template with its fields filled.

    Prompt and completion stand between two lines, the fence, that stand nowhere in any of the texts, however they are
    written: as many ~ as it takes. In them, what a server would read as the end of the message is broken up by a space.

    Args:
        template: With {completion}, and with {prompt}, {rubric}, {fence}, {lowest}, {highest} and columns if it likes.
        texts: Field -> a text, chat messages, or what a column holds.
        rubric: What the completion is judged by.
        scale: Lowest and highest score.
    """
    plain = {name: _sendable(value) for name, value in texts.items()}
    longest = max((len(run) for text in plain.values() for run in re.findall("~+", text)), default=0)
    fence = "~" * max(_SHORTEST_FENCE, longest + 1)
    own = {"rubric": rubric, "fence": fence, "lowest": f"{scale[0]:g}", "highest": f"{scale[1]:g}"}
    filled = {name: f"{fence}\n{text}\n{fence}" if name in FENCED else text for name, text in plain.items()}
    return template.format(**filled, **own)


def _sendable(value: Any) -> str:
    """A value as text that can be sent: of chat messages, who says what."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
        said = [f"{one.get('role', '')}: {one.get('content', '')}" for one in value]
        value = said[0].partition(": ")[2] if len(said) == 1 else "\n\n".join(said)
    text = str(value).encode("utf-8", errors="replace").decode()
    return _TURN.sub(lambda found: f"{found[0]} ", text)
