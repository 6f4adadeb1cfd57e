"""Any causal language model of the Hugging Face hub, or a directory in its format, as a policy."""

import copy
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.memory import Shape
from grpo_lightning.policy.base import (
    Policy,
    base_of,
    check_adapted,
    is_adapted,
    lengths,
    packed_microbatches,
    padded_microbatches,
    same_prompts,
)
from grpo_lightning.policy.shared_prompt import CannotShare, SharedPath, attention_window, check, compute_dtype
from grpo_lightning.sampler.kv_cache import DynamicKVCache, KVCache, NoKVCache, can_rewind, rows_within
from grpo_lightning.transformer.attention import shared_prefix, use_grouped
from grpo_lightning.transformer.lm_head import Chunk, LossGradient, logits_in_chunks, model_logits, unshared_logprobs
from grpo_lightning.types import Rollout, Sampled, Sampling

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

log = logging.getLogger(__name__)
_COPY = re.compile(r"\.modules_to_save\.(\w+)\.")
"""In the name of a weight of which peft trains a copy beside the adapter."""


class HFPolicy(Policy):
    """A transformers causal language model and its tokenizer.

    Whatever sampling options the model's ``generation_config`` holds are ignored: only its end tokens count.

    Args:
        model: The weights, trained in place; its dropout is switched off.
        tokenizer: A fast or slow transformers tokenizer.
        share_prompts: Whether a group's prompt is computed once for all its completions; off where a trial at the
            first use gives other results than the model's own forward pass.
        activation_offload: Whether activations wait in CPU RAM for the backward pass.
        options: Those of `Policy`: system_prompt, plain_text, template_kwargs and reply_role.

    Raises:
        ValueError: The model names no end of sequence; or as `Policy`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        share_prompts: bool = True,
        activation_offload: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            tokenizer,
            end_ids=_end_ids(model, tokenizer),
            num_embeddings=len(model.get_input_embeddings().weight),
            context=getattr(model.config, "max_position_embeddings", None),
            **options,
        )
        disable_progress_bar()
        self.model = model
        self.share_prompts = share_prompts
        self.activation_offload = activation_offload
        self._is_checked = self._uses_fused_decode = False
        use_grouped(model)
        model.train()  # Lightning warns about parts in evaluation mode; without dropout the modes are the same
        _switch_off_dropout(model)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # In evaluation mode bitsandbytes would pack 4-bit weights for a product that passes no gradient on.
                module.support_avx512bf16_for_cpu = False

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.model.eval()  # in training mode transformers does not use the KV cache under gradient checkpointing
        try:
            yield
        finally:
            self.model.train()

    def kv_cache(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, rewinds: bool = False
    ) -> KVCache:
        if path := self._shared_path(longest):
            return path.kv_cache(prompts, group_size, longest=longest, fused=self._uses_fused_decode)
        if rewinds and not can_rewind(self.model):
            return NoKVCache(
                lambda ids: self.model(input_ids=ids, use_cache=False).logits,
                prompts,
                group_size,
                longest=longest,
                pad_id=self.pad_id,
                device=self.device,
            )
        return DynamicKVCache(self.model, prompts, group_size, longest=longest, pad_id=self.pad_id)

    def max_concurrent(self, sampling: Sampling, *, longest: int) -> int | None:
        if sampling.kv_cache_gib is None:
            return None
        numbers = compute_dtype(self.model).itemsize
        return rows_within(sampling.kv_cache_gib, self.shape(), number_bytes=numbers, longest=longest)

    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        path = self._shared_path(rows.ids.shape[1])
        with ActivationOffload(self.model.parameters()) if self.activation_offload else nullcontext():
            if path is None:
                return unshared_logprobs(self.model, rows, temperature=temperature, entropy=entropy)
            return path.logprobs_and_entropy(
                rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
            )

    @torch.no_grad()
    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        if path := self._shared_path(rows.ids.shape[1]):
            return path.logits(rows, temperature=temperature)
        logits = model_logits(self.model, rows)
        return logits_in_chunks(logits, rows, temperature=temperature)

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        shares = self.share_prompts and self._reaches(rows.ids.shape[1])
        return packed_microbatches(rows, tokens) if shares else padded_microbatches(rows, tokens)

    def flops(self, rows: Sampled | Rollout) -> float:
        """2 W (S + sum T) + 2 V H sum M for the matrices, and 4 H per layer for every token and one it attends to.

        With W weights in the decoder's matrices (of experts all), M tokens in the mask; a shared prefix counts once.
        """
        base = base_of(self.model)
        config = base.config.get_text_config()
        completions, widths = lengths(rows)
        groups, start = same_prompts(rows), rows.ids.shape[1] - rows.mask.shape[1]
        ids = [rows.ids[one[0], :start][rows.attention_mask[one[0], :start]].tolist() for one in groups]
        tokens = pairs = 0.0
        prompts = -float(shared_prefix(base.get_decoder(), ids) * (len(ids) - 1))
        for group in groups:
            width = widths[group[0]]
            prompts += width
            pairs += width * width / 2
            for row in group:
                tokens += completions[row]
                pairs += completions[row] * (width + completions[row] / 2)
        head = 2.0 * config.vocab_size * config.hidden_size * float(rows.mask.sum())
        attention = 4.0 * config.hidden_size * config.num_hidden_layers * pairs
        return float(2.0 * _matrix_weights(base.get_decoder()) * (prompts + tokens) + head + attention)

    def flops_per_second(self) -> float:
        hidden = base_of(self.model).config.get_text_config().hidden_size
        return matmul_rate(hidden, device=self.model.device, dtype=compute_dtype(self.model))

    def shape(self) -> Shape:
        return shape_of(self.model)

    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        model = self.model
        if weights is not None:
            model = AutoModelForCausalLM.from_config(base_of(self.model).config)
            if is_adapted(self.model):
                model = with_adapter(model, self.model.peft_config["default"])
            model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        elif is_adapted(model):
            model = copy.deepcopy(model)
        if is_adapted(model):
            model = _merge(model)
        generation = model.generation_config
        model.generation_config = saveable_config(generation)
        try:
            model.save_pretrained(directory)
        finally:
            model.generation_config = generation
        self.tokenizer.save_pretrained(directory)
        _write_for_transformers_4(directory)

    def export_adapter(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        check_adapted(self, "callbacks.export.adapter=true")
        config, base = self.model.active_peft_config, base_of(self.model).name_or_path
        config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
        if weights is not None:
            weights = {name.removeprefix("model."): value for name, value in weights.items()}
        # Embeddings below an adapter of their own are those of the base.
        self.model.save_pretrained(directory, state_dict=weights, save_embedding_layers=False)
        self.tokenizer.save_pretrained(directory)
        _write_for_transformers_4(directory)

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in the model's files, one at a time, adapters merged; a tied one under each name.

        Where weights are sharded, all processes iterate together.

        Raises:
            ValueError: The adapter is more than a product of two matrices, or weights are quantized.
        """
        if any(not weight.is_floating_point() for weight in self.model.parameters()):
            raise ValueError("policy.quantization: vLLM needs weights that are not quantized")
        base = base_of(self.model)
        probe = {"": torch.empty(0)}
        if getattr(base, "_weight_conversions", None) is None and revert_weight_conversion(base, probe) is probe:
            yield from _merged_weights(base)
        else:  # some architectures hold weights otherwise than their files, such as all experts in one tensor
            yield from revert_weight_conversion(base, dict(_merged_weights(base))).items()

    def write_config(self, directory: Path) -> torch.dtype:
        config = copy.deepcopy(base_of(self.model).config)
        config.tie_word_embeddings = False  # vLLM on a CPU keeps a packed copy of a tied head, which stays as it is
        config.architectures = [type(base_of(self.model)).__name__]
        config.save_pretrained(directory)
        return compute_dtype(self.model)

    def _shared_path(self, longest: int) -> SharedPath | None:
        """The path that computes a group's prompt once, for rows of this length; None where it is not exact."""
        if self.share_prompts and not self._is_checked:
            self._is_checked = True
            try:
                self._uses_fused_decode = check(self.model)
            except CannotShare as error:
                log.warning("policy.share_prompts is off: %s has another forward pass (%s)", type(self.model), error)
                self.share_prompts = False
        return SharedPath.from_model(self.model) if self.share_prompts and self._reaches(longest) else None

    def _reaches(self, longest: int) -> bool:
        """Whether the model's attention sees all of rows of this length."""
        return longest <= (attention_window(self.model) or longest)


