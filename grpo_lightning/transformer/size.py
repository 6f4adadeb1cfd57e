"""The sizes of a model, how much arithmetic it needs, and how fast the machine could do that."""

import math
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import nn

from grpo_lightning.memory import Shape
from grpo_lightning.transformer.logprobs import lengths, same_prompts
from grpo_lightning.types import Rollout, Sampled


def forward_flops(decoder: Any, vocabulary: int, rows: Sampled | Rollout) -> float:
    """The least floating-point operations that log-probabilities of completions take, every prompt computed once.

    2 W (S + sum T) + 2 V H sum M for the matrices, with W weights in those of the decoder (the model without its
    head), prompts of S tokens and completions of T, of which M are in the mask, and 4 H per layer for every pair of a
    token and one that it attends to. Of a mixture of experts all experts are counted.
    """
    config = decoder.config.get_text_config()
    completions, widths = lengths(rows)
    tokens = prompts = pairs = 0.0
    for group in same_prompts(rows):
        width = widths[group[0]]
        prompts += width
        pairs += width * width / 2
        for row in group:
            tokens += completions[row]
            pairs += completions[row] * (width + completions[row] / 2)
    head = 2.0 * vocabulary * config.hidden_size * float(rows.mask.sum())
    attention = 4.0 * config.hidden_size * config.num_hidden_layers * pairs
    return float(2.0 * matrix_weights(decoder) * (prompts + tokens) + head + attention)


def matrix_weights(decoder: Any) -> int:
    """The number of weights in the decoder's linear layers, an adapter's included."""
    modules = list(decoder.modules())
    linear: int = sum(module.in_features * module.out_features for module in modules if isinstance(module, nn.Linear))
    convolutions = (module for module in modules if type(module).__name__ == "Conv1D")  # GPT-2's linear layers
    return linear + sum(int(module.weight.numel()) for module in convolutions)


def shape_of(model: Any) -> Shape:
    """The sizes of a transformers causal language model, with or without an adapter; on the meta device, too."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    sizes = {True: 0, False: 0}  # by whether they are trained
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)  # bitsandbytes packs two 4-bit numbers into one
        sizes[weight.requires_grad] += int(weight.numel() if state is None else math.prod(state.shape))
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        trained=sizes[True],
        frozen=sizes[False],
        body=matrix_weights(base.get_decoder()),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        keys=width * (getattr(config, "num_key_value_heads", None) or heads),
    )


@cache
def matmul_rate(hidden: int, *, device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """The best rate of a product of [2048, H] by [H, 4 H], in floating-point operations per second; measured once."""
    # Not ones, nor zeros: a GPU draws less power for them and runs faster than it ever would.
    numbers = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(shape, device=device, dtype=dtype, generator=numbers)
        for shape in ((2048, hidden), (hidden, 4 * hidden))
    )
    on_gpu = device.type == "cuda"
    queued = 20 if on_gpu else 1  # so that starting a product is hidden by those before it

    def once() -> float:
        started = perf_counter()
        for _ in range(queued):
            left @ right
        if on_gpu:
            torch.cuda.synchronize(device)
        return (perf_counter() - started) / queued

    once()  # it may load libraries
    # The best of several: whatever else the machine does can only make one slower.
    best, until = once(), perf_counter() + seconds
    while perf_counter() < until:
        best = min(best, once())
    return 2 * 2048 * hidden * 4 * hidden / best
