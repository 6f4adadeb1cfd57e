"""How much memory a run will need, predicted from its settings and the sizes of its model.

Figures are bytes that one process allocates. Python, the libraries and what an allocator keeps for later come on top.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GiB = float(2**30)
CHUNK_BYTES = {"cpu": 64.0 * 2**20, "cuda": float(2**30)}
"""Bytes of the logits that exist at a time, by device, see `transformer.lm_head`."""
_FIRST_ROOM = {"cpu": 64, "cuda": 256}
"""Tokens that a completion has room for at first, see `sampler.native.shared_prompt_cache`."""
COPIED = {"cpu": 4 << 20, "cuda": 32 << 20}
"""The most bytes of a layer's prompt keys and values that completions have copies of, by device. With more, prompts are
attended to once per group; as soon as so few completions are left that copies for each would be smaller, they are
copied. Reading is saved against a dozen operations, in whose time a GPU reads more."""
LARGEST_SET = 1024
"""The most tokens that truncated sampling draws from, see `sampler.native.token_sampling`."""
_DRAWS = {"cpu": 2, "cuda": 17}
"""How many tokens of a completion are drawn at most between two looks at them, see `sampler.native.sampler`."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a policy's model, with its adapter."""

    trained: int
    """How many parameters are trained."""
    frozen: int
    """How many parameters are not."""
    body: int
    """How many parameters the matrices of the decoder layers have, without an adapter."""
    hidden: int
    """The size of a hidden state."""
    layers: int
    """The number of decoder layers."""
    intermediate: int
    """The width of the feed-forward layers."""
    vocabulary: int
    """The number of tokens in the vocabulary."""
    keys: int
    """The width of the keys of a layer: key heads times their size."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a run does with its model."""

    prompts: int
    """Prompts of a rollout that fall to one process."""
    group_size: int
    """Completions per prompt."""
    prompt_tokens: int
    """The length of every prompt."""
    completion_tokens: int
    """The length of every completion."""
    microbatch_tokens: int
    """The most tokens in one forward pass of an update."""
    device: str = "cpu"
    """The kind of device: cpu or cuda."""
    is_half: bool = False
    """Whether the precision is bf16-mixed."""
    state_bytes: float = 8.0
    """The optimizer's bytes for one trained parameter: 8 for AdamW, about 2 with 8-bit states."""
    frozen_bytes: float = 4.0
    """The bytes of a parameter that is not trained: 4, 2, about 1 (8bit) or 0.5 (4bit)."""
    reference_bytes: float = 0.0
    """The bytes of a parameter of the reference; 0 without one, or where it is the policy with its adapter off."""
    shards: int = 1
    """Processes over which weights, gradients and optimizer are divided."""
    minibatches: int = 1
    """Optimizer steps in one pass over a rollout."""
    checkpointing: bool = False
    """Whether the backward pass computes activations again instead of keeping them."""
    shares_prompts: bool = True
    """Whether a prompt is computed and kept once for its whole group."""
    offloads: bool = False
    """Whether activations wait in the computer's memory for the backward pass."""
    copy_bytes: float = 0.0
    """The bytes of a number in the copy of the weights that the sampler makes; 0 where it makes none."""
    kv_cache_bytes: float | None = None
    """The most bytes of keys and values of completions at a time, where the others wait; None: any number."""
    set_tokens: int = 0
    """The most tokens that a token is drawn from where sampling is truncated; 0 where it is not."""


