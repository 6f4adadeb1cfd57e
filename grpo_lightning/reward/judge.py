"""LLM judge: a language model's opinion as a reward, asked of an OpenAI-compatible server."""

import asyncio
import hashlib
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import regex

from grpo_lightning.config.rules import is_pair
from grpo_lightning.console import REDACTED, redact, single_line
from grpo_lightning.reward.coroutines import PermanentError, RetryableError
from grpo_lightning.reward.spec import RewardError

if TYPE_CHECKING:
    import httpx2

_SEARCH_SECONDS = 1.0
_SHOWN_CHARACTERS = 200  # of what a server says of an error
_BAD_REQUEST = (400, 413, 422)
_TEMPORARY = (408, 409, 425, 429)
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
    """A reward from 0 to 1: the score that a language model gives a completion, one request for each.

    An answer without a score in the scale is a failure, as is a server that cannot be reached.

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
        ValueError: An argument is of no use.
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
        if not (is_pair(scale) and scale[0] < scale[1]):
            raise ValueError(f"scale: expected [lowest, highest], two numbers, got {scale!r:.80}")
        self._model, self._rubric, self._template, self._request = model, rubric, template, dict(request)
        self._scale, self._pattern = (float(scale[0]), float(scale[1])), regex.compile(pattern)
        if self._pattern.groups != 1:
            raise ValueError(f"pattern: expected a regular expression with one group, the score, got {pattern!r:.80}")
        self._cache = None if cache is None else AnswerCache(Path(cache).expanduser())
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        named = ("completions", "prompts", *template_columns(template))
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
        )

    async def __call__(
        self, *, completions: Sequence[Any], prompts: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        """[B] scores; `grpo_lightning.reward.Scoring` asks for each completion by itself."""
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

    A resumed run so scores what it repeats as it did before, and jobs of a sweep may share a file: of several answers
    to one request the first in the file counts. Unfinished and damaged lines count as absent.
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
        """Write an answer down, with further fields; returns the one that counts, the file's first."""
        line = json.dumps({"request": request, **more, "answer": answer}).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:  # at once
            file.write(line)
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
        raise ValueError(f"template: {error}, got {template!r:.80}") from error
    if any(spec or conversion or not str(name).isidentifier() for name, spec, conversion in fields):
        raise ValueError(
            f"template: expected fields that are names in braces, and {{{{ and }}}} for braces, got {template!r:.80}"
        )
    named = [str(name) for name, _, _ in fields]
    if "completion" not in named:
        raise ValueError(f"template: expected a text with {{completion}}, got {template!r:.80}")
    return [name for name in dict.fromkeys(named) if name not in _OWN_FIELDS]


def message(template: str, texts: Mapping[str, Any], *, rubric: str, scale: Sequence[float]) -> str:
    """A template with its fields filled.

    Prompt and completion stand between two fences, lines of more ~ than stand in a row anywhere in the texts. In the
    texts, what a server would read as the end of a message is broken up by a space.
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


# --- the server


class ChatClient:
    """Asks the chat completions of a server, see `ChatJudge`; no redirect is followed."""

    def __init__(self, base_url: str, *, api_key_env: str | None, allow_http: bool) -> None:
        self._is_local = _check_url(base_url, allow_http)
        if api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", str(api_key_env)):
            raise ValueError(
                "api_key_env: expected the name of an environment variable, such as OPENAI_API_KEY, or null; the key "
                "itself belongs into the environment only"
            )
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self._api_key_env = api_key_env
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx2.AsyncClient | None = None

    async def ask(self, body: bytes) -> str:
        """The text that the server answers to a request in JSON.

        Raises:
            RetryableError: It is busy or broken, or cannot be reached.
            PermanentError: It does not answer this request.
            ValueError: What it answers is no chat completion.
            RewardError: It would not answer any request.
        """
        headers, key = {"content-type": "application/json"}, self._key()
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if self._client is None or self._loop is not asyncio.get_running_loop():
            import httpx2

            logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
            # The reward has the time limit and the number of connections; a proxy is none to this machine.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            self._loop = asyncio.get_running_loop()
            self._client = httpx2.AsyncClient(
                timeout=None, follow_redirects=False, trust_env=not self._is_local, limits=limits
            )
        response = await self._client.post(self.url, content=body, headers=headers)
        status = response.status_code
        text = response.text.replace(key or REDACTED, REDACTED)  # a server may repeat it
        if 200 <= status < 300:
            return _content(text)
        if status in _TEMPORARY or status >= 500:
            after = response.headers.get("retry-after", "").strip()  # seconds; some servers give a date
            raise RetryableError(f"{self.url} answers {status}", after=float(after) if after.isdecimal() else 0.0)
        message = f"{self.url} answers {status}: {_beginning(text)}"
        if 300 <= status < 400:
            target = _beginning(response.headers.get("location", "").replace(key or REDACTED, REDACTED))
            message += f" a redirect to {target}, which is not followed: set base_url to where it leads"
        raise (PermanentError if status in _BAD_REQUEST else RewardError)(message)

    async def aclose(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            client, self._client = self._client, None
            await client.aclose()

    def _key(self) -> str | None:
        if self._api_key_env is None:
            return None
        key = os.environ.get(self._api_key_env, "").strip()
        if not key:
            raise RewardError(f"api_key_env={self._api_key_env}: the environment has no key of this name")
        return key


def _check_url(url: Any, allow_http: bool) -> bool:
    """Check a base URL; returns whether it is of this machine."""
    parts = re.fullmatch(r"(https?)://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?(/[^\s?#@]*)?", str(url))
    if parts is None:
        raise ValueError(
            "base_url: expected an address such as https://api.openai.com/v1, without user, query and fragment, got "
            f"{redact(repr(url)):.80}"
        )
    is_local = parts[2] in ("localhost", "[::1]") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", parts[2]))
    if parts[1] == "http" and not allow_http and not is_local:
        raise ValueError(f"base_url: expected https, or a server of this machine, or allow_http=true, got {url!r:.80}")
    return is_local


def _content(body: str) -> str:
    """The text of the first choice of a chat completion."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"its answer is no chat completion: {_beginning(body)}")
    return content


def _beginning(text: str) -> str:
    return single_line(redact(" ".join(text[: 4 * _SHOWN_CHARACTERS].split()))[:_SHOWN_CHARACTERS])
