"""vLLM inside the trainer's processes: one engine in each, or one in each group that shares its weights.

It holds weights of its own, in the form that its kernels want, which are written anew before every rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lightning.clock import Clock
from grpo_lightning.config.consistency import engine_problems, missing_vllm
from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.sampler.support import options
from grpo_lightning.sampler.vllm.engine import Completion, EngineSampler, GenerationRequest, WeightSource
from grpo_lightning.sampler.vllm.process_setup import (
    check_heads,
    complaints,
    for_cpu,
    launched,
    plain_arithmetic,
    undisturbed,
)
from grpo_lightning.types import Sampling

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
            self._dtype = policy.write_config(Path(folder))  # outside of what follows, where nothing is rounded
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
            for name, weight in policy.named_weights():
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


@dataclass
class Row:
    """A completion that is being drawn."""

    number: int
    prompt: Sequence[int]
    seed: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False
    is_stopped: bool = False
    """Whether it ended with a stop string."""
    versions: frozenset[str] = frozenset()
    """Of the weights that it was drawn with, as the engine says at its end."""

    def completion(self, end_ids: Sequence[int]) -> Completion:
        """What it came to."""
        return Completion(self.ids, self.logprobs, finished=self.is_stopped or self.ids[-1] in end_ids)


def drawn(
    engine: Any, rows: Sequence[Row], request: GenerationRequest, *, version: str, alone: bool = True
) -> list[Completion]:
    """All rows to their ends.

    Args:
        engine: A ``vllm.LLMEngine`` without requests.
        rows: Numbered from 0.
        request: How they are drawn.
        version: Of the weights that it has.
        alone: Whether this process may leave between tokens; not where others draw the same.

    Raises:
        RuntimeError: The engine says that it has drawn with other weights.
    """
    has_stops = request.stops is not None
    for row in rows:
        prompt = {"prompt_token_ids": list(row.prompt)}
        engine.add_request(str(row.number), prompt, parameters(request, row, stepwise=has_stops))
    try:
        while engine.has_unfinished_requests():
            if request.poll and alone:
                request.poll()
            changed = [_taken(rows, output) for output in engine.step()]
            if has_stops and (ended := _cut(request, changed)):
                engine.abort_request([str(row.number) for row in ended])
            for row in changed:
                if request.on_finished and alone and row.is_over and row.completion(request.end_ids).finished:
                    request.on_finished(row.number, row.ids)
    except BaseException:
        engine.abort_request([str(row.number) for row in rows if not row.is_over])
        raise
    if others := frozenset().union(*(row.versions for row in rows)) - {version}:
        raise RuntimeError(f"sampler=vllm: drawn with weights of version {', '.join(sorted(others))}, not {version}")
    return [row.completion(request.end_ids) for row in rows]


def parameters(request: GenerationRequest, row: Row, *, stepwise: bool) -> Any:
    """VLLM's parameters of one completion: nothing but temperature and filters shapes the distribution.

    Args:
        request: How completions are drawn.
        row: This one.
        stepwise: Whether its tokens are wanted as they come.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: Sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        **options(sampling),
        seed=row.seed,
        max_tokens=row.max_tokens,
        stop_token_ids=list(request.end_ids),
        ignore_eos=True,  # the line above has all of them
        logprobs=0,  # of the token that was drawn
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stepwise else RequestOutputKind.FINAL_ONLY,
    )


def _taken(rows: Sequence[Row], output: Any) -> Row:
    """The row of an output, with what the output adds."""
    row, part = rows[int(output.request_id)], output.outputs[0]
    row.ids += part.token_ids
    row.logprobs += part.logprobs.logprobs if part.logprobs else ()
    row.is_over = output.finished
    row.versions |= {span.version for span in part.weight_versions or ()}
    return row


def _cut(request: GenerationRequest, rows: Sequence[Row]) -> list[Row]:
    """The rows that end with a stop string, cut behind the token that completes it; one token is new in each.

    Returns:
        Those of them that the engine would go on with.
    """
    stops = request.stops
    if stops is None:
        return []
    kept = stops([row.ids[-stops.tail :] for row in rows], [1] * len(rows))
    ended = [row for row, tokens in zip(rows, kept, strict=True) if tokens]
    running = [row for row in ended if not row.is_over]
    for row in ended:
        row.is_stopped = row.is_over = True
    return running
