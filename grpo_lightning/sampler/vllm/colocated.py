"""vLLM inside the trainer's processes: one engine in each.

It holds weights of its own, in the form that its kernels want, which are written anew before every rollout.
"""

import os
import random
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.memory import GiB
from grpo_lightning.sampler import GenerationRequest
from grpo_lightning.sampler.vllm.engine import Completion, EngineSampler, Request, request_parameters
from grpo_lightning.types import Clock

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

CPU_CACHE_GIB = 1.0
"""Keys and values on a CPU by default: vLLM would take most of the CPU RAM."""
CPU_BATCHED_TOKENS = 4096
"""Of prompts in one forward pass on a CPU, at least."""
SLEEP_LEVEL = 2
"""vLLM's level at which weights are forgotten, too: they come anew before they are used."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process of its own, which could outlive this one
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(kw_only=True, eq=False)
class VLLM(EngineSampler):
    """Completions by vLLM's kernels, with the log-probabilities of the distribution that they are sampled from.

    A completion's seed is its own: it depends neither on those beside it nor on the number of processes, but for
    rounding.
    """

    key = "sampler=vllm"
    seed: int
    """Of the engine; each request has its own."""
    dtype: str | None = None
    """Of the engine's weights: float32, bfloat16 or float16; null: the type in which the policy computes."""
    max_model_len: int | None = None
    """Tokens of prompt and completion that a request may have; null: the model's context."""
    gpu_memory_utilization: float = 0.4
    """Share of the GPU's memory that the engine may take."""
    kv_cache_gib: float | None = None
    """GiB of keys and values, in place of what that share leaves; null on a CPU: `CPU_CACHE_GIB`."""
    enforce_eager: bool = False
    """Whether it starts without compilation and CUDA graphs."""
    sleep: bool = True
    """Whether it gives a GPU's memory back while the policy trains."""
    engine: Mapping[str, Any] | None = None
    """Further arguments of ``vllm.LLM``, those that `config.rules` allows."""

    def __post_init__(self) -> None:
        super().__init__(self.dtype)
        self._llm: Any = None
        self._device = torch.device("cpu")

    def __deepcopy__(self, _: Any) -> "VLLM":
        return self  # an engine is a place, not a value

    @contextmanager
    def sync_weights(self, policy: "Policy", *, version: int, clock: Clock, ranks: Ranks) -> Iterator[None]:
        """As in `Sampler.sync_weights`.

        Raises:
            ValueError: vLLM cannot run the policy's model.
            RuntimeError: It has kept keys and values of older weights.
        """
        self._version = None
        with clock("wake"):
            if self._llm is None:
                self._llm = self._build(policy, ranks)
            else:
                self._wake("weights")  # before they are written: what sleeps has no memory to write to
        with clock("sync"):
            self._copy_weights(policy)
        with clock("wake"):
            self._wake("kv_cache")
        yield
        if self._sleeps:
            self._llm.sleep(level=SLEEP_LEVEL)
        self._version = version

    def complete(self, requests: Sequence[Request], asked: GenerationRequest) -> Sequence[Completion]:
        """As in `EngineSampler.complete`; raises ``ValueError`` where a prompt is too long."""
        limit = self._llm.model_config.max_model_len
        longest = max((len(request.prompt) + request.max_tokens for request in requests), default=0)
        if longest > limit:
            raise ValueError(
                f"prompt and completion need up to {longest} tokens, the engine holds {limit}: lower "
                "rollout.max_new_tokens or data.max_prompt_length, or raise sampler.max_model_len"
            )
        with outside_training(self._device):
            return run_requests(self._llm.llm_engine, requests, asked)

    def _build(self, policy: "Policy", ranks: Ranks) -> Any:
        """An engine without weights."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu, more = self._device.type == "cuda", dict(self.engine or {})
        cache = self.kv_cache_gib or (None if on_gpu else CPU_CACHE_GIB)
        if not on_gpu:
            # Of a part of a prompt it would undo the random numbers, which a CPU's generators do not allow.
            longest = self.max_model_len or policy.context or 0
            more = more | {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, longest)}
        with TemporaryDirectory(prefix="grpo-lightning-") as folder, launcher_environment(ranks):
            computes_in = policy.write_config(Path(folder))  # outside of what follows, where nothing is rounded
            self._dtype = computes_in if self.dtype is None else getattr(torch, self.dtype)
            with outside_training(self._device):
                from vllm import LLM

                return LLM(
                    model=folder,
                    skip_tokenizer_init=True,  # token ids in, token ids out
                    dtype=str(self._dtype).removeprefix("torch."),
                    seed=self.seed + ranks.rank,
                    generation_config="vllm",  # not the model's, which may hold penalties
                    load_format="dummy",
                    logprobs_mode="processed_logprobs",  # of what is sampled from: with the temperature
                    enable_prefix_caching=True,
                    distributed_executor_backend="external_launcher",
                    enforce_eager=self.enforce_eager,
                    max_model_len=self.max_model_len,
                    gpu_memory_utilization=self.gpu_memory_utilization,
                    kv_cache_memory_bytes=None if cache is None else int(cache * GiB),
                    enable_sleep_mode=on_gpu and self.sleep,
                    **more,
                )

    def _copy_weights(self, policy: "Policy") -> None:
        """Write the policy's weights into the engine, and forget what was computed with older ones."""

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, weight in policy.named_weights():
                yield name, weight.to(self._dtype)

        with outside_training(self._device):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": cast()})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("sampler=vllm: keys and values of older weights could not be dropped from its cache")

    @property
    def _sleeps(self) -> bool:
        return self.sleep and self._device.type == "cuda"

    def _wake(self, what: str) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=[what])