def with_adapter(model: Any, adapter: "Mapping[str, Any] | PeftConfig") -> Any:
    """The model, which may be quantized, with a new adapter: arguments of ``LoraConfig``, or a config of peft's.

    Raises:
        ValueError: The model has no module of a name among ``target_modules`` or ``modules_to_save``.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training  # which take seconds

    if any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config: Any = LoraConfig(task_type="CAUSAL_LM", **adapter) if isinstance(adapter, Mapping) else adapter
    modules = dict(model.named_modules())
    for key in ("target_modules", "modules_to_save"):
        names = getattr(config, key, None) or ()
        for name in () if isinstance(names, str) else names:  # peft leaves out one that is not there
            if not any(f".{path}".endswith(f".{name}") for path in modules):
                layers = sorted({path.rpartition(".")[2] for path, one in modules.items() if hasattr(one, "weight")})
                raise ValueError(f"policy.adapter.{key}: the model has no module {name}; it has {', '.join(layers)}")
    return get_peft_model(model, config)


def _merge(model: "PeftModel") -> Any:
    """The base model with its adapter merged; what is adapted at one end of tied embeddings is no longer tied."""
    base: Any = model.get_base_model()
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    first, last = (getattr(layer, "base_layer", layer) for layer in ends)
    if ends != (first, last) and last.weight is first.weight:
        last.weight = nn.Parameter(last.weight.detach().clone())
    return model.merge_and_unload()  # which sets tie_word_embeddings


def saveable_config(generation: GenerationConfig | None) -> GenerationConfig | None:
    """A generation config that transformers agrees to save: as it is, for sampling, or with its end tokens alone."""
    sampling = copy.deepcopy(generation)
    for candidate in (generation, sampling):
        try:
            if candidate is not None:
                candidate.validate(strict=True)
            return candidate
        except ValueError:
            if sampling is not None:
                sampling.do_sample = True
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(generation, name) for name in names})


def _write_for_transformers_4(directory: Path) -> None:
    """Add what transformers 4 reads, which else computes with another RoPE base and knows no class of the tokenizer."""
    for path in directory.glob("config.json"):  # an adapter has none
        config = json.loads(path.read_text(encoding="utf-8"))
        for part in (config, config.get("text_config") or {}):
            rope = part.get("rope_parameters") or {}
            if "sliding_attention" in rope:  # Gemma 3 has a base for every kind of layer
                part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope.get("full_attention") or rope
            if "rope_theta" in rope:
                part["rope_theta"] = rope["rope_theta"]
            if rope.get("rope_type", "default") != "default":
                part["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = directory / "tokenizer_config.json"
    words = json.loads(path.read_text(encoding="utf-8"))
    words = {name: words[name] for name in words if name not in ("backend", "is_local", "local_files_only")}
    if words.get("tokenizer_class") == "TokenizersBackend":
        words["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(words.get("extra_special_tokens"), list):
        words["additional_special_tokens"] = words.pop("extra_special_tokens")
    path.write_text(json.dumps(words, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _merged_weights(base: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model below an adapter, merged with it."""
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
        gathered = _full_tensor(weight)
        owner, _, last = name.rpartition(".base_layer.")
        if owner:
            layer = base.get_submodule(owner)
            if last == "weight" and not (layer.merged or layer.disable_adapters):
                for adapter in layer.active_adapters:
                    gathered = gathered + _full_tensor(layer.get_delta_weight(adapter)).to(gathered.dtype)
            name = f"{owner}.{last}"
        yield _COPY.sub(".", name), gathered


