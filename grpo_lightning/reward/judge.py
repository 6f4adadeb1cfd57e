"""LLM judge: a language model's opinion as a reward, asked of an OpenAI-compatible server."""

import asyncio
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

import regex

from grpo_lightning.config.rules import is_pair
from grpo_lightning.console import REDACTED, redact, single_line
from grpo_lightning.reward.spec import PermanentError, RewardError, score_rows

if TYPE_CHECKING:
    import httpx2

_SEARCH_SECONDS = 1.0
_SHOWN_CHARACTERS = 200  # of what a server says of an error
_BAD_REQUEST = (400, 413, 422)
_TEMPORARY = (408, 409, 425, 429)
_FENCED = ("prompt", "completion")  # fields of a template whose texts stand between fences
_OWN_FIELDS = (*_FENCED, "rubric", "fence", "lowest", "highest")  # those that are no column
_MIN_FENCE = 8
_MESSAGE_MARK = re.compile(
    r"<(?=[|\uff5c]|\w{1,40}[|\uff5c]>|/?s>|(?:start|end)_of_turn>|/?(?:bos|eos|pad)>|</?SYS>>)|\[(?=/?[A-Z_]{3,}\])",
    re.IGNORECASE,
)
"""The first character of what servers take for the beginning or the end of a message."""


class ChatJudge:
    """A reward from 0 to 1: the score that a language model gives a completion, one request for each.

    An answer without a score in the scale is a failure, as is a server that cannot be reached. No redirect is followed.

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
    ) -> None:
        self._is_local, self._url = _check_url(base_url, allow_http), f"{base_url.rstrip('/')}/chat/completions"
        if api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", str(api_key_env)):
            raise ValueError(
                "api_key_env: expected the name of an environment variable, such as OPENAI_API_KEY, or null; the key "
                "itself belongs into the environment only"
            )
        if not (is_pair(scale) and scale[0] < scale[1]):
            raise ValueError(f"scale: expected [lowest, highest], two numbers, got {scale!r:.80}")
        if request.get("n", 1) != 1:
            raise ValueError(f"request.n={request['n']}: expected 1, since one answer is read")
        self._model, self._rubric, self._template, self._request = model, rubric, template, dict(request)
        self._scale, self._pattern = (float(scale[0]), float(scale[1])), regex.compile(pattern)
        if self._pattern.groups != 1:
            raise ValueError(f"pattern: expected a regular expression with one group, the score, got {pattern!r:.80}")
        self._api_key_env = api_key_env
        self._client: tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient] | None = None
        named = ("completions", "prompts", *template_columns(template))
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
        self.__signature__ = inspect.Signature(parameters)

    async def __call__(
        self, *, completions: Sequence[Any], prompts: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """[B] scores, None where a column is missing; `grpo_lightning.reward.Scoring` asks for each by itself."""

        def ask(*values: Any) -> Any:
            return self._judge(dict(zip(("completion", "prompt", *columns), values, strict=True)))

        answers = score_rows(ask, completions, prompts, *columns.values())
        return [None if answer is None else await answer for answer in answers]

    async def _judge(self, texts: Mapping[str, Any]) -> float:
        text = message(self._template, texts, rubric=self._rubric, scale=self._scale)
        fields = {**self._request, "model": self._model, "messages": [{"role": "user", "content": text}]}
        answer = await self._ask(json.dumps(fields, sort_keys=True).encode())
        matches = [match[1] for match in self._pattern.finditer(answer, timeout=_SEARCH_SECONDS)]
        lowest, highest = self._scale
        try:
            number = float(matches[-1])
        except (IndexError, ValueError, TypeError):
            raise ValueError(f"the judge gives no score: {single_line(answer[-80:])!r}") from None
        if not lowest <= number <= highest:
            raise ValueError(f"the judge gives {number:g}, which is not from {lowest:g} to {highest:g}")
        return (number - lowest) / (highest - lowest)

    async def _ask(self, body: bytes) -> str:
        """The text that the server answers to a request in JSON.

        Raises:
            OSError: It is busy or broken, or cannot be reached.
            PermanentError: It does not answer this request.
            ValueError: What it answers is no chat completion.
            RewardError: It would not answer any request.
        """
        headers, key = {"content-type": "application/json"}, None
        if self._api_key_env is not None:
            key = os.environ.get(self._api_key_env, "").strip()
            if not key:
                raise RewardError(f"api_key_env={self._api_key_env}: the environment has no key of this name")
            headers["authorization"] = f"Bearer {key}"
        response = await self._open().post(self._url, content=body, headers=headers)
        status = response.status_code
        text = response.text.replace(key or REDACTED, REDACTED)  # a server may repeat it
        if 200 <= status < 300:
            try:
                content = json.loads(text)["choices"][0]["message"]["content"]
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                content = None
            if not isinstance(content, str):
                raise ValueError(f"its answer is no chat completion: {_beginning(text)}")
            return content
        if status in _TEMPORARY or status >= 500:
            after = response.headers.get("retry-after", "").strip()  # seconds; some servers give a date
            await asyncio.sleep(int(after) if after.isdecimal() else 0)  # at most for the time of a try
            raise OSError(f"{self._url} answers {status}")
        error = f"{self._url} answers {status}: {_beginning(text)}"
        if 300 <= status < 400:
            target = _beginning(response.headers.get("location", "").replace(key or REDACTED, REDACTED))
            error += f" a redirect to {target}, which is not followed: set base_url to where it leads"
        raise (PermanentError if status in _BAD_REQUEST else RewardError)(error)

    def _open(self) -> "httpx2.AsyncClient":
        """The connections on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            import httpx2

            logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
            # The reward has the time limit and the number of connections; a proxy is none to this machine.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = loop, httpx2.AsyncClient(timeout=None, trust_env=not self._is_local, limits=limits)
        return self._client[1]


def template_columns(template: str) -> list[str]:
    """The fields of a template that columns fill; each field is a plain name in braces."""
    fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
    if any(spec or conversion or not str(name).isidentifier() for name, spec, conversion in fields):
        raise ValueError(
            f"template: expected fields that are names in braces, and {{{{ for a brace, got {template!r:.80}"
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


def _check_url(url: Any, allow_http: bool) -> bool:
    """Check a base URL; returns whether it is of this machine."""
    parts = re.fullmatch(r"(https?)://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?(/[^\s?#@]*)?", str(url))
    if parts is None:
        shown = redact(repr(url))[:80]
        raise ValueError(f"base_url: expected an address such as https://api.openai.com/v1 and no more, got {shown}")
    is_local = bool(re.fullmatch(r"localhost|\[::1\]|127(\.\d{1,3}){3}", parts[2]))
    if parts[1] == "http" and not allow_http and not is_local:
        raise ValueError(f"base_url: expected https, or a server of this machine, or allow_http=true, got {url!r:.80}")
    return is_local


def _beginning(text: str) -> str:
    return single_line(redact(" ".join(text[: 4 * _SHOWN_CHARACTERS].split()))[:_SHOWN_CHARACTERS])