@contextmanager
def outside_training(device: torch.device) -> Iterator[None]:
    """Context without autocast and inference mode; afterwards, the random generators are as before.

    A validation runs in inference mode, and weights that are made in it could not be written to afterwards. vLLM seeds
    every random generator, and replaces ``torch.set_num_threads`` on CPUs.
    """
    state, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # of its own dependencies
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads


@contextmanager
def launcher_environment(ranks: Ranks) -> Iterator[None]:
    """Context with the environment variables that a launcher of several processes sets."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    variables = ENVIRONMENT | {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": local}
    if not dist.is_initialized():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # At its own level it logs a hundred lines about what it chooses.
    variables["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in variables if name in before})


def run_requests(engine: Any, requests: Sequence[Request], asked: GenerationRequest) -> list[Completion]:
    """The completions of all requests, by a ``vllm.LLMEngine`` in this process, step by step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Stop strings are looked for at every token; else a completion comes as a whole.
    stops = asked.stops
    kind = RequestOutputKind.DELTA if stops else RequestOutputKind.FINAL_ONLY
    for number, request in enumerate(requests):
        own = {"flat_logprobs": True, "detokenize": False, "output_kind": kind}
        prompt = {"prompt_token_ids": list(request.prompt)}
        engine.add_request(str(number), prompt, SamplingParams(**request_parameters(request, asked), **own))
    rows, running = [Completion() for _ in requests], set(map(str, range(len(requests))))
    try:
        while engine.has_unfinished_requests():
            if asked.poll:
                asked.poll()
            over = []
            for output in engine.step():
                row, part = rows[int(output.request_id)], output.outputs[0]
                row.ids += part.token_ids
                row.logprobs += part.logprobs.logprobs if part.logprobs else ()
                is_stopped = bool(stops and stops([row.ids[-stops.tail :]], [1])[0])  # one token is new
                if is_stopped and not output.finished:
                    engine.abort_request([output.request_id])
                if is_stopped or output.finished:
                    row.finished = is_stopped or row.ids[-1] in asked.end_ids
                    running.discard(output.request_id)
                    over.append(int(output.request_id))
            if asked.on_finished and (ended := [number for number in over if rows[number].finished]):
                asked.on_finished(ended, [rows[number].ids for number in ended])
    except BaseException:
        engine.abort_request(sorted(running))
        raise
    return rows
