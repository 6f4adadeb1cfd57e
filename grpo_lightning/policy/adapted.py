"""Models with an adapter of peft's, which is imported only where there is one: it takes seconds."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def is_adapted(model: Any) -> "TypeGuard[PeftModel]":
    """Whether a model has an adapter; whoever has put it there has imported peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """The model below the adapter, or the model itself where it has none."""
    return model.get_base_model() if is_adapted(model) else model


def with_adapter(model: Any, adapter: "Mapping[str, Any] | PeftConfig", *, is_quantized: bool = False) -> Any:
    """The model with a new adapter, which alone is trained.

    Args:
        model: A transformers causal language model.
        adapter: Arguments of peft's ``LoraConfig``, or a config of peft's.
        is_quantized: Whether the model's weights are stored in 8 or 4 bits.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if is_quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config: Any = LoraConfig(task_type="CAUSAL_LM", **adapter) if isinstance(adapter, Mapping) else adapter
    return get_peft_model(model, config)
