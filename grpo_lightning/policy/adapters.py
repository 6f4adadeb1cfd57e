"""LoRA adapters, and a model's weights with its adapters merged.

peft is imported only where there is an adapter: it takes seconds.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from grpo_lightning.sampler.native.fused_decode import plain_weight

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_COPY = re.compile(r"\.modules_to_save\.(\w+)\.")
"""In the name of a weight of which peft trains a copy beside the adapter."""


def is_adapted(model: Any) -> "TypeGuard[PeftModel]":
    """Whether a model has an adapter of peft's, which is then imported."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """The model below the adapter, or the model itself where it has none."""
    return model.get_base_model() if is_adapted(model) else model


def with_adapter(model: Any, adapter: "Mapping[str, Any] | PeftConfig") -> Any:
    """The model, which may be quantized, with a new adapter: arguments of ``LoraConfig``, or a config of peft's."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config: Any = LoraConfig(task_type="CAUSAL_LM", **adapter) if isinstance(adapter, Mapping) else adapter
    return get_peft_model(model, config)


def weight_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of a linear layer, with a LoRA adapter merged.

    Raises:
        TypeError: The layer, or its adapter, computes something else.
    """
    peft = sys.modules.get("peft")
    if peft is None or type(layer) is not peft.tuners.lora.Linear:
        return plain_weight(layer)
    weight, bias = plain_weight(layer.base_layer)
    if layer.disable_adapters or layer.merged:
        return weight, bias
    if layer.lora_variant or any(getattr(part, "bias", None) is not None for part in layer.lora_B.values()):
        raise TypeError("an adapter that is more than a product of two matrices")
    for name in layer.active_adapters:
        weight = weight + layer.get_delta_weight(name).to(weight.dtype)
    return weight, bias


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the model's files, one at a time, adapters merged; a tied one under each name.

    Where weights are sharded, all processes iterate together.

    Raises:
        ValueError: The adapter is more than a product of two matrices, or weights are quantized.
    """
    if any(not weight.is_floating_point() for weight in model.parameters()):
        raise ValueError("policy.quantization: vLLM needs weights that are not quantized")
    base = base_of(model)
    probe = {"": torch.empty(0)}
    if getattr(base, "_weight_conversions", None) is None and revert_weight_conversion(base, probe) is probe:
        yield from _merged(base)
    else:  # some architectures hold weights otherwise than their files, such as all experts in one tensor
        yield from revert_weight_conversion(base, dict(_merged(base))).items()


def _merged(base: Any) -> Iterator[tuple[str, Tensor]]:
    for name, layer in base.named_modules():
        is_adapter = hasattr(layer, "base_layer")
        if is_adapter and (getattr(layer, "lora_variant", None) or not hasattr(layer, "get_delta_weight")):
            raise ValueError(
                f"policy.adapter: {name} has an adapter that is more than a product of two matrices "
                f"({type(layer).__name__}); vLLM needs plain LoRA adapters"
            )
    for name, weight in base.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".original_module." in name:
            continue
        gathered = _gathered(weight)
        owner, _, last = name.rpartition(".base_layer.")
        if owner:
            layer = base.get_submodule(owner)
            if last == "weight" and not (layer.merged or layer.disable_adapters):
                for adapter in layer.active_adapters:
                    gathered = gathered + _gathered(layer.get_delta_weight(adapter)).to(gathered.dtype)
            name = f"{owner}.{last}"
        yield _COPY.sub(".", name), gathered


def _gathered(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
