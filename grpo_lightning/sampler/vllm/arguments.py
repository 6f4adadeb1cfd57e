"""What vLLM is told, and what it may not be told: nothing here imports it."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from grpo_lightning.allowed import Rule, choice, flag, integer, number

INSTALL = "pip install -r requirements-vllm.txt"
"""What brings vLLM, into an environment of its own; the file is in the project's repository."""

ENGINE = (
    *("async_scheduling", "block_size", "cpu_offload_gb", "disable_custom_all_reduce", "enable_chunked_prefill"),
    *("kv_cache_dtype", "long_prefill_token_threshold", "max_num_batched_tokens", "max_num_partial_prefills"),
    *("max_num_seqs", "num_gpu_blocks_override", "quantization", "use_fp64_gumbel"),
)
"""Further arguments of vLLM's that settings may hold: none names code, and none changes which tokens are drawn."""

SAMPLING = (
    *("allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logits_processors", "min_tokens"),
    *("override_generation_config", "presence_penalty", "repetition_penalty", "top_k", "top_p", "min_p", "temperature"),
)
"""Options with which another distribution would be sampled than the one that is trained."""

_DTYPE = choice("float32", "bfloat16", "float16")
RULES: Mapping[str, Rule] = {
    "dtype": Rule(_DTYPE.test, "float32, bfloat16 or float16", null=True),
    "max_model_len": integer(2, null=True),
    "gpu_memory_utilization": number(lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "kv_cache_gib": number(lambda v: v > 0, "GiB > 0", null=True),
    "tensor_parallel_size": integer(1),
    "enforce_eager": flag(),
    "sleep": flag(),
    "timeout": number(lambda v: v > 0, "seconds > 0"),
}
"""What each setting of ``sampler`` may be."""


def problems(engine: Mapping[str, Any]) -> list[str]:
    """What is wrong with further arguments of the engine, by key."""
    found = []
    for key, value in engine.items():
        told = f"sampler.engine.{key}={value}: "
        if key in SAMPLING:
            found.append(
                f"{told}allowed are arguments that leave the distribution as it is: what is sampled must be what is "
                "trained, and the keys of rollout are all that shapes it"
            )
        elif key not in ENGINE:
            found.append(f"{told}allowed are {', '.join(ENGINE)}")
    return found


def missing() -> str | None:
    """What to do where vLLM is not installed; None where it is."""
    if find_spec("vllm") is not None:
        return None
    return f"sampler=vllm: vLLM is not installed; allowed is sampler=own, or an environment of its own with: {INSTALL}"
