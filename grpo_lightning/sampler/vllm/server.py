"""A vLLM server beside the run: completions over HTTP, weights as files that both see.

docs/engines.md says how the server is started. A key is read from the environment, as `KEY`, and is never written
anywhere.
"""

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import torch
from safetensors.torch import save_file

from grpo_lightning.console import REDACTED
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.sampler import GenerationRequest
from grpo_lightning.sampler.vllm.engine import Completion, EngineSampler, Request, request_parameters
from grpo_lightning.types import Clock

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

KEY = "VLLM_API_KEY"
MAX_CONCURRENT = 64
"""Requests that wait for an answer at a time; each is one prompt with all its completions."""
_PAUSES = (0.1, 0.2, 0.4, None)
"""Seconds after each try of a request whose connection is refused or lost; None: it was the last."""
_POLL_EVERY = 0.2
"""Seconds between two polls."""
_NEUTRAL = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"min_tokens": 0, "use_beam_search": False},
}
"""In every request, like the filters, so that no default of the server's shapes the distribution."""


class VLLMServer(EngineSampler):
    """Completions of a ``vllm serve``d model, which reads the policy's weights from files before every rollout.

    Args:
        url: Of the server, http://HOST:PORT.
        directory: Where the weights are written for it, on a file system that both see.
        model: Its name at the server; null: the only one that is served.
        dtype: Of the weights that are written: float32, bfloat16 or float16; null: the type in which the policy
            computes. The server computes in its own.
        timeout: Seconds that the server may take for one answer.
    """

    key = "sampler=vllm_server"

    def __init__(
        self, *, url: str, directory: str, model: str | None = None, dtype: str | None = None, timeout: float = 600.0
    ) -> None:
        super().__init__(dtype)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(
                f"sampler.url must be http://HOST:PORT or https://HOST:PORT, with the key in the environment variable "
                f"{KEY}; it is {parts.scheme}://{parts.hostname}"
            )
        self.url, self._timeout = url.rstrip("/"), timeout
        self._is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self.directory = Path(directory)
        self.model = model

    @contextmanager
    def sync_weights(self, policy: "Policy", *, version: int, clock: Clock, ranks: Ranks) -> Iterator[None]:
        """As in `Sampler.sync_weights`.

        Raises:
            ValueError: The server serves no model, or several.
            RuntimeError: It does not answer, or has kept keys and values of older weights.
        """
        self._version = None
        with clock("sync"):
            self.model = self.model or ranks.all_or_raise(self._only_model)[ranks.rank]
            place = self.directory.resolve() / f"grpo-lightning-weights-{version}"
            self.write(policy, place, ranks)
            ranks.all_or_raise(lambda: self._reload(place) if ranks.rank == 0 else None)
        yield
        self._version = version

    def complete(self, requests: Sequence[Request], asked: GenerationRequest) -> Sequence[Completion]:
        """As in `EngineSampler.complete`; requests of a group are one request with several completions.

        Raises:
            RuntimeError: The server does not answer, or without log-probabilities.
        """
        if not requests:
            return []
        groups = [list(group) for _, group in groupby(requests, key=lambda request: id(request.prompt))]
        pool = ThreadPoolExecutor(max_workers=min(MAX_CONCURRENT, len(groups)))
        try:
            answers = [pool.submit(self._complete_group, group, asked) for group in groups]
            while wait(answers, timeout=_POLL_EVERY).not_done:
                if asked.poll:
                    asked.poll()
            completions = [completion for answer in answers for completion in answer.result()]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with suppress(RuntimeError):  # the first error counts
                self._ask("/abort_requests", {})  # the other completions are of no use to anybody
            raise
        pool.shutdown()
        finished = [row for row, completion in enumerate(completions) if completion.finished]
        if asked.on_finished and finished:
            asked.on_finished(finished, [completions[row].ids for row in finished])
        return completions

    def _only_model(self) -> str:
        names = [str(model["id"]) for model in self._ask("/v1/models")["data"]]
        if len(names) != 1:
            raise ValueError(f"sampler.model=null: name one of the models that are served: {', '.join(names)}")
        return names[0]

    def write(self, policy: "Policy", place: Path, ranks: Ranks) -> None:
        """Write the weights as a model's directory; all processes iterate, the first one writes."""
        is_first, weights = ranks.rank == 0, {}
        if is_first:
            shutil.rmtree(place, ignore_errors=True)  # which a run that was killed has left
        ranks.all_or_raise(lambda: place.mkdir(parents=True) if is_first else None)
        computes_in = policy.write_config(place) if is_first else None
        dtype = getattr(torch, self.dtype) if self.dtype else computes_in
        for name, weight in policy.named_weights():
            if is_first:
                weights[name] = weight.to("cpu", dtype, copy=True).contiguous()  # files hold no tied weights
        if is_first:
            save_file(weights, place / "model.safetensors", metadata={"format": "pt"})

    def _reload(self, place: Path) -> None:
        """Make the server load the new weights and empty its prefix cache."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
        self._ask("/collective_rpc", call)
        if self._ask("/reset_prefix_cache", {}).get("success") is not True:
            raise RuntimeError(
                "sampler=vllm_server: keys and values of older weights could not be dropped from its cache: somebody "
                "else may be using it"
            )
        shutil.rmtree(place)

    def _complete_group(self, requests: Sequence[Request], asked: GenerationRequest) -> list[Completion]:
        """[G] completions of one prompt; vLLM derives their seeds from the first one's."""
        own = {"model": self.model, "prompt": list(requests[0].prompt), "n": len(requests), "return_token_ids": True}
        answer = self._ask("/v1/completions", {**_NEUTRAL, **request_parameters(requests[0], asked), **own})
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != len(requests):
            raise RuntimeError(f"{self.url}: {len(choices)} completions of a prompt came, not {len(requests)}")
        return [self._completion(choice, asked) for choice in choices]

    def _completion(self, choice: Mapping[str, Any], asked: GenerationRequest) -> Completion:
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logprobs or len(ids) != len(logprobs):
            raise RuntimeError(f"{self.url}: a completion came without its token ids or log-probabilities")
        if asked.stops and (length := asked.stops([ids], [len(ids)])[0]):
            return Completion(ids[:length], logprobs[:length], finished=True)
        return Completion(ids, logprobs, finished=ids[-1] in asked.end_ids)

    @cached_property
    def _client(self) -> httpx2.Client:
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
        limits = httpx2.Limits(max_connections=MAX_CONCURRENT + 1, max_keepalive_connections=MAX_CONCURRENT + 1)
        return httpx2.Client(timeout=self._timeout, limits=limits, trust_env=not self._is_local)

    def _ask(self, path: str, content: Any = None) -> Any:
        """The answer to a request, POST with content and GET without; an empty one is an empty mapping.

        Connections are kept open; a lost one is made again.
        """
        url, key = f"{self.url}{path}", os.environ.get(KEY, "").strip()  # without the line end that files have
        method, headers = "GET" if content is None else "POST", {"Authorization": f"Bearer {key}"} if key else {}
        for pause in _PAUSES:
            try:
                answer = self._client.request(method, url, json=content, headers=headers)
                break
            except httpx2.TimeoutException as error:
                raise RuntimeError(f"{url}: no answer in sampler.timeout={self._timeout:g} seconds") from error
            except httpx2.TransportError as error:  # the same request again: its seed makes the same completions
                if pause is None:
                    raise RuntimeError(f"{url}: no answer: {error}") from None
                time.sleep(pause)
        if not answer.is_success:
            body = answer.text[:500].replace(key or REDACTED, REDACTED)
            raise RuntimeError(f"{url}: status {answer.status_code}: {body}")
        return answer.json() if answer.content else {}
