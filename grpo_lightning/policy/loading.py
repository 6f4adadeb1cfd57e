"""Weights and tokenizer from the hub, a directory or a Python package; or a small model with random weights."""

import os
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_lightning.config.redaction import single_line
from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.policy.adapters import with_adapter, without_adapters
from grpo_lightning.policy.chat import ChatReplies, has_chat_template
from grpo_lightning.policy.hf import HFPolicy

_SHIPPED = "pkg://"

SPECIAL = ("<pad>", "<unk>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = "\n" + "".join(sorted(c for c in string.printable if c.isprintable()))
"""Newline and the 95 printable ASCII characters, in code-point order."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def load(
    path: str,
    *,
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
    adapter: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    plain_text: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    share_prompts: bool = True,
    quantization: str | None = None,
    gradient_checkpointing: bool = False,
    activation_offload: bool = False,
    reply_role: str | None = None,
) -> HFPolicy:
    """A policy from a hub name or a directory in Hugging Face format.

    Args:
        path: Hub name, directory, or ``pkg://package/folder`` for weights shipped inside a Python package.
        dtype: Of the weights: float32, bfloat16 or float16.
        attn_implementation: transformers' name, such as sdpa or eager.
        trust_remote_code: Whether code that comes with the weights may run.
        adapter: Arguments of peft's ``LoraConfig``, such as r, lora_alpha and target_modules: only the adapter is
            trained. null trains all weights.
        system_prompt: As in ``HFPolicy``.
        plain_text: As in ``HFPolicy``.
        template_kwargs: As in ``HFPolicy``.
        share_prompts: As in ``HFPolicy``.
        quantization: 8bit or 4bit (bitsandbytes): frozen weights of a quarter or an eighth of the size, below an
            adapter. null: as they are.
        gradient_checkpointing: Whether a layer's activations are computed again in the backward pass, not kept.
        activation_offload: As in ``HFPolicy``; with ``gradient_checkpointing`` that is what lies between the layers.
        reply_role: As in ``HFPolicy``; unless it is null, the chat template must show such replies, which is looked at
            before weights are read.

    Raises:
        ValueError: There is no such model, it lacks weights or tokens, ``quantization`` is unknown, or the chat
            template cannot show replies.
    """

    def check_replies(tokenizer: Any) -> None:
        if reply_role is not None:
            templated = has_chat_template(tokenizer, plain_text=plain_text)
            ChatReplies(
                tokenizer,
                uses_chat_template=templated,
                template_kwargs=template_kwargs,
                system_prompt=system_prompt,
                end_ids=(),  # not known without the model
            ).check(reply_role)

    disable_progress_bar()
    model, tokenizer = pretrained(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        check_tokenizer=check_replies,
    )
    if adapter is not None:
        model = with_adapter(model, adapter)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with named(path):
        return HFPolicy(
            model,
            tokenizer,
            system_prompt=system_prompt,
            plain_text=plain_text,
            template_kwargs=template_kwargs,
            share_prompts=share_prompts,
            activation_offload=activation_offload,
            reply_role=reply_role,
        )


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


def _own_device() -> str:
    """The name of this process's GPU, or of the CPU where there is none."""
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return f"cuda:{number}" if torch.cuda.is_available() else "cpu"


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
def readable_errors(key: str, path: str, what: str) -> Iterator[None]:
    """Inside, what transformers raises while it reads a model becomes a ``ValueError`` of one sentence.

    Args:
        key: Of the setting that names the model, such as ``policy.path``.
        path: Its value.
        what: The kind of model that has to be there, such as "a model".

    Raises:
        ValueError: There is no such model, a file is missing or damaged, it needs code of its own or a package that is
            not installed, or the path is the directory of a run.
    """
    directory = Path(path).expanduser()
    if not (directory / "config.json").exists() and (directory / "export" / "config.json").exists():
        raise ValueError(
            f"{key}={path!r} is the directory of a run; use its export: {key}={os.path.join(path, 'export')}"
        )
    try:
        yield
    except RuntimeError:  # such as too little memory
        raise
    except Exception as error:
        raise ValueError(f"{key}={path!r}: {_reason(error, key, what, is_local=directory.is_dir())}") from error


def _reason(error: Exception, key: str, what: str, *, is_local: bool) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    told = single_line(first)
    if isinstance(error, ImportError):
        return f"a package is missing: {told}"
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that holds more than tensors, which could run code; use safetensors"
    if isinstance(error, SafetensorError):
        return f"a file of its weights is damaged or cut off ({told}); copy or download it again"
    if "trust_remote_code" in str(error):
        flag = f"{key.rpartition('.')[0]}.trust_remote_code=true"
        return f"it comes with code of its own, which runs only with {flag}; read that code first"
    if isinstance(error, OSError) and not is_local:
        told = single_line(" ".join(str(error).split()))
        return f"no directory with {what} in Hugging Face format, and the hub could not be asked for one: {told}"
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"transformers cannot read {what} there: {name}{told}"


def with_weights(kind: Any, path: str, **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A model of transformers, with the adapter that lies beside its weights, and what was not read of either.

    ``from_pretrained`` loads both, and then reports on the adapter alone: missing weights below it would be random.

    Args:
        kind: Such as ``AutoModelForCausalLM``.
        path: Hub name or directory.
        options: Those of ``from_pretrained``.

    Returns:
        The model, and names as transformers' loading report has them: ``missing_keys`` and ``mismatched_keys`` with the
        shapes in the files and in the model.
    """
    model, report = kind.from_pretrained(
        path,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        adapter_kwargs={"subfolder": "no-adapter-here"},
        **options,
    )
    reports = [report]
    if find_adapter_config_file(path) is not None:
        adapter = model.load_adapter(path, dtype=options.get("dtype"), ignore_mismatched_sizes=True)
        reports.append(adapter.to_dict())
    return model, {name: [*chain(*(one[name] for one in reports))] for name in ("missing_keys", "mismatched_keys")}


def check_whole(model: Any, report: Mapping[str, Any], where: str) -> None:
    """Check that all weights were read.

    Args:
        model: The model that was loaded.
        report: Of `with_weights`, in which tied weights and buffers that are not saved do not count as missing.
        where: The setting that names it, for messages.

    Raises:
        ValueError: Some weights are not in the files, or of another shape there; they would be random.
    """
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{where}: {len(missing)} of the model's weights are missing there, such as {', '.join(missing[:3])}: "
            "use files with all weights of the model that their config.json describes"
        )
    shapes = {name: (tuple(stored), tuple(own)) for name, stored, own in report["mismatched_keys"]}
    for name, module in model.named_modules():  # transformers does not compare those that bitsandbytes quantizes
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            state = getattr(module.weight, "quant_state", None)  # two 4-bit numbers are packed into one
            stored = tuple(module.weight.shape if state is None else state.shape)
            if stored != (own := (module.out_features, module.in_features)):
                shapes[f"{name}.weight"] = stored, own
    if shapes:
        listed = [f"{name} {stored} instead of {own}" for name, (stored, own) in sorted(shapes.items())]
        raise ValueError(
            f"{where}: {len(listed)} of the model's weights {'has' if len(listed) == 1 else 'have'} another shape "
            f"there, such as {', '.join(listed[:3])}: use weights of the model that their config.json describes"
        )


def character_llama(
    *, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, context: int, seed: int
) -> HFPolicy:
    """A policy with random weights.

    Args:
        hidden_size: Width of the model, a multiple of ``num_heads``.
        intermediate_size: Width of its feed-forward layers.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        context: Most tokens, prompt and completion together.
        seed: Decides the weights; the global random state is left as it is.
    """
    tokenizer = character_tokenizer(context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return HFPolicy(model, tokenizer)


def character_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer with one token per character and one per tag.

    The tags are ordinary added tokens, so decoding without special tokens keeps them. The special tokens' names in a
    text are read as characters (``split_special_tokens``), so that no prompt can contain an end of sequence.

    Returns:
        103 tokens: padding, unknown and end of sequence, newline and printable ASCII, then the four tags.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
    )
