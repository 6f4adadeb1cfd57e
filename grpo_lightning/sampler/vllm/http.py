"""JSON over HTTP, by the standard library."""

import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from grpo_lightning.output.redaction import HIDDEN

LARGEST = 2**30
"""Bytes of an answer that are read."""


class _NoRedirect(HTTPRedirectHandler):
    """A key must not follow to another host."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse: the answer is an error."""


class Connection:
    """Requests to one server.

    Args:
        url: http://HOST:PORT or https://HOST:PORT.
        timeout: Seconds for one answer.
        key_name: The environment variable that may hold a key.

    Raises:
        ValueError: The address is another, or holds a password.
    """

    def __init__(self, url: str, *, timeout: float, key_name: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            shown = f"{parts.scheme}://{parts.hostname}" if parts.username else url
            raise ValueError(
                f"sampler.url={shown}: allowed is http://HOST:PORT or https://HOST:PORT; a key is read from {key_name}"
            )
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._key_name = key_name
        self._opener = build_opener(_NoRedirect)

    def get(self, path: str) -> Any:
        """The answer to a request without content."""
        return self._asked(Request(f"{self.url}{path}"))

    def post(self, path: str, content: Any) -> Any:
        """The answer to a request; an empty one is an empty mapping."""
        data = json.dumps(content).encode()
        return self._asked(Request(f"{self.url}{path}", data=data, headers={"Content-Type": "application/json"}))

    def _key(self) -> str:
        """The key, without the line end that files have."""
        key = os.environ.get(self._key_name, "").strip()
        if not key.isascii() or not key.isprintable():
            raise ValueError(
                f"{self._key_name}: the variable's value cannot be a key: it has other signs than keys have"
            )
        return key

    def _asked(self, request: Request) -> Any:
        if key := self._key():
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                read = answer.read(LARGEST)
        except HTTPError as error:
            said = error.read(500).decode(errors="replace").replace(key or HIDDEN, HIDDEN)
            raise RuntimeError(f"{request.full_url}: status {error.code}: {said}") from None
        except (URLError, OSError) as error:
            raise RuntimeError(f"{request.full_url}: no answer: {getattr(error, 'reason', error)}") from None
        return json.loads(read) if read else {}
