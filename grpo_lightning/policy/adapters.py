"""LoRA adapters, and a model's weights with its adapters merged.

peft is imported only where there is an adapter: it takes seconds.
"""

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
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


def weight_of(layer: Any) -> tuple[Tensor, Tensor | None]:
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


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight, one at a time; a tied one under each of its names.

    Where weights are sharded and not gathered, all processes iterate together.

    Args:
        model: Of transformers, with or without an adapter of peft's.

    Raises:
        ValueError: The adapter is more than a product of two matrices, or weights are quantized.
    """
    if any(not weight.is_floating_point() for weight in model.parameters()):
        raise ValueError("policy: its weights are quantized; allowed with an engine are weights of one number each")
    plain = model.named_parameters(remove_duplicate=False)
    own = _merged(model) if is_adapted(model) else ((name, _whole(weight)) for name, weight in plain)
    if not _is_converted(base_of(model)):
        yield from own
        return
    held = dict(own)
    # Some architectures are held otherwise than their files have them, such as all experts in one tensor.
    yield from revert_weight_conversion(base_of(model), held).items()


def write_untied(model: Any, directory: Path) -> None:
    """Write the configuration of a model, without an adapter, whose head is no longer tied to the embedding.

    vLLM on a CPU keeps a packed copy of a tied head, which new weights do not reach.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)


def _is_converted(model: Any) -> bool:
    probe = {"": torch.empty(0)}
    return (
        getattr(model, "_weight_conversions", None) is not None or revert_weight_conversion(model, probe) is not probe
    )


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def _merged(model: Any) -> Iterator[tuple[str, Tensor]]:
    base = base_of(model)
    layers = {name: layer for name, layer in base.named_modules() if hasattr(layer, "base_layer")}
    for name, layer in layers.items():
        if getattr(layer, "lora_variant", None) or not hasattr(layer, "get_delta_weight"):
            raise ValueError(
                f"policy.adapter: {name} has an adapter that is more than a product of two matrices "
                f"({type(layer).__name__}); allowed with an engine are plain LoRA adapters"
            )
    for name, weight in base.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        if ".lora_" in name or ".original_module." in name:
            continue
        if not owner.endswith(".base_layer"):
            yield _COPY.sub(".", name), _whole(weight)
            continue
        own = owner.removesuffix(".base_layer")
        whole = _whole(weight)
        layer = layers[own]
        if last == "weight" and not layer.merged and not layer.disable_adapters:
            for adapter in layer.active_adapters:
                whole = whole + _whole(layer.get_delta_weight(adapter)).to(whole.dtype)
        yield f"{own}.{last}", whole