def _full_tensor(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def _switch_off_dropout(model: Any) -> None:
    # What is sampled without dropout has to be trained without it.
    for part in (model.config, *model.modules()):
        for name, value in vars(part).items():
            is_rate = "dropout" in name or "pdrop" in name or (name == "p" and isinstance(part, nn.Dropout))
            if is_rate and isinstance(value, float):
                setattr(part, name, 0.0)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion."""
    generation = model.generation_config or GenerationConfig()
    ids: set[int] = set()
    for value in (generation.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids |= {value} if isinstance(value, int) else set(value or ())
    if not ids:
        raise ValueError("the model names no end-of-sequence token: set eos_token in its tokenizer")
    return sorted(ids)


def _matrix_weights(decoder: Any) -> int:
    """The number of weights in the decoder's linear layers, an adapter's included."""
    modules = list(decoder.modules())
    linear: int = sum(module.in_features * module.out_features for module in modules if isinstance(module, nn.Linear))
    convolutions = (module for module in modules if type(module).__name__ == "Conv1D")  # GPT-2's linear layers
    return linear + sum(int(module.weight.numel()) for module in convolutions)


def shape_of(model: Any) -> Shape:
    """The sizes of a transformers causal language model, with or without an adapter; on the meta device, too."""
    base = base_of(model)
    config = base.config.get_text_config()
    sizes = {True: 0, False: 0}  # by whether they are trained
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)  # bitsandbytes packs two 4-bit numbers into one
        sizes[weight.requires_grad] += int(weight.numel() if state is None else math.prod(state.shape))
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        trained=sizes[True],
        frozen=sizes[False],
        body=_matrix_weights(base.get_decoder()),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        keys=width * (getattr(config, "num_key_value_heads", None) or heads),
    )


@cache
def matmul_rate(hidden: int, *, device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of a product of [2048, H] by [H, 4 H], in floating-point operations per second; measured once."""
    # Not ones, nor zeros: a GPU draws less power for them and runs faster than it ever would.
    numbers = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(shape, device=device, dtype=dtype, generator=numbers)
        for shape in ((2048, hidden), (hidden, 4 * hidden))
    )
    on_gpu = device.type == "cuda"
    queued = 20 if on_gpu else 1  # so that starting a product is hidden by those before it

    def measure() -> float:
        started = perf_counter()
        for _ in range(queued):
            left @ right
        if on_gpu:
            torch.cuda.synchronize(device)
        return (perf_counter() - started) / queued

    measure()  # it may load libraries
    # The best of several: whatever else the machine does can only make one slower.
    best, until = measure(), perf_counter() + 0.2
    while perf_counter() < until:
        best = min(best, measure())
    return 2 * 2048 * hidden * 4 * hidden / best


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Context that moves what is saved for a backward pass to CPU RAM, and back when it is needed.

    The copies are queued like any other work of the device, in the order of its computations, so nobody waits for them
    and none is overtaken. A tensor is often saved several times, as the input of queries, keys and values is: it is
    copied once.

    Args:
        weights: Of the model: what has the sizes of one of them, in any order, stays on the device, such as its copy in
            16 bits under autocast.
        min_bytes: Tensors with fewer bytes stay, too: moving one takes longer than the memory is worth.
    """

    def __init__(self, weights: Iterable[Tensor], *, min_bytes: int = 1 << 20) -> None:
        self._staying = {tuple(sorted(weight.shape)) for weight in weights}
        self._min_bytes = min_bytes
        self._moved: dict[Any, tuple[StorageWeakRef, dict[Any, tuple[Tensor, torch.device]]]] = {}
        super().__init__(self.pack, self.unpack)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._moved.clear()  # from here on the graph alone holds the copies, and drops each after its turn

    def pack(self, tensor: Tensor) -> Tensor | tuple[Tensor, torch.device]:
        """What is kept in place of a tensor that is saved: itself, or its copy and its device."""
        if tensor.nbytes < self._min_bytes or tuple(sorted(tensor.shape)) in self._staying:
            return tensor
        storage = tensor.untyped_storage()
        # While there is a weak reference to it, the storage's address is not given to another.
        _, views = self._moved.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        view = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version
        if view not in views:
            values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            views[view] = values.copy_(tensor.detach(), non_blocking=True), tensor.device
        return views[view]

    def unpack(self, kept: Tensor | tuple[Tensor, torch.device]) -> Tensor:
        """The tensor that was saved, on its own device again."""
        return kept if isinstance(kept, Tensor) else kept[0].to(kept[1], non_blocking=True)
