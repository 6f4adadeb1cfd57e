"""Policies from the hub, a directory or a Python package; or with random weights."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils.logging import disable_progress_bar
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.console import single_line
from grpo_lightning.policy.chat import ChatTokenizer
from grpo_lightning.policy.hf import HFPolicy, saveable_config, with_adapter

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)
_ADAPTER = "policy.adapter.path"


def load(
    path: str,
    *,
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
    adapter: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    gradient_checkpointing: bool = False,
    chat_template: str | None = None,
    key: str = "policy.path",
    **options: Any,
) -> HFPolicy:
    """A policy from a hub name or a directory in Hugging Face format.

    Args:
        path: Hub name, directory, or ``pkg://package/folder`` for weights shipped inside a Python package.
        dtype: Of the weights: float32, bfloat16 or float16.
        attn_implementation: transformers' name, such as sdpa or eager.
        trust_remote_code: Whether code that comes with the weights may run.
        adapter: Arguments of peft's ``LoraConfig``, or the ``path`` of a LoRA adapter to continue, a hub name or a
            directory: only the adapter is trained. null trains all weights.
        quantization: 8bit or 4bit (bitsandbytes): frozen weights of a quarter or an eighth of the size, below an
            adapter. null: as they are.
        gradient_checkpointing: Whether a layer's activations are computed again in the backward pass, not kept.
        chat_template: File with a Jinja template that takes the place of the tokenizer's. null: as it is.
        key: The setting that errors name.
        options: Those of ``HFPolicy``: system_prompt, plain_text, template_kwargs, reply_role, share_prompts and
            activation_offload, which with ``gradient_checkpointing`` is what lies between the layers.

    Raises:
        ValueError: There is no such model or adapter, weights or tokens are missing, the adapter does not fit the
            model, or the chat template cannot show replies.
    """
    disable_progress_bar()
    directory, quantized = resolve_path(path, key), dict[str, Any]()
    if quantization:
        quantized["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=quantization == "8bit",
            load_in_4bit=quantization == "4bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        quantized["device_map"] = {"": f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"}
    config = _adapter_config(adapter["path"], base=directory) if adapter and "path" in adapter else None
    tokenizer = _read_tokenizer(path, key, trust_remote_code, chat_template)
    with readable_errors(key, path):
        model = read_model(
            AutoModelForCausalLM,
            directory,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **quantized,
        )
        if (saved := saveable_config(model.generation_config)) is not model.generation_config:
            change = "with do_sample=true" if saved and saved.do_sample else "as its end tokens alone"
            log.warning("%s: its generation_config cannot be saved as it is; it is exported %s", path, change)
        if adapter is not None:
            model = with_adapter(model, config or adapter)
        if adapter is not None and config is not None:
            _load_adapter(model, adapter["path"])
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return HFPolicy(model, tokenizer, **options)


def load_chat(
    path: str,
    *,
    trust_remote_code: bool,
    chat_template: str | None = None,
    system_prompt: str | None = None,
    plain_text: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    **_: Any,
) -> ChatTokenizer:
    """The tokenizer of `load` with its chat template, without weights; takes the same arguments."""
    tokenizer = _read_tokenizer(path, "policy.path", trust_remote_code, chat_template)
    return ChatTokenizer(tokenizer, system_prompt=system_prompt, plain_text=plain_text, template_kwargs=template_kwargs)


def _adapter_config(path: str, *, base: str) -> Any:
    """The config, of peft, of a LoRA adapter that is continued above the model at ``base``."""
    from peft import PeftConfig, PeftType  # which takes seconds

    with readable_errors(_ADAPTER, path):
        if Path(path).resolve() == Path(base).resolve():
            raise ValueError("an adapter beside policy.path's weights is merged into them: name a copy of its files")
        config: Any = PeftConfig.from_pretrained(local_or_hub(path, _ADAPTER))
        if config.peft_type != PeftType.LORA:
            raise ValueError(f"peft_type={config.peft_type}: only adapters of type LORA can be continued")
    named = config.base_model_name_or_path
    if named and Path(named).resolve() != Path(base).resolve():
        log.warning("%s=%s was trained on %s, which is not policy.path=%s", _ADAPTER, path, named, base)
    config.base_model_name_or_path, config.inference_mode = None, False
    return config


def _load_adapter(model: "PeftModel", path: str) -> None:
    """Read the weights of the adapter at ``path`` into that of ``model``, which has its config."""
    from peft import load_peft_weights, set_peft_model_state_dict

    with readable_errors(_ADAPTER, path):
        weights = load_peft_weights(local_or_hub(path, _ADAPTER), device=str(model.device))
        try:
            report: Any = set_peft_model_state_dict(model, weights)
            trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
            faults = ", ".join(sorted({*report.unexpected_keys, *(trained & {*report.missing_keys})}))
        except (RuntimeError, KeyError) as error:
            faults = str(error)
        if faults:
            raise ValueError(f"its weights are not those of an adapter of policy.path: {faults[:300]}")


def _read_tokenizer(path: str, key: str, trust_remote_code: bool, chat_template: str | None) -> Any:
    directory = resolve_path(path, key)
    with readable_errors(key, path):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        if not (file := Path(chat_template).expanduser()).is_file():
            raise ValueError(f"policy.chat_template={chat_template!r}: there is no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def read_model(kind: Any, path: str, **options: Any) -> Any:
    """A model of transformers with all its weights; an adapter that lies beside them is merged into them.

    Args:
        kind: Such as ``AutoModelForCausalLM``.
        path: Hub name or directory.
        options: Of ``from_pretrained``.

    Raises:
        ValueError: Some weights are not in the files, or of another shape there; they would be random.
    """
    # By itself transformers would load an adapter, train it alone, and report missing weights of the adapter only.
    model, report = kind.from_pretrained(
        path,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        adapter_kwargs={"subfolder": "no-adapter-here"},
        **options,
    )
    if faults := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"{len(faults)} of the model's weights are missing there or have another shape, such as "
            f"{', '.join(faults[:3])}: use files with all weights of the model that their config.json describes"
        )
    if find_adapter_config_file(path) is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, path).merge_and_unload()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    if getattr(model, "is_quantized", False):
        # transformers has converted packed weights as it read them, and knows no way back for some formats.
        conversions = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [conversion for conversion in conversions if _is_reversible(conversion)]
    return model


def _is_reversible(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def resolve_path(path: str, key: str = "policy.path") -> str:
    """``path``, with ``pkg://package/folder`` turned into the directory inside the installed package, unimported.

    Raises:
        ValueError: There is no such package, or what can only be a directory does not exist.
    """
    if not path.startswith("pkg://"):
        return local_or_hub(path, key)
    package, _, folder = path.removeprefix("pkg://").partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{key}={path}: needs pkg://PACKAGE/FOLDER with an installed package")
    return os.path.join(spec.submodule_search_locations[0], folder)


@contextmanager
def readable_errors(key: str, path: str) -> Iterator[None]:
    """Context that turns errors of reading a model into a ``ValueError`` of one sentence that names ``key``."""
    directory = Path(path).expanduser()
    file = "adapter_config.json" if key == _ADAPTER else "config.json"
    if not (directory / file).exists() and (directory / "export" / file).exists():
        raise ValueError(f"{key}={path!r} is the directory of a run; use its export: {key}={directory / 'export'}")
    if directory.suffix == ".ckpt":
        raise ValueError(
            f"{key}={path!r} is a checkpoint; checkpoint={path} begins with its policy, mode=export exports it"
        )
    if (directory / "adapter_config.json").exists() and not (directory / file).exists():
        raise ValueError(
            f"{key}={path!r} is an adapter without its model; {_ADAPTER} continues one, or save peft's "
            "model.merge_and_unload() and name that"
        )
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = single_line(" ".join(str(error).split()))
        if isinstance(error, UnpicklingError):
            reason = "its weights are a pickle that holds more than tensors, which could run code; use safetensors"
        elif "trust_remote_code" in reason:
            flag = f"{key.rpartition('.')[0]}.trust_remote_code=true"
            reason = f"it comes with code of its own, which runs only with {flag}; read that code first"
        elif not isinstance(error, ValueError):
            reason = f"transformers cannot read it ({type(error).__name__}: {reason})"
        raise ValueError(f"{key}={path!r}: {reason}") from error


def character_llama(
    *, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, context: int, seed: int
) -> HFPolicy:
    """A Llama with random weights and a token per character; the global random state is left as it is.

    Args:
        hidden_size: A multiple of ``num_heads``.
        intermediate_size: Width of the feed-forward layers.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        context: Most tokens, prompt and completion together.
        seed: Decides the weights.
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


def character_tokenizer(context: int) -> Any:
    """The tokenizer of the shipped model: padding, unknown and end of sequence, printable ASCII, then four tags.

    The tags are ordinary added tokens, so decoding without special tokens keeps them. The special tokens' names in a
    text are read as characters (``split_special_tokens``), so that no prompt can contain an end of sequence.
    """
    return AutoTokenizer.from_pretrained(Path(__file__).parent / "tiny", model_max_length=context)
