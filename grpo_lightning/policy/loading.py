"""Weights and tokenizer from the hub, a directory, or a Python package."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

_SHIPPED = "pkg://"


def pretrained(
    path: str, *, dtype: str, attn_implementation: str, trust_remote_code: bool, quantization: str | None
) -> tuple[Any, Any]:
    """A causal language model without dropout, and its tokenizer; arguments as in ``hf.load``.

    Raises:
        ValueError: There is no such model, or ``quantization`` is unknown.
    """
    if quantization not in (None, "8bit", "4bit"):
        raise ValueError(f"policy.quantization={quantization}: allowed: 8bit, 4bit or null")
    quantized: dict[str, Any] = {}
    if quantization:
        settings = BitsAndBytesConfig(
            load_in_8bit=quantization == "8bit",
            load_in_4bit=quantization == "4bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        quantized = {"quantization_config": settings, "device_map": {"": _own_device()}}
    where = resolve(path)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        for name, value in config.to_dict().items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(config, name, 0.0)  # what is sampled without dropout is scored without it
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            where,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **quantized,
        )
    except OSError as error:
        raise ValueError(
            f"policy.path={path!r}: neither a directory with a model in Hugging Face format nor a model that the hub "
            f"can be asked for from here: {error}"
        ) from error
    return model, tokenizer


def _own_device() -> str:
    """This process's GPU; the CPU where there is none."""
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return f"cuda:{number}" if torch.cuda.is_available() else "cpu"


def resolve(path: str) -> str:
    """``path``, with ``pkg://package/folder`` turned into the directory inside the installed package."""
    if not path.startswith(_SHIPPED):
        return path
    package, _, folder = path.removeprefix(_SHIPPED).partition("/")
    return str(files(package).joinpath(folder))


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Inside, the model uses its cache, which transformers switches off where gradients are checkpointed."""
    model.eval()
    try:
        yield
    finally:
        model.train()