def predicted(shape: Shape, use: Use) -> dict[str, float]:
    """The bytes that a run needs, by part: "weights", "optimizer", "reference", "sampling", "update" and "peak".

    "sampling" and "update" are not needed at the same time; "peak" is the sum with the larger of the two. Gradients and
    logits are float32 everywhere. Of sharded weights an update gathers two layers at a time, and what lies outside of
    the layers.
    """
    everything = shape.trained + shape.frozen
    states = {
        "weights": (4.0 * shape.trained + use.frozen_bytes * shape.frozen) / use.shards,
        "optimizer": use.state_bytes * shape.trained / use.shards,
        "reference": use.reference_bytes * everything / use.shards,
    }
    number = 2.0 if use.is_half else 4.0
    rows = use.prompts * use.group_size
    held = use.prompts if use.shares_prompts else rows
    tokens = held * use.prompt_tokens + rows * use.completion_tokens
    # autocast makes a bfloat16 copy of each float32 weight, which the backward pass needs again
    wide = everything if use.frozen_bytes == 4 else shape.trained
    copied = wide - shape.body * (1 - 1 / shape.layers) if use.checkpointing else wide
    cast = 2.0 * max(copied, 0.0) if use.is_half else 0.0
    elsewhere = 1 - 1 / use.shards
    embeddings = everything - shape.body

    of_token = 2.0 * number * shape.keys * shape.layers
    prompts = of_token * held * use.prompt_tokens
    completion = of_token * use.completion_tokens
    budget = use.kv_cache_bytes

    def at_most(each: float) -> float:
        """How many completions are held at a time, each of so many bytes."""
        return rows if budget is None else min(rows, max(1.0, (budget - prompts) // each))

    at_once = at_most(completion)
    copies, copy = 0.0, of_token * use.prompt_tokens
    if use.shares_prompts and at_once * copy <= COPIED[use.device] * shape.layers:
        at_once = at_most(completion + copy)
        copies = at_once * copy
    # Room is doubled layer by layer, so that a layer's keys and values then exist in the old room and the new one.
    first = _FIRST_ROOM[use.device]
    before = first * 2.0 ** math.floor(math.log2(max(1.0, (use.completion_tokens - 1) / first)))
    doubled = min(1.0, before / use.completion_tokens) / shape.layers
    keys = prompts + copies + at_once * completion * (1 + doubled)
    copied = use.copy_bytes * (shape.body + shape.vocabulary * shape.hidden)
    gathered = 4.0 * (embeddings + shape.body) * elsewhere
    # Sets wait in a buffer between two looks, and are sorted as numbers of 64 bits.
    sets = (4.0 * _DRAWS[use.device] + 48) * at_once * min(use.set_tokens, shape.vocabulary)
    sampling = keys + copied + gathered + 3 * 4.0 * at_once * shape.vocabulary + sets
    update = _update(shape, use, tokens=tokens / use.minibatches, share=rows * use.completion_tokens / tokens)
    gathered = 4.0 * (embeddings + shape.body * 2 / shape.layers) * elsewhere
    update += gathered + cast
    return states | {"sampling": sampling, "update": update, "peak": sum(states.values()) + max(sampling, update)}


def _update(shape: Shape, use: Use, *, tokens: float, share: float) -> float:
    """The bytes of activations, logits and gradients, for ``tokens`` of one optimizer step, each shared prompt once.

    Of these, ``share`` are tokens of completions.
    """
    part = min(tokens, max(use.microbatch_tokens, use.prompt_tokens + use.completion_tokens))
    rest = min(part, tokens - part)  # what goes through the model when there are gradients before it
    return max(_pass(shape, use, part=part, share=share), _pass(shape, use, part=rest, share=share, is_first=False))


def _pass(shape: Shape, use: Use, *, part: float, share: float, is_first: bool = True) -> float:
    """What `_update` gives, of one forward and backward pass with ``part`` tokens."""
    number = 2.0 if use.is_half else 4.0
    hidden = 4.0 * shape.hidden * part
    layer = activations(shape, is_half=use.is_half) * part
    wide = number * shape.intermediate * part
    # Where a layer's feed-forward part goes backward, gradients of product and activation are beside all that it kept.
    kept, others, turn = layer * shape.layers, layer * (shape.layers - 1), layer + 2 * wide
    if use.checkpointing:
        kept = others = 0.0 if use.offloads else hidden * shape.layers
    elif use.offloads:
        # These two and three of what was kept, the last of which leads to the gradient of a hidden state.
        kept, others, turn = 0.0, 0.0, hidden + 5 * wide
    logits = 4.0 * part * share * shape.vocabulary
    # The model's own forward pass makes all logits, and divided by the temperature; its backward pass three more.
    # What is outside of a set is masked, in a copy.
    every = 5.0 if not use.set_tokens else 6.25
    beside = 1.0 if use.device == "cpu" else number / 4.0  # a GPU writes the logits' gradient as products take it
    logits = (1.0 + beside) * min(CHUNK_BYTES[use.device], logits) if use.shares_prompts else every * logits
    # The last norm keeps its input and what it normalizes; the head all its input, that of completions, its gradient.
    head = (3 + 2 * share) * hidden + logits
    of_head = 4.0 * shape.vocabulary * shape.hidden * (shape.trained > shape.frozen)
    gradients = 4.0 * shape.trained / use.shards
    if not is_first:
        return gradients + max(kept + head + of_head, others + turn)
    # The backward pass frees activations as it makes gradients.
    return max(kept + head + of_head, others + turn + of_head, gradients + turn)


def activations(shape: Shape, *, is_half: bool) -> float:
    """The bytes that one Llama-type layer keeps of every token for its backward pass.

    Two norms keep their input and what they normalize, and the layers after them their input; attention its queries,
    keys, values and output; the feed-forward layer its two inputs, the activation and the product.
    """
    number = 2.0 if is_half else 4.0
    # Autocast hands each layer after a norm its own copy in 16 bits: three for attention, two for feed-forward.
    norms = (4.0 * 4 + 2.0 * 5) * shape.hidden if is_half else 4.0 * 6 * shape.hidden
    attention = number * (2 * shape.hidden + 2 * shape.keys)
    feed_forward = number * 4 * shape.intermediate
    return norms + attention + feed_forward


def table(parts: Mapping[str, float]) -> str:
    """What `predicted` returns, as one line of text in GiB, without parts that round to nothing."""
    sizes = {name: f"{size / GiB:.2f}" for name, size in parts.items() if name != "peak"}
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.00")
    return f"memory: {parts['peak'] / GiB:.2f} GiB at most{f' ({listed})' * bool(listed)}, predicted"


def _largest(number: Any) -> int:
    """The largest value of a number that may vary with the step."""
    if isinstance(number, Mapping):
        values = [_largest(number[name]) for name in ("start", "end") if name in number]
        return max(values + [_largest(value) for value in number.get("values", ())])
    return int(number)


def is_predictable(config: Mapping[str, Any]) -> bool:
    """Whether settings say what a prediction needs: they are for GRPO, and none of their parts is an object."""
    needed = {"policy": "share_prompts", "loss": "kl_coef", "rollout": "group_size", "data": "prompts_per_step"}
    parts = {name: config.get(name) for name in (*needed, "trainer", "module", "optimizer")}
    keys = needed | {"trainer": "precision", "module": "rollout", "optimizer": "_target_"}
    return all(isinstance(part, Mapping) and keys[name] in part for name, part in parts.items())


def use_of(config: Mapping[str, Any], *, processes: int, is_sharded: bool, on_cpu: bool, prompt_tokens: int) -> Use:
    """What a run with these settings does with its model.

    Args:
        config: The settings of a GRPO run.
        processes: How many processes the run has.
        is_sharded: Whether weights are divided over them.
        on_cpu: Whether it runs on a CPU.
        prompt_tokens: The length of its prompts.
    """
    policy, rollout = config["policy"], config["rollout"]
    needs_reference = bool(config["loss"]["kl_coef"] or rollout["kl_penalty"])
    reference = config["reference"]
    kind = str(reference["_target_"]).rpartition(".")[2]
    completions = config["data"]["prompts_per_step"] * rollout["group_size"]
    sizes = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
    quantized = {"8bit": 1.03, "4bit": 0.53}
    own = sizes.get(policy.get("dtype", "float32"), 4.0)
    reference_bytes = {"adapter_off": 0.0, "none": 0.0}.get(kind, sizes.get(str(reference.get("dtype")), own))
    reference_bytes = quantized.get(str(reference.get("quantization")), reference_bytes)
    budget = rollout.get("kv_cache_gib")
    return Use(
        prompts=-(-config["data"]["prompts_per_step"] // processes),
        group_size=rollout["group_size"],
        prompt_tokens=prompt_tokens,
        completion_tokens=_largest(rollout["max_new_tokens"]),
        microbatch_tokens=config["module"]["microbatch_tokens"],
        device="cpu" if on_cpu else "cuda",
        is_half=config["trainer"]["precision"] == "bf16-mixed",
        state_bytes=2.03 if str(config["optimizer"]["_target_"]).endswith("8bit") else 8.0,
        frozen_bytes=quantized.get(str(policy.get("quantization")), own),
        reference_bytes=0.0 if not needs_reference or reference.get("offload") else reference_bytes,
        shards=processes if is_sharded else 1,
        minibatches=max(1, round(completions / (config["module"]["minibatch_size"] or completions))),
        checkpointing=bool(policy.get("gradient_checkpointing")),
        shares_prompts=bool(policy.get("share_prompts", True)),
        offloads=bool(policy.get("activation_offload")),
        copy_bytes=_copy_bytes(config, on_cpu=on_cpu),
        kv_cache_bytes=None if budget is None else budget * GiB,
        set_tokens=_set_tokens(rollout),
    )


def _set_tokens(rollout: Mapping[str, Any]) -> int:
    """The most tokens of a set with these settings of a rollout; 0 where none is made."""
    if all(rollout.get(key, neutral) == neutral for key, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0))):
        return 0
    return min(_largest(rollout.get("top_k", 0)) or LARGEST_SET, LARGEST_SET)


def _copy_bytes(config: Mapping[str, Any], *, on_cpu: bool) -> float:
    """The bytes of a number in the sampler's copy of the weights, if it makes one: in the type it computes in."""
    policy = config["policy"]
    if not policy.get("share_prompts", True) or policy.get("quantization"):
        return 0.0
    if config["trainer"]["precision"] == "bf16-mixed":
        return 2.0
    return 4.0 if on_cpu else 0.0
