"""vLLM inside the trainer's processes: one engine in each, or one in each group that shares its weights.

It holds weights of its own, in the form that its kernels want, which are written anew before every rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lightning.clock import Clock
from grpo_lightning.config.consistency import engine_problems, missing_vllm
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.sampler.engine import Completion, EngineSampler, GenerationRequest, WeightSource
from grpo_lightning.sampler.vllm.drawing import Row, drawn
from grpo_lightning.sampler.vllm.surroundings import (
    check_heads,
    complaints,
    for_cpu,
    launched,
    plain_arithmetic,
    undisturbed,
)

T = TypeVar("T")
GIB = 2**30
CPU_CACHE_GIB = 1.0
"""Keys and values on a CPU where nothing else is said: vLLM would take most of the computer's memory."""
SLEEP = 2
"""vLLM's level at which weights are forgotten, too: they come anew before they are used."""


class VLLM(EngineSampler):
    """Completions by vLLM's kernels, with the log-probabilities of the distribution that they are drawn from.

    A completion's seed is its own: it depends neither on those beside it nor on the number of processes, but for
    rounding.

    Args:
        seed: Of the engine; each that is drawn with has its own.
        dtype: Of the engine's weights: float32, bfloat16 or float16; null: the type in which the policy computes.
        max_model_len: Tokens of prompt and completion that a request may have; null: the model's context.
        gpu_memory_utilization: Share of the GPU's memory that the engine may take.
        kv_cache_gib: GiB of keys and values, in place of what that share leaves; null on a CPU: `CPU_CACHE_GIB`.
        tensor_parallel_size: Processes that share one engine's weights.
        enforce_eager: Whether it starts without compilation and CUDA graphs.
        sleep: Whether it gives a GPU's memory back while the policy trains.
        engine: Further arguments of ``vllm.LLM``, of those in `config.consistency.ENGINE`.

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

    def __deepcopy__(self, _: Any) -> "VLLM":
        return self  # an engine is a place, not a value

    @contextmanager
    def ready(self, policy: WeightSource, *, version: int, clock: Clock, ranks: Ranks) -> Iterator[None]:
        """As in `Sampler.ready`.

        Raises:
            ValueError: vLLM cannot run the policy's model.
            RuntimeError: It has kept some of its weights, or keys and values of older ones.
        """
        if not hasattr(policy, "weights"):
            raise ValueError(f"sampler=vllm: allowed are policies of transformers; this is a {type(policy).__name__}")
        self._version = None
        with clock("wake"):
            if self._llm is None:
                self._llm = self._built(policy, ranks)
            else:
                self._wake("weights")  # before they are written: what sleeps has no memory to write to
        with clock("sync"):
            self._hand_over(policy, version)
        with clock("wake"):
            self._wake("kv_cache")
        yield
        if self._sleeps:
            self._llm.sleep(level=SLEEP)
        self._version = version

    def draw(self, request: GenerationRequest) -> Sequence[Completion]:
        """[B] completions, with the weights that were handed over last.

        Raises:
            ValueError: A prompt is too long.
            RuntimeError: The engine says that it has drawn with other weights.
        """
        limit = self._llm.model_config.max_model_len
        longest = max((len(ids) + most for ids, _, most in request.rows), default=0)
        if longest > limit:
            raise ValueError(
                f"prompt and completion need up to {longest} tokens, the engine holds {limit}: lower "
                "rollout.max_new_tokens or data.max_prompt_length, or raise sampler.max_model_len"
            )
        rows = [Row(number, *row) for number, row in enumerate(request.rows)]
        with undisturbed(), plain_arithmetic(self._device):
            if self.tensor_parallel_size == 1:
                return drawn(self._llm.llm_engine, rows, request, version=self._label)
            # All of a group draw the same, and keep what each was asked for.
            of_all = self._of_group(rows)
            together = [row for part in of_all for row in part]
            numbered = [Row(number, row.prompt, row.seed, row.max_tokens) for number, row in enumerate(together)]
            found = drawn(self._llm.llm_engine, numbered, request, version=self._label, alone=False)
            first = sum(len(part) for part in of_all[: dist.get_rank() % self.tensor_parallel_size])
            return found[first : first + len(rows)]

    def any_process(self, value: bool) -> bool:
        return value if self.tensor_parallel_size == 1 else any(self._of_group(value))

    def _of_group(self, value: T) -> list[T]:
        """The values of every process of this one's tensor-parallel group."""
        from vllm.distributed.parallel_state import get_tp_group

        parts: list[Any] = [None] * self.tensor_parallel_size
        dist.all_gather_object(parts, value, group=get_tp_group().cpu_group)
        return parts

    def _built(self, policy: WeightSource, ranks: Ranks) -> Any:
        """An engine without weights."""
        if ranks.size % self.tensor_parallel_size:
            raise ValueError(
                f"sampler.tensor_parallel_size={self.tensor_parallel_size}: allowed are divisors of the run's "
                f"{ranks.size} processes"
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self._device.type == "cuda"
        cache = self.kv_cache_gib or (None if on_gpu else CPU_CACHE_GIB)
        with TemporaryDirectory(prefix="grpo-lightning-") as folder, launched(ranks), undisturbed():
            self._dtype = policy.describe(Path(folder))  # outside of what follows, where nothing is rounded
            if self.dtype is not None:
                self._dtype = getattr(torch, self.dtype)
            more = dict(self.engine)
            if not on_gpu:
                check_heads(folder)
                more |= for_cpu(folder, self.max_model_len)
            with plain_arithmetic(self._device):
                from vllm import LLM

                return LLM(
                    model=folder,
                    skip_tokenizer_init=True,  # token ids in, token ids out
                    dtype=str(self._dtype).removeprefix("torch."),
                    seed=self.seed + ranks.rank // self.tensor_parallel_size,  # those that share weights draw the same
                    generation_config="vllm",  # not the model's, which may hold penalties
                    load_format="dummy",
                    logprobs_mode="processed_logprobs",  # of what is drawn from: with the temperature
                    enable_prefix_caching=True,
                    distributed_executor_backend="external_launcher",
                    tensor_parallel_size=self.tensor_parallel_size,
                    enforce_eager=self.enforce_eager,
                    max_model_len=self.max_model_len,
                    gpu_memory_utilization=self.gpu_memory_utilization,
                    kv_cache_memory_bytes=None if cache is None else int(cache * GIB),
                    enable_sleep_mode=on_gpu and self.sleep,
                    **more,
                )

    def _hand_over(self, policy: WeightSource, version: int) -> None:
        """Write the policy's weights into the engine, and forget what was computed with older ones."""

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, weight in policy.weights():
                yield name, weight.to(self._dtype)

        with complaints() as told, plain_arithmetic(self._device):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": cast()})
        if wrong := [said for said in told if "RotaryEmbedding:" not in said]:  # which has no weights
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
