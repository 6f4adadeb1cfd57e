"""vLLM inside the trainer's processes: one engine in each, or one in each group that shares its weights.

It holds weights of its own, in the form that its kernels want, which are written anew before every rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lightning.clock import Clock
from grpo_lightning.config.consistency import engine_problems, missing_vllm
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.memory import GiB
from grpo_lightning.sampler.vllm.engine import Completion, EngineSampler, Request, RequestOptions
from grpo_lightning.sampler.vllm.process_setup import (
    cpu_arguments,
    launcher_environment,
    loader_warnings,
    outside_training,
    preserved_state,
)

if TYPE_CHECKING:
    from grpo_lightning.policy.base import Policy

T = TypeVar("T")
CPU_CACHE_GIB = 1.0
"""Keys and values on a CPU by default: vLLM would take most of the CPU RAM."""
SLEEP_LEVEL = 2
"""vLLM's level at which weights are forgotten, too: they come anew before they are used."""


class VLLM(EngineSampler):
    """Completions by vLLM's kernels, with the log-probabilities of the distribution that they are sampled from.

    A completion's seed is its own: it depends neither on those beside it nor on the number of processes, but for
    rounding.

    Args:
        seed: Of the engine; each request has its own.
        dtype: Of the engine's weights: float32, bfloat16 or float16; null: the type in which the policy computes.
        max_model_len: Tokens of prompt and completion that a request may have; null: the model's context.
        gpu_memory_utilization: Share of the GPU's memory that the engine may take.
        kv_cache_gib: GiB of keys and values, in place of what that share leaves; null on a CPU: `CPU_CACHE_GIB`.
        tensor_parallel_size: Processes that share one engine's weights.
        enforce_eager: Whether it starts without compilation and CUDA graphs.
        sleep: Whether it gives a GPU's memory back while the policy trains.
        engine: Further arguments of ``vllm.LLM``, those that `config.consistency.engine_problems` allows.

    Raises:
        ValueError: vLLM is not installed, or ``engine`` holds what it may not.
    """

    key = "sampler=vllm"

    def __init__(
        self,
        *,
        seed: int,
        dtype: str | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.4,
        kv_cache_gib: float | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        sleep: bool = True,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        if wrong := missing_vllm() or "; ".join(engine_problems(engine or {})):
            raise ValueError(wrong)
        super().__init__(dtype)
        self.seed = seed
        self.max_model_len = max_model_len
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.tensor_parallel_size = tensor_parallel_size
        self.enforce_eager = enforce_eager
        self.sleep = sleep
        self.engine = dict(engine or {})
        self._llm: Any = None
        self._device = torch.device("cpu")
        self._label = ""
        """The version of its weights, with which it marks completions."""

    def __deepcopy__(self, _: Any) -> "VLLM":
        return self  # an engine is a place, not a value

    @contextmanager
    def ready(self, policy: "Policy", *, version: int, clock: Clock, ranks: Ranks) -> Iterator[None]:
        """As in `Sampler.ready`.

        Raises:
            ValueError: vLLM cannot run the policy's model.
            RuntimeError: It has kept some of its weights, or keys and values of older ones.
        """
        self._version = None
        with clock("wake"):
            if self._llm is None:
                self._llm = self._build(policy, ranks)
            else:
                self._wake("weights")  # before they are written: what sleeps has no memory to write to
        with clock("sync"):
            self._copy_weights(policy, version)
        with clock("wake"):
            self._wake("kv_cache")
        yield
        if self._sleeps:
            self._llm.sleep(level=SLEEP_LEVEL)
        self._version = version

    def complete(self, requests: Sequence[Request], options: RequestOptions) -> Sequence[Completion]:
        """As in `EngineSampler.complete`.

        Raises:
            ValueError: A prompt is too long.
            RuntimeError: The engine says that it has used other weights.
        """
        limit = self._llm.model_config.max_model_len
        longest = max((len(request.prompt) + request.max_tokens for request in requests), default=0)
        if longest > limit:
            raise ValueError(
                f"prompt and completion need up to {longest} tokens, the engine holds {limit}: lower "
                "rollout.max_new_tokens or data.max_prompt_length, or raise sampler.max_model_len"
            )
        engine = self._llm.llm_engine
        with preserved_state(), outside_training(self._device):
            if self.tensor_parallel_size == 1:
                return run_requests(engine, requests, options, version=self._label)
            # All of a group generate the same, and keep what each was asked for.
            parts = self._of_group(requests)
            union = [request for part in parts for request in part]
            completions = run_requests(engine, union, options, version=self._label, interactive=False)
            first = sum(len(part) for part in parts[: dist.get_rank() % self.tensor_parallel_size])
            return completions[first : first + len(requests)]

    def any_process(self, value: bool) -> bool:
        return value if self.tensor_parallel_size == 1 else any(self._of_group(value))

    def _of_group(self, value: T) -> list[T]:
        """The values of every process of this one's tensor-parallel group."""
        from vllm.distributed.parallel_state import get_tp_group

        parts: list[Any] = [None] * self.tensor_parallel_size
        dist.all_gather_object(parts, value, group=get_tp_group().cpu_group)
        return parts

    def _build(self, policy: "Policy", ranks: Ranks) -> Any:
        """An engine without weights."""
        if ranks.size % self.tensor_parallel_size:
            raise ValueError(
                f"sampler.tensor_parallel_size={self.tensor_parallel_size} must divide the run's {ranks.size} processes"
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self._device.type == "cuda"
        cache = self.kv_cache_gib or (None if on_gpu else CPU_CACHE_GIB)
        with TemporaryDirectory(prefix="grpo-lightning-") as folder, launcher_environment(ranks), preserved_state():
            self._dtype = policy.write_config(Path(folder))  # outside of what follows, where nothing is rounded
            if self.dtype is not None:
                self._dtype = getattr(torch, self.dtype)
            more = self.engine if on_gpu else self.engine | cpu_arguments(folder, self.max_model_len)
            with outside_training(self._device):
                from vllm import LLM

                return LLM(
                    model=folder,
                    skip_tokenizer_init=True,  # token ids in, token ids out
                    dtype=str(self._dtype).removeprefix("torch."),
                    seed=self.seed + ranks.rank // self.tensor_parallel_size,  # one for those that share weights
                    generation_config="vllm",  # not the model's, which may hold penalties
                    load_format="dummy",
                    logprobs_mode="processed_logprobs",  # of what is sampled from: with the temperature
                    enable_prefix_caching=True,
                    distributed_executor_backend="external_launcher",
                    tensor_parallel_size=self.tensor_parallel_size,
                    enforce_eager=self.enforce_eager,
                    max_model_len=self.max_model_len,
                    gpu_memory_utilization=self.gpu_memory_utilization,
                    kv_cache_memory_bytes=None if cache is None else int(cache * GiB),
                    enable_sleep_mode=on_gpu and self.sleep,
                    **more,
                )

    def _copy_weights(self, policy: "Policy", version: int) -> None:
        """Write the policy's weights into the engine, and forget what was computed with older ones."""

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, weight in policy.named_weights():
                yield name, weight.to(self._dtype)

        with loader_warnings() as warnings, outside_training(self._device):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": cast()})
        if wrong := [text for text in warnings if "RotaryEmbedding:" not in text]:  # which has no weights
            raise RuntimeError(f"sampler=vllm: some weights were not taken over: {'; '.join(wrong)[:500]}")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("sampler=vllm: keys and values of older weights could not be dropped from its cache")
        self._label = str(version)
        self._llm.llm_engine.set_weight_version(self._label)

    @property
    def _sleeps(self) -> bool:
        return self.sleep and self._device.type == "cuda"

    def _wake(self, what: str) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=[what])


@dataclass
class _Running:
    """What the engine has generated of a request so far."""

    number: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False
    is_stopped: bool = False
    """Whether it ended with a stop string."""
    versions: frozenset[str] = frozenset()
    """Of the weights that were used, as the engine says at its end."""

    def add(self, output: Any) -> None:
        """Append what an output of the engine adds."""
        part = output.outputs[0]
        self.ids += part.token_ids
        self.logprobs += part.logprobs.logprobs if part.logprobs else ()
        self.is_over = output.finished
        self.versions |= {span.version for span in part.weight_versions or ()}


def run_requests(
    engine: Any,
    requests: Sequence[Request],
    options: RequestOptions,
    *,
    version: str,
    interactive: bool = True,
) -> list[Completion]:
    """The completions of all requests, by an engine in this process, step by step.

    Args:
        engine: A ``vllm.LLMEngine`` without requests.
        requests: What to generate.
        options: How.
        version: Of the weights that it has.
        interactive: Whether this process may report and leave between tokens; not where others generate the same.

    Raises:
        RuntimeError: The engine says that it has used other weights.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Stop strings are looked for at every token; else a completion comes as a whole.
    kind = RequestOutputKind.DELTA if options.stops else RequestOutputKind.FINAL_ONLY
    rows = [_Running(number) for number in range(len(requests))]

    def finished(row: _Running) -> bool:
        return row.is_stopped or row.ids[-1] in options.end_ids

    for number, request in enumerate(requests):
        own = {"flat_logprobs": True, "detokenize": False, "output_kind": kind}
        prompt = {"prompt_token_ids": list(request.prompt)}
        engine.add_request(str(number), prompt, SamplingParams(**options.parameters(request), **own))
    try:
        while engine.has_unfinished_requests():
            if options.poll and interactive:
                options.poll()
            changed = []
            for output in engine.step():
                changed.append(rows[int(output.request_id)])
                changed[-1].add(output)
            if options.stops and (ended := _stop(options, changed)):
                engine.abort_request([str(row.number) for row in ended])
            over = [row for row in changed if row.is_over and finished(row)]
            if options.on_finished and interactive and over:
                options.on_finished([row.number for row in over], [row.ids for row in over])
    except BaseException:
        engine.abort_request([str(row.number) for row in rows if not row.is_over])
        raise
    if others := frozenset().union(*(row.versions for row in rows)) - {version}:
        raise RuntimeError(f"sampler=vllm: weights of version {', '.join(sorted(others))} were used, not {version}")
    return [Completion(row.ids, row.logprobs, finished(row)) for row in rows]


def _stop(options: RequestOptions, rows: Sequence[_Running]) -> list[_Running]:
    """End the rows that end with a stop string; one token is new in each.

    Returns:
        Those of them that the engine would go on with.
    """
    stops = options.stops
    if stops is None:
        return []
    belong = stops([row.ids[-stops.tail :] for row in rows], [1] * len(rows))
    ended = [row for row, tokens in zip(rows, belong, strict=True) if tokens]
    running = [row for row in ended if not row.is_over]
    for row in ended:
        row.is_stopped = row.is_over = True
    return running
