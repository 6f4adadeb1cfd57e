"""Weights and tokenizer from the hub, a directory, or a Python package."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.policy.adapted import without_adapters
from grpo_lightning.transformer.model_files import check_whole, readable_errors, with_weights
from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_SHIPPED = "pkg://"


def pretrained(
    path: str,
    *,
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
    quantization: str | None,
    check_tokenizer: Callable[[Any], None],
) -> tuple[Any, Any]:
    """A causal language model without dropout, and its tokenizer; arguments as in ``hf.load``.

    ``check_tokenizer`` is called before any weights are read.

    Raises:
        ValueError: There is no such model, its files lack weights or hold some of another shape, or ``quantization`` is
            unknown.
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
    with readable_errors("policy.path", path, "a model"):
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        for name, value in config.to_dict().items():
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(config, name, 0.0)  # log-probabilities are then those with which tokens were sampled
    with readable_errors("policy.path", path, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    with named(path):
        check_tokenizer(tokenizer)
    with readable_errors("policy.path", path, "a model"):
        model, report = with_weights(
            AutoModelForCausalLM,
            where,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **quantized,
        )
    check_whole(model, report, f"policy.path={path!r}")
    model = without_adapters(model)
    _keep_packed(model)
    return model, tokenizer


def _keep_packed(model: Any) -> None:
    """Let a model that is quantized in its files be saved with packed weights as it holds them.

    transformers, which has converted them as it read them, knows no way back for some formats.
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


@contextmanager
def named(path: str) -> Iterator[None]:
    """Inside, the message of every ValueError is preceded by the model's ``policy.path``."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"policy.path={path!r}: {error}") from error


def check_embeddings(model: Any, tokenizer: Any) -> int:
    """Check that the model can read the tokenizer's tokens.

    It may have more embeddings than there are tokens, as where their number is rounded up.

    Special tokens that neither the chat template nor the tokenizer itself puts into a text may lack one, such as the
    placeholder of images in the tokenizer of Gemma 3's text models; `check_ids` looks for them.

    Returns:
        The number of embeddings.

    Raises:
        ValueError: The tokenizer has ids that the model has no embedding for.
    """
    count = len(model.get_input_embeddings().weight)
    ids = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    own = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    template = str(tokenizer.chat_template or "")
    without = {token: number for token, number in ids.items() if number >= count}
    for token, number in without.items():
        if number in added and added[number].special and number not in own and token not in template:
            continue
        raise ValueError(
            f"the model has {count} embeddings, the tokenizer's largest id is {max(ids.values())}: the tokenizer "
            "belongs to another model, or the model's embeddings must be resized first"
        )
    if without:
        log.warning("the model has no embeddings for the special tokens %s: no text may hold them", sorted(without))
    return count


def is_ids(prompt: Prompt) -> bool:
    """Whether a prompt is given as token ids."""
    return not isinstance(prompt, str) and all(isinstance(one, int) for one in prompt)


def check_ids(
    texts: Sequence[str], encoded: Sequence[Sequence[int]], embeddings: int | None, *, least: int = 0
) -> None:
    """Check that the model can read encoded texts.

    Args:
        texts: The texts, which messages show.
        encoded: The token ids of each text.
        embeddings: The number of the model's embeddings; None: not known.
        least: How many tokens each text must have.

    Raises:
        ValueError: One has a token that the model has no embedding for, or no tokens where some are needed.
    """
    for text, ids in zip(texts, encoded, strict=True):
        if len(ids) < least:
            raise ValueError(f"a prompt has no tokens: {text[:80]!r}")
        if embeddings is not None and max(ids, default=0) >= embeddings:
            raise ValueError(f"the model has {embeddings} embeddings, a text has the token {max(ids)}: {text[:80]!r}")


def _own_device() -> str:
    """The name of this process's GPU, or of the CPU where there is none."""
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return f"cuda:{number}" if torch.cuda.is_available() else "cpu"


def without_dropout(model: Any) -> None:
    """Switch off all dropout of a transformers model: what is sampled without it has to be trained without it."""
    for part in (model.config, *model.modules()):
        for name, value in vars(part).items():
            is_rate = "dropout" in name or "pdrop" in name or (name == "p" and isinstance(part, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(part, name, 0.0)


def resolve(path: str) -> str:
    """``path``, with ``pkg://package/folder`` turned into the directory inside the installed package, unimported.

    Raises:
        ValueError: As `local_or_hub`, or there is no such package.
    """
    if not path.startswith(_SHIPPED):
        return local_or_hub(path, "policy.path")
    package, _, folder = path.removeprefix(_SHIPPED).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"policy.path={path}: allowed is pkg://PACKAGE/FOLDER with an installed package")
    return os.path.join(spec.submodule_search_locations[0], folder)


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Inside, the model uses its cache, which transformers switches off where gradients are checkpointed."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion, by the model's own word; its other generation settings are dropped.

    Raises:
        ValueError: There is none.
    """
    own = model.generation_config or GenerationConfig()
    ids: set[int] = set()
    for value in (own.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids |= {value} if isinstance(value, int) else set(value or ())
    if not ids:
        raise ValueError("the model names no end-of-sequence token: set eos_token in its tokenizer")
    return sorted(ids)
