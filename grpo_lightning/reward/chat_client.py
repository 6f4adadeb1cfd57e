"""An OpenAI-compatible server, asked over HTTP; no redirect is followed."""

import asyncio
import ipaddress
import json
import logging
import os
import re
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_lightning.config.redaction import REDACTED, redact, single_line
from grpo_lightning.reward.coroutines import PermanentError, RetryableError
from grpo_lightning.reward.spec import RewardError

if TYPE_CHECKING:
    import httpx2

_MOST_SHOWN = 200  # characters of what a server says of an error
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_ABOUT_THE_REQUEST = (400, 413, 422)
_TEMPORARY = (408, 409, 425, 429)


class Endpoint:
    """The chat completions of a server.

    Args:
        base_url: As OpenAI's client takes it, such as https://api.openai.com/v1; /chat/completions is appended.
        api_key_env: The environment variable that holds the key; None: no key is sent.
        allow_http: Whether other machines may be asked without encryption.

    Raises:
        ValueError: An argument is of no use; the environment is not read yet.
    """

    def __init__(self, base_url: str, *, api_key_env: str | None, allow_http: bool) -> None:
        _check_url(base_url, allow_http)
        if api_key_env is not None and not (isinstance(api_key_env, str) and _VARIABLE.fullmatch(api_key_env)):
            raise ValueError(
                "api_key_env: allowed is the name of an environment variable, such as OPENAI_API_KEY, or null; the key "
                "itself belongs into the environment only"
            )
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self._api_key_env = api_key_env
        self._is_local = _is_local(urlsplit(base_url).hostname or "")
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
        key = self._key()
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        if self._client is None or self._loop is not asyncio.get_running_loop():
            self._loop, self._client = asyncio.get_running_loop(), _connected(self._is_local)
        response = await self._client.post(self.url, content=body, headers=headers)
        status = response.status_code
        text = response.text.replace(key or REDACTED, REDACTED)  # a server may repeat it
        if 200 <= status < 300:
            return _content(text)
        if status in _TEMPORARY or status >= 500:
            raise RetryableError(f"{self.url} answers {status}", after=_seconds(response.headers.get("retry-after")))
        told = f"{self.url} answers {status}: {_shown(text)}"
        if 300 <= status < 400:
            place = _shown(response.headers.get("location", "").replace(key or REDACTED, REDACTED))
            told += f" a redirect to {place}, which is not followed: base_url has to be where it leads"
        raise (PermanentError if status in _ABOUT_THE_REQUEST else RewardError)(told)

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


def _connected(is_local: bool) -> "httpx2.AsyncClient":
    import httpx2

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
    # No time limit of its own, which the reward has. A proxy that the environment names is none to this machine.
    return httpx2.AsyncClient(
        timeout=None,
        follow_redirects=False,
        trust_env=not is_local,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


def _check_url(url: Any, allow_http: bool) -> None:
    allowed = "an address such as https://api.openai.com/v1, without user, query and fragment"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        is_address = False
    if not is_address or re.search(r"[\s?#@]", url):  # an empty query would cut off what is appended
        raise ValueError(f"base_url: expected {allowed}, got {redact(repr(url)):.80}")
    if parts.scheme == "http" and not allow_http and not _is_local(parts.hostname or ""):
        raise ValueError(f"base_url: expected https, or a server of this machine, or allow_http=true, got {url!r:.80}")


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _content(body: str) -> str:
    """The text of the first choice of a chat completion."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"its answer is no chat completion: {_shown(body[: 4 * _MOST_SHOWN])}")
    return content


def _seconds(after: str | None) -> float:
    """What a Retry-After header asks for: seconds, or a date; 0 for anything else."""
    if after is None:
        return 0.0
    if re.fullmatch(r"\s*\d{1,6}(\.\d*)?\s*", after):
        return float(after)
    try:
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _shown(text: str) -> str:
    """The beginning of a server's words, without secrets and control characters."""
    return single_line(redact(" ".join(text[: 4 * _MOST_SHOWN].split()))[:_MOST_SHOWN])
