"""Whether what belongs to quantized weights fits them: kernels of bitsandbytes trust it, and read or write beyond.

And how such weights are saved.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers that share one scale in bitsandbytes."""
_COMPUTED = (None, torch.float16, torch.bfloat16, torch.float32)


def state_problem(weight: Tensor) -> str | None:
    """What does not fit a weight as bitsandbytes quantizes it, to be read behind its name; None of any other.

    Args:
        weight: Of any class.
    """
    name = type(weight).__name__
    if name == "Params4bit" and (state := getattr(weight, "quant_state", None)) is not None:
        return _of_four_bits(weight, state)
    if name == "Int8Params" and weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        return None if scales is None or _is(scales, len(weight), torch.float32) else "has other scales than rows"
    return None


def keep_packed(model: Any) -> None:
    """Let a model be saved with packed weights as it holds them: transformers, which has read them, knows no way back.

    Args:
        model: As transformers has loaded it.
    """
    if getattr(model, "is_quantized", False):
        made = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [conversion for conversion in made if _is_reversible(conversion)]


def _is_reversible(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def layer_problem(layer: nn.Module) -> str | None:
    """What does not fit a quantized layer, to be read behind its name; None of any other.

    In other types than these bitsandbytes computes nothing, and gives memory as it finds it. Where one that BitNet
    packs, four numbers in a byte, makes fewer features than it says, attention may have fewer keys than values, which
    torch does not compare.

    Args:
        layer: Of any class.
    """
    if type(layer).__name__ == "Linear4bit":
        kind = getattr(layer, "compute_dtype", None)  # peft has layers of this name, too, around these
        return None if kind in _COMPUTED else f"computes in {kind}; allowed are float16, bfloat16 and float32"
    if type(layer).__name__ != "BitLinear":
        return None
    sizes = [getattr(layer, name, None) for name in ("out_features", "in_features")]
    weight = getattr(layer, "weight", None)
    is_packed = isinstance(weight, Tensor) and weight.dim() == 2 and [4 * len(weight), weight.shape[1]] == sizes
    return None if is_packed else f"has other weights than its sizes say, {sizes[0]} x {sizes[1]}"


def compare_inputs(layer: nn.Module) -> None:
    """Have a quantized layer of bitsandbytes refuse inputs of another width: kernels read as many as there are weights.

    Args:
        layer: Of any class; changed in place.
    """
    if type(layer).__name__ in ("Linear4bit", "Linear8bitLt") and _refuse not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_refuse)


def _refuse(layer: nn.Module, given: tuple[Any, ...]) -> None:
    if given and given[0].shape[-1] != layer.in_features:
        raise ValueError(f"a quantized layer has {layer.in_features} inputs, and is given {given[0].shape[-1]}")


def _of_four_bits(weight: Tensor, state: Any) -> str | None:
    numbers, scales = math.prod(state.shape), state.absmax
    if weight.numel() * weight.element_size() * 2 < numbers:
        return f"has fewer than {numbers} numbers"
    if not _has_scales(state, numbers, torch.uint8 if state.nested else torch.float32, codes=16):
        return f"has not the scales of {numbers} numbers"
    if state.nested and not (
        _is(state.offset, 1, None) and _has_scales(state.state2, scales.numel(), torch.float32, 256)
    ):
        return f"has not the scales of {scales.numel()} scales"
    return None


def _has_scales(state: Any, numbers: int, kind: torch.dtype, codes: int) -> bool:
    is_block = type(state.blocksize) is int and state.blocksize in _BLOCKS
    return (
        is_block and _is(state.absmax, -(-numbers // state.blocksize), kind) and _is(state.code, codes, torch.float32)
    )


def _is(tensor: Any, size: int, kind: torch.dtype | None) -> bool:
    return isinstance(tensor, Tensor) and tensor.numel() == size and kind in (None, tensor.dtype)
