"""Models with an adapter of peft's, which is imported only where there is one: it takes seconds."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from grpo_lightning.sampler.native.fused_decode import plain_weight

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor


def is_adapted(model: Any) -> "TypeGuard[PeftModel]":
    """Whether a model has an adapter; whoever has put it there has imported peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def without_adapters(model: Any) -> Any:
    """The model with the adapters that lie beside its weights merged into them: they are what is trained and exported.

    transformers puts such adapters into the layers, leaves them alone to be trained, and would save nothing else.

    Args:
        model: As transformers has loaded it.
    """
    if not getattr(model, "_hf_peft_config_loaded", False):
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    replaced = list[str]()
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if name.startswith(tuple(f"{one}." for one in replaced)):
            continue
        if isinstance(layer, AuxiliaryTrainingWrapper):
            merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(layer, BaseTunerLayer):
            layer.merge()
            merged = layer.get_base_layer()
        else:
            continue
        setattr(model.get_submodule(parent), last, merged)
        replaced.append(name)
    del model.peft_config, model._weight_conversions  # names in files of peft's: those of the architecture count again
    model._hf_peft_config_loaded = False
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


def base_of(model: Any) -> Any:
    """The model below the adapter, or the model itself where it has none."""
    return model.get_base_model() if is_adapted(model) else model


def weight_of(layer: Any) -> "tuple[Tensor, Tensor | None]":
    """The weight [out, in] and bias [out] of a linear layer, with the LoRA adapter on it, if there is one, merged.

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


def with_adapter(model: Any, adapter: "Mapping[str, Any] | PeftConfig") -> Any:
    """The model with a new adapter, which alone is trained.

    Args:
        model: A transformers causal language model, whose weights may be quantized.
        adapter: Arguments of peft's ``LoraConfig``, or a config of peft's.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config: Any = LoraConfig(task_type="CAUSAL_LM", **adapter) if isinstance(adapter, Mapping) else adapter
    return get_peft_model(model, config)
