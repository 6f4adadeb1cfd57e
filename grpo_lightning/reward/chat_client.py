"""HTTP client of an OpenAI-compatible chat completions server; retries are those of the reward that calls it."""

import asyncio
import json
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from grpo_lightning.config.redaction import REDACTED, redact, single_line
from grpo_lightning.reward.coroutines import PermanentError, RetryableError
from grpo_lightning.reward.spec import RewardError

if TYPE_CHECKING:
    import httpx2

_SHOWN_CHARACTERS = 200  # of what a server says of an error
_BAD_REQUEST = (400, 413, 422)
_TEMPORARY = (408, 409, 425, 429)


class ChatClient:
    """Asks the chat completions of a server; no redirect is followed.

    Args:
        base_url: As OpenAI's client takes it, such as https://api.openai.com/v1; /chat/completions is appended.
        api_key_env: The environment variable that holds the key; None: no key is sent.
        allow_http: Whether other machines may be asked without encryption.

    Raises:
        ValueError: An argument is of no use; the environment is not read yet.
    """

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
        """The text that the server answers to a request.

        Args:
            body: JSON.

        Raises:
            RetryableError: It is busy or broken, or cannot be reached.
            PermanentError: It does not answer this request.
            ValueError: What it answers is no chat completion.
            RewardError: It would not answer any request: redirects, a key that does not count, an address without it.
        """
        headers, key = {"content-type": "application/json"}, self._key()
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if self._client is None or self._loop is not asyncio.get_running_loop():
            self._loop, self._client = asyncio.get_running_loop(), _connect(self._is_local)
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
        """Close its connections, if they are of the loop that this runs on."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            client, self._client = self._client, None
            await client.aclose()

    def _key(self) -> str | None:
        if self._api_key_env is None:
            return None
        key = os.environ.get(self._api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise RewardError(f"api_key_env={self._api_key_env}: the environment has no key of this name")
        return key


def _connect(is_local: bool) -> "httpx2.AsyncClient":
    import httpx2

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    # The reward has the time limit and the number of connections. The environment's proxy is none to this machine.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=None, follow_redirects=False, trust_env=not is_local, limits=limits)


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
    """The beginning of a server's text, without secrets and control characters."""
    return single_line(redact(" ".join(text[: 4 * _SHOWN_CHARACTERS].split()))[:_SHOWN_CHARACTERS])
