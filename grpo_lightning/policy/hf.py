"""Any causal language model of the Hugging Face hub, or a directory in its format, as a policy."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.memory import COPIED, Shape
from grpo_lightning.policy.adapted import base_of, is_adapted, with_adapter
from grpo_lightning.policy.loading import check_embeddings, end_ids, evaluation, named, pretrained, without_dropout
from grpo_lightning.policy.replies import Replies, is_templated
from grpo_lightning.policy.shared_prompt import CannotShare, SharedPath, check, compute_dtype, window, windows
from grpo_lightning.policy.tokenization import TextPolicy
from grpo_lightning.policy.weights import named_weights, write_untied
from grpo_lightning.sampler.native.kv_cache import DynamicKVCache, KVCache, rows_within
from grpo_lightning.transformer import logits, logprobs
from grpo_lightning.transformer.attention import use_grouped
from grpo_lightning.transformer.head import LossGradient
from grpo_lightning.transformer.logits import Chunk
from grpo_lightning.transformer.offload import Offload
from grpo_lightning.transformer.packing import packed_microbatches, padded_microbatches
from grpo_lightning.transformer.size import forward_flops, matmul_rate, shape_of
from grpo_lightning.types import Rollout, Sampled, Sampling

log = logging.getLogger(__name__)


class HFPolicy(TextPolicy):
    """A transformers causal language model and its tokenizer.

    Whatever sampling options the model's ``generation_config`` holds are ignored: only its end tokens count.

    Args:
        model: The weights, trained in place; its dropout is switched off.
        tokenizer: A fast or slow transformers tokenizer.
        system_prompt: Put before every prompt that has no system message of its own; null for none.
        plain_text: Hand prompts to the tokenizer as they are, although it has a chat template.
        template_kwargs: Further arguments of the chat template, such as ``enable_thinking``.
        share_prompts: Whether a group's prompt is computed once for all its completions. A model of which that does
            not give the same results, as a trial at its first use shows, goes without.
        activation_offload: Whether what a backward pass needs of its forward pass waits in the computer's memory.
        reply_role: Who replies to the model where nothing else is said: user or tool; null: the user.

    Raises:
        ValueError: The tokenizer has ids that the model has no embedding for, or names no end of sequence.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        plain_text: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        share_prompts: bool = True,
        activation_offload: bool = False,
        reply_role: str | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            end_ids=end_ids(model, tokenizer),
            embeddings=check_embeddings(model, tokenizer),
            context=getattr(model.config, "max_position_embeddings", None),
            system_prompt=system_prompt,
            plain_text=plain_text,
            template_kwargs=template_kwargs,
            reply_role=reply_role,
        )
        disable_progress_bar()  # one more beside the run's own says nothing
        self.model = model
        self.share_prompts = share_prompts
        self.activation_offload = activation_offload
        self._tried = self._use_flat_decoder = False
        use_grouped(model)
        model.train()  # Lightning warns about parts in evaluation mode; without dropout the modes are the same
        without_dropout(model)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # In evaluation mode bitsandbytes would pack 4-bit weights for a product that passes no gradient on.
                module.support_avx512bf16_for_cpu = False

    @property
    def device(self) -> torch.device:
        place: torch.device = self.model.device
        return place

    def evaluation(self) -> AbstractContextManager[None]:
        return evaluation(self.model)

    def cache(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
    ) -> KVCache:
        # What is read before the first token is drawn must lie inside a sliding window; what is drawn need not.
        if path := self._shared_path(max(map(len, prompts))):
            return path.cache(
                prompts,
                group_size,
                longest=longest,
                flat=self._use_flat_decoder,
                windows={} if self._reaches(longest) else windows(self.model),
            )
        return DynamicKVCache(self.model, prompts, group_size, longest=longest, pad_id=self.pad_id)

    def at_once(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, longest: int) -> int | None:
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
        with Offload(self.model.parameters()) if self.activation_offload else nullcontext():
            if path is None:
                return logprobs.separate(self.model, rows, temperature=temperature, entropy=entropy)
            return path.logprobs_and_entropy(
                rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
            )

    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        path = self._shared_path(rows.ids.shape[1])
        if path is None:
            return logits.separate(self.model, rows, temperature=temperature)
        return logits.shared(path.decoder, path.head, rows, temperature=temperature)

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        shares = self.share_prompts and self._reaches(rows.ids.shape[1])
        return packed_microbatches(rows, tokens) if shares else padded_microbatches(rows, tokens)

    def flops(self, rows: Sampled | Rollout) -> float:
        return forward_flops(self._base.get_decoder(), self._base.config.get_text_config().vocab_size, rows)

    def flops_per_second(self) -> float:
        hidden = self._base.config.get_text_config().hidden_size
        return matmul_rate(hidden, device=self.model.device, dtype=compute_dtype(self.model))

    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def _base(self) -> Any:
        return base_of(self.model)

    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        model = self.model
        if weights is not None:
            model = AutoModelForCausalLM.from_config(self._base.config)
            if is_adapted(self.model):
                model = with_adapter(model, self.model.peft_config["default"])
            model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        elif is_adapted(model):
            model = copy.deepcopy(model)
        if is_adapted(model):
            model = model.merge_and_unload()
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its names in the model's files, adapters merged, whole where weights are sharded."""
        return named_weights(self.model)

    def describe(self, directory: Path) -> torch.dtype:
        """Write the model's configuration for an engine; returns the type of the numbers that it computes with."""
        write_untied(self._base, directory)
        return compute_dtype(self.model)

    def _shared_path(self, longest: int) -> SharedPath | None:
        """The way on which a group's prompt is computed once, for rows of this length; None if it is not exact."""
        if self.share_prompts and not self._tried:
            self._tried = True
            try:
                self._use_flat_decoder = check(self.model)
            except CannotShare as error:
                log.warning("policy.share_prompts is off: %s has another forward pass (%s)", type(self.model), error)
                self.share_prompts = False
        return SharedPath.of(self.model) if self.share_prompts and self._reaches(longest) else None

    def _reaches(self, longest: int) -> bool:
        """Whether the model's attention sees all of rows of this length."""
        return longest <= (window(self.model) or longest)


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
            templated = is_templated(tokenizer, plain_text=plain_text)
            Replies(
                tokenizer,
                templated=templated,
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
