"""A model's weights as others know them: by their names in its files, adapters merged, whole."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from grpo_lightning.policy.adapted import base_of, is_adapted

_COPY = re.compile(r"\.modules_to_save\.(\w+)\.")
"""In the name of a weight of which peft trains a copy beside the adapter."""


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
