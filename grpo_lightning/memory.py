"""Memory that a run will need, predicted from its settings and the sizes of its model.

Figures are bytes that one process allocates. Python, the libraries and what an allocator keeps for later come on top.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_lightning.config.rules import REFERENCE_KEYS
from grpo_lightning.config.settings import value_at
from grpo_lightning.console import is_first_process, log_line, wrap
from grpo_lightning.distributed.strategies import trainer_shards

if TYPE_CHECKING:
    from lightning import Trainer

log = logging.getLogger(__name__)

GiB = float(2**30)
COPIED = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Bytes of a layer's prompt keys and values, by device, up to which every completion has a copy of its own. Above,
attention reads a prompt once per group, which saves memory traffic but costs a dozen operations."""
_CHUNK_BYTES = {"cpu": 64.0 * 2**20, "cuda": float(2**30)}
"""Bytes of the logits that exist at a time, by device, see `transformer.lm_head`."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a policy's model, with its adapter."""

    trained: int  # parameters that are trained
    frozen: int  # parameters that are not
    body: int  # parameters of the decoder layers' matrices, without an adapter
    hidden: int  # size of a hidden state
    layers: int  # decoder layers
    intermediate: int  # width of the feed-forward layers
    vocabulary: int  # tokens of the vocabulary
    keys: int  # width of a layer's keys: key heads times their size


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run does with its model; sizes are those of one process."""

    prompts: int  # prompts of a rollout
    group_size: int  # completions per prompt
    prompt_tokens: int  # length of every prompt
    completion_tokens: int  # length of every completion
    microbatch_tokens: int  # most tokens in one forward pass of an update
    device: str = "cpu"  # or cuda
    is_half: bool = False  # whether the precision is bf16-mixed
    state_bytes: float = 8.0  # the optimizer's, per trained parameter: 8 for AdamW, about 2 with 8-bit states
    frozen_bytes: float = 4.0  # of a parameter that is not trained: 4, 2, about 1 (8bit) or 0.5 (4bit)
    reference_bytes: float = 0.0  # of a parameter of the reference; 0 without one of its own
    shards: int = 1  # processes over which weights, gradients and optimizer are divided
    minibatches: int = 1  # optimizer steps in one pass over a rollout
    checkpointing: bool = False  # whether gradient checkpointing is on
    shares_prompts: bool = True  # whether a prompt is computed and kept once for its group
    offloads: bool = False  # whether activations wait in CPU RAM for the backward pass
    copy_bytes: float = 0.0  # of a number in the sampler's copy of the weights; 0 where it makes none
    kv_cache_bytes: float | None = None  # most bytes of keys and values at a time; None: any number


def predict(shape: Shape, load: Workload) -> dict[str, float]:
    """The bytes that a run needs, by part: "weights", "optimizer", "reference", "sampling", "update" and "peak".

    "sampling" and "update" are not needed at the same time; "peak" is the sum with the larger of the two. Gradients and
    logits are float32 everywhere. Of sharded weights sampling gathers all, an update two layers at a time.
    """
    parameters = shape.trained + shape.frozen
    states = {
        "weights": (4.0 * shape.trained + load.frozen_bytes * shape.frozen) / load.shards,
        "optimizer": load.state_bytes * shape.trained / load.shards,
        "reference": load.reference_bytes * parameters / load.shards,
    }
    rows = load.prompts * load.group_size
    prompts = load.prompts if load.shares_prompts else rows
    tokens = prompts * load.prompt_tokens + rows * load.completion_tokens
    remote = 1 - 1 / load.shards  # share of the weights that other processes hold

    of_token = 2.0 * (2.0 if load.is_half else 4.0) * shape.keys * shape.layers  # keys and values
    completion = of_token * load.completion_tokens
    cached = of_token * prompts * load.prompt_tokens
    if load.kv_cache_bytes is not None:
        rows = min(rows, int(max(1.0, load.kv_cache_bytes // (of_token * load.prompt_tokens + completion))))
    if load.shares_prompts and (copies := rows * of_token * load.prompt_tokens) <= COPIED[load.device] * shape.layers:
        cached += copies
    cached += rows * completion * (1 + 1 / shape.layers)  # room is doubled layer by layer: one then exists twice
    sampling = cached + load.copy_bytes * (shape.body + shape.vocabulary * shape.hidden)
    sampling += 4.0 * parameters * remote + 3 * 4.0 * rows * shape.vocabulary

    share = load.prompts * load.group_size * load.completion_tokens / tokens
    update = _update_bytes(shape, load, tokens=tokens / load.minibatches, share=share)
    update += 4.0 * (parameters - shape.body * (1 - 2 / shape.layers)) * remote
    if load.is_half:  # autocast copies each float32 weight, and the backward pass needs the copy again
        copied = parameters if load.frozen_bytes == 4 else shape.trained
        update += 2.0 * max(copied - load.checkpointing * shape.body * (1 - 1 / shape.layers), 0.0)
    return states | {"sampling": sampling, "update": update, "peak": sum(states.values()) + max(sampling, update)}


def _update_bytes(shape: Shape, load: Workload, *, tokens: float, share: float) -> float:
    """Bytes of activations, logits and gradients of an optimizer step; ``share`` of its tokens are of completions."""
    number = 2.0 if load.is_half else 4.0
    part = min(tokens, max(load.microbatch_tokens, load.prompt_tokens + load.completion_tokens))
    hidden, wide = 4.0 * shape.hidden * part, number * shape.intermediate * part
    # Two norms keep their input and what they normalize, and the layers after them their input, of which autocast makes
    # five copies in 16 bits; attention keeps queries, keys, values and output; the feed-forward layer 4 wide tensors.
    norms = 4 * hidden + 5 * hidden / 2 if load.is_half else 6 * hidden
    layer = norms + number * 2 * (shape.hidden + shape.keys) * part + 4 * wide
    # all that is kept, that without the last layer, and that layer while it goes backward
    kept, below, backward = layer * shape.layers, layer * (shape.layers - 1), layer + 2 * wide
    if load.checkpointing:
        kept = below = 0.0 if load.offloads else hidden * shape.layers
    elif load.offloads:
        kept, below, backward = 0.0, 0.0, hidden + 5 * wide
    logits = 4.0 * part * share * shape.vocabulary
    if load.shares_prompts:  # in chunks; a GPU writes their gradient as products take it
        logits = (1.0 + (1.0 if load.device == "cpu" else number / 4.0)) * min(_CHUNK_BYTES[load.device], logits)
    else:  # the model's own, divided by the temperature, and three in its backward pass
        logits *= 5
    head = (3 + 2 * share) * hidden + logits
    head_gradient = 4.0 * shape.vocabulary * shape.hidden * (shape.trained > shape.frozen)
    gradients = 4.0 * shape.trained / load.shards
    if part < tokens:  # the later micro-batches find gradients there
        return gradients + max(kept + head + head_gradient, below + backward)
    # the backward pass frees activations as it makes gradients
    return max(kept + head + head_gradient, below + backward + head_gradient, gradients + backward)


def announce_memory(config: Mapping[str, Any], module: Any, data: Any, trainer: "Trainer") -> dict[str, float]:
    """Print the memory that a run needs, and warn where a GPU has less; returns the bytes by part, if predictable."""
    shape = module.policy.shape()
    parts = ("policy", "loss", "rollout", "reference", "data", "trainer", "module", "optimizer")
    is_described = all(isinstance(config.get(name), Mapping) for name in parts)  # no part is an object
    if shape is None or not is_described or "rollout" not in config["module"] or not is_first_process():
        return {}
    on_cpu = trainer.strategy.root_device.type == "cpu"
    first = [data.validation[number][0] for number in range(min(64, len(data.validation)))]
    load = workload(
        config,
        processes=trainer.world_size,
        is_sharded=trainer_shards(trainer),
        on_cpu=on_cpu,
        prompt_tokens=max(module.policy.count_tokens(first)),
    )
    predicted = predict(shape, load)
    sizes = {name: f"{size / GiB:.2f}" for name, size in predicted.items() if name != "peak"}
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.00")
    for line in wrap(f"memory: {predicted['peak'] / GiB:.2f} GiB at most{f' ({listed})' * bool(listed)}, predicted"):
        log_line(line)
    if not on_cpu and predicted["peak"] > (available := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            available / GiB,
        )
    return predicted


def workload(
    config: Mapping[str, Any], *, processes: int, is_sharded: bool, on_cpu: bool, prompt_tokens: int
) -> Workload:
    """What a GRPO run with these settings does with its model."""
    policy, rollout, reference = config["policy"], config["rollout"], config["reference"]
    is_half, is_quantized = config["trainer"]["precision"] == "bf16-mixed", bool(policy.get("quantization"))
    completions = config["data"]["prompts_per_step"] * rollout["group_size"]
    budget = rollout.get("kv_cache_gib")
    has_reference = any(value_at(config, key) for key in REFERENCE_KEYS) and not reference.get("offload")
    own_reference = has_reference and not str(reference["_target_"]).endswith((".adapter_off", ".none"))
    makes_copy = policy.get("share_prompts", True) and not is_quantized and (is_half or on_cpu)
    return Workload(
        prompts=-(-config["data"]["prompts_per_step"] // processes),
        group_size=rollout["group_size"],
        prompt_tokens=prompt_tokens,
        completion_tokens=_largest(rollout["max_new_tokens"]),
        microbatch_tokens=config["module"]["microbatch_tokens"],
        device="cpu" if on_cpu else "cuda",
        is_half=is_half,
        state_bytes=2.03 if str(config["optimizer"]["_target_"]).endswith("8bit") else 8.0,
        frozen_bytes=_bytes(policy),
        reference_bytes=_bytes(reference, default=policy) if own_reference else 0.0,
        shards=processes if is_sharded else 1,
        minibatches=max(1, round(completions / (config["module"]["minibatch_size"] or completions))),
        checkpointing=bool(policy.get("gradient_checkpointing")),
        shares_prompts=bool(policy.get("share_prompts", True)),
        offloads=bool(policy.get("activation_offload")),
        copy_bytes=(2.0 if is_half else 4.0) if makes_copy else 0.0,
        kv_cache_bytes=None if budget is None else budget * GiB,
    )


def _bytes(model: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> float:
    """Bytes of a parameter, by a model's ``quantization`` and ``dtype``."""
    dtype = model.get("dtype") or (default or {}).get("dtype")
    size = {"bfloat16": 2.0, "float16": 2.0}.get(str(dtype), 4.0)
    return {"8bit": 1.03, "4bit": 0.53}.get(str(model.get("quantization")), size)


def _largest(number: Any) -> int:
    """The largest value of a number that may be scheduled."""
    return int(max(number["start"], number.get("end", 0)) if isinstance(number, Mapping) else number)
