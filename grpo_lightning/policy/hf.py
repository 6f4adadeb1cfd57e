"""Any causal language model of the Hugging Face hub, or a directory in its format, as a policy."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.memory import COPIED, Shape
from grpo_lightning.policy.adapters import base_of, is_adapted, named_weights, with_adapter
from grpo_lightning.policy.base import Policy
from grpo_lightning.policy.shared_prompt import CannotShare, SharedPath, check, compute_dtype, window, windows
from grpo_lightning.sampler.native.kv_cache import DynamicKVCache, KVCache, rows_within
from grpo_lightning.transformer import logprobs
from grpo_lightning.transformer.attention import use_grouped
from grpo_lightning.transformer.lm_head import LossGradient
from grpo_lightning.transformer.logprobs import Chunk, packed_microbatches, padded_microbatches
from grpo_lightning.transformer.size import forward_flops, matmul_rate, shape_of
from grpo_lightning.types import Rollout, Sampled, Sampling

log = logging.getLogger(__name__)


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

    def kv_cache(self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int) -> KVCache:
        # What is read before the first token is drawn must lie inside a sliding window; what is drawn need not.
        if path := self._shared_path(max(map(len, prompts))):
            return path.kv_cache(
                prompts,
                group_size,
                longest=longest,
                fused=self._uses_fused_decode,
                windows={} if self._reaches(longest) else windows(self.model),
            )
        return DynamicKVCache(self.model, prompts, group_size, longest=longest, pad_id=self.pad_id)

    def max_concurrent(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, longest: int) -> int | None:
        if sampling.kv_cache_gib is None:
            return None
        return rows_within(
            sampling.kv_cache_gib,
            self.shape(),
            number_bytes=compute_dtype(self.model).itemsize,
            prompts=len(prompts),
            prompt_tokens=longest - sampling.max_new_tokens,
            completion_tokens=sampling.max_new_tokens,
            shares_prompts=self._shared_path(max(map(len, prompts))) is not None and self._reaches(longest),
            copies_below=COPIED["cuda" if self.model.device.type == "cuda" else "cpu"],
        )

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
                return logprobs.separate(self.model, rows, temperature=temperature, entropy=entropy)
            return path.logprobs_and_entropy(
                rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
            )

    @torch.no_grad()
    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        path = self._shared_path(rows.ids.shape[1])
        if path is None:
            logits = logprobs.model_logits(self.model, rows)
            return logprobs.logits_in_chunks(logits, rows, temperature=temperature)
        return logprobs.shared_logits(path.decoder, path.head, rows, temperature=temperature)

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        shares = self.share_prompts and self._reaches(rows.ids.shape[1])
        return packed_microbatches(rows, tokens) if shares else padded_microbatches(rows, tokens)

    def flops(self, rows: Sampled | Rollout) -> float:
        base = base_of(self.model)
        return forward_flops(base.get_decoder(), base.config.get_text_config().vocab_size, rows)

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
            model = model.merge_and_unload()
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

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
        return SharedPath.of(self.model) if self.share_prompts and self._reaches(longest) else None

    def _reaches(self, longest: int) -> bool:
        """Whether the model's attention sees all of rows of this length."""
        return longest <= (window(self.model) or longest)


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


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what is saved for a backward pass is moved to CPU RAM, and back when its turn comes.

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
