"""A server of vLLM's beside the run: completions over HTTP, weights as files that both see.

How the server is started says docs/engines.md. A key is read from the environment, as `KEY`, and is never written
anywhere.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file

from grpo_lightning.clock import Clock
from grpo_lightning.config.redaction import REDACTED
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.sampler.support import options
from grpo_lightning.sampler.vllm.engine import Completion, EngineSampler, GenerationRequest, WeightSource

KEY = "VLLM_API_KEY"
AT_ONCE = 64
"""Requests that wait for an answer at a time; each is one prompt with all its completions."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether the run was request to end."""
_NEUTRAL = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"min_tokens": 0, "use_beam_search": False},
}
"""Said with every request, like the filters, so that no default of the server's shapes the distribution."""


class VLLMServer(EngineSampler):
    """Completions of a ``vllm serve``d model, which reads the policy's weights from files before every rollout.

    Args:
        url: Of the server, without a path.
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
        self.directory = Path(directory)
        self.model = model
        self._server = Connection(url, timeout=timeout, key_name=KEY)
        self._ranks = SINGLE_PROCESS

    @contextmanager
    def ready(self, policy: WeightSource, *, version: int, clock: Clock, ranks: Ranks) -> Iterator[None]:
        """As in `Sampler.ready`.

        Raises:
            ValueError: The server serves no model, or several.
            RuntimeError: It does not answer, or has kept keys and values of older weights.
        """
        self._version, self._ranks = None, ranks
        with clock("sync"):
            self.model = self.model or ranks.all_or_raise(self._only_model)[ranks.rank]
            place = self.directory.resolve() / f"grpo-lightning-weights-{version}"
            ranks.all_or_raise(lambda: _make(place) if ranks.rank == 0 else None)
            self._write(policy, place, ranks)
            ranks.all_or_raise(lambda: self._hand_over(place, version) if ranks.rank == 0 else None)
        yield
        self._version = version

    def draw(self, request: GenerationRequest) -> Sequence[Completion]:
        """[B] completions, with the weights that the server has.

        Raises:
            RuntimeError: The server does not answer, or without log-probabilities.
        """
        if not request.prompts:
            return []
        pool = ThreadPoolExecutor(max_workers=min(AT_ONCE, len(request.prompts)))
        try:
            answers = [pool.submit(self._group, request, number) for number in range(len(request.prompts))]
            waiting = set(answers)
            while waiting:
                _, waiting = wait(waiting, timeout=_LOOK_EVERY)
                if request.poll:
                    request.poll()
            groups = [answer.result() for answer in answers]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self._server.post("/abort_requests", {})  # what has begun is of no use to anybody
            raise
        pool.shutdown()
        completions = [one for group in groups for one in group]
        for row, one in enumerate(completions):
            if request.on_finished and one.finished:
                request.on_finished(row, one.ids)
        return completions

    def _only_model(self) -> str:
        names = [str(one["id"]) for one in self._server.get("/v1/models")["data"]]
        if len(names) != 1:
            raise ValueError(f"sampler.model=null: allowed is one of the models that are served: {', '.join(names)}")
        return names[0]

    def _write(self, policy: WeightSource, place: Path, ranks: Ranks) -> None:
        """The weights as a model's directory; all processes iterate, the first one writes."""
        is_first = ranks.rank == 0
        if is_first:
            dtype = policy.write_config(place)
        kept = {}
        for name, weight in policy.named_weights():
            if is_first:
                wanted = getattr(torch, self.dtype) if self.dtype else dtype
                kept[name] = weight.to("cpu", wanted, copy=True).contiguous()  # files hold no tied weights
        if is_first:
            save_file(kept, place / "model.safetensors", metadata={"format": "pt"})

    def _hand_over(self, place: Path, version: int) -> None:
        """Let the server read the weights, and forget what it computed with older ones."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(place)}}
        self._server.post("/collective_rpc", call)
        if self._server.post("/reset_prefix_cache", {}).get("success") is not True:
            raise RuntimeError(
                "sampler=vllm_server: keys and values of older weights could not be dropped from its cache: somebody "
                "else may be using it"
            )
        self._server.post("/update_weight_version", {"new_version": str(version)})
        shutil.rmtree(place)

    def _group(self, request: GenerationRequest, number: int) -> list[Completion]:
        """[G] completions of one prompt."""
        sampling = request.sampling
        answer = self._server.post(
            "/v1/completions",
            {
                **_NEUTRAL,
                **options(sampling),
                "model": self.model,
                "prompt": list(request.prompts[number]),
                "n": len(request.seeds[number]),
                "seed": request.seeds[number][0],
                "temperature": sampling.temperature,
                "max_tokens": request.max_new_tokens[number],
                "stop_token_ids": list(request.end_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != len(request.seeds[number]):
            raise RuntimeError(
                f"{self._server.url}: {len(choices)} completions of a prompt came, not {len(request.seeds[number])}"
            )
        return [self._completion(choice, request) for choice in choices]

    def _completion(self, choice: Mapping[str, Any], request: GenerationRequest) -> Completion:
        ids, told = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not told or len(ids) != len(told):
            raise RuntimeError(f"{self._server.url}: a completion came without its token ids or log-probabilities")
        kept = request.stops([ids], [len(ids)])[0] if request.stops else 0
        if kept:
            return Completion(ids[:kept], told[:kept], finished=True)
        return Completion(ids, told, finished=ids[-1] in request.end_ids)


def _make(place: Path) -> None:
    """Make an empty directory, in place of one that a run which was killed has left."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)


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

    def get(self, path: str) -> Any:
        """The answer to a request without content."""
        return self._asked(Request(f"{self.url}{path}"))

    def post(self, path: str, content: Any) -> Any:
        """The answer to a request; an empty one is an empty mapping."""
        data = json.dumps(content).encode()
        return self._asked(Request(f"{self.url}{path}", data=data, headers={"Content-Type": "application/json"}))

    def _asked(self, request: Request) -> Any:
        key = os.environ.get(self._key_name, "").strip()  # without the line end that files have
        if key:
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urlopen(request, timeout=self._timeout) as answer:
                read = answer.read()
        except HTTPError as error:
            said = error.read(500).decode(errors="replace").replace(key or REDACTED, REDACTED)
            raise RuntimeError(f"{request.full_url}: status {error.code}: {said}") from None
        except (URLError, OSError) as error:
            raise RuntimeError(f"{request.full_url}: no answer: {getattr(error, 'reason', error)}") from None
        return json.loads(read) if read else {}
