"""Any causal language model of the Hugging Face hub, or a directory in its format, as a policy."""

import bisect
import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.batch import Prompt, Rollout, Sampled, Sampling, microbatches
from grpo_lightning.memory import Shape
from grpo_lightning.policy import Ended, Policy, Poll, Slope, score
from grpo_lightning.policy.cache import Memory, PlainMemory
from grpo_lightning.policy.decode import decode
from grpo_lightning.policy.loading import check_embeddings, check_ids, evaluation, named, pretrained
from grpo_lightning.policy.prefix import grouped
from grpo_lightning.policy.sampler import uniforms
from grpo_lightning.policy.shared import CannotShare, SharedPath, check, window
from grpo_lightning.policy.text import decoded, end_ids, reporter, stop_test
from grpo_lightning.policy.work import forward_flops, gemm_peak, shape_of

log = logging.getLogger(__name__)


class HFPolicy(Policy):
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
    ) -> None:
        super().__init__()
        self._embeddings = check_embeddings(model, tokenizer)
        disable_progress_bar()  # one more beside the run's own says nothing
        self.model = model
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.templated = bool(getattr(tokenizer, "chat_template", None)) and not plain_text
        self.template_kwargs = dict(template_kwargs or {})
        self.end_ids = end_ids(model, tokenizer)
        self.pad_id = next(
            (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), self.end_ids[0]
        )
        self.share_prompts = share_prompts
        self._tried = self._unroll = False
        if share_prompts and model.config._attn_implementation is not None:
            model.config._attn_implementation = grouped(model.config._attn_implementation)
        model.train()  # Lightning warns about parts in evaluation mode; without dropout the modes are the same
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0

    def render(self, prompt: Prompt) -> str:
        """The text that the model continues: the chat template's, or the messages' own text where there is none."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if not self.templated:
            return "\n\n".join(message["content"] for message in messages)
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
        )
        return text

    def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt; a chat template brings its own special tokens, plain text gets the tokenizer's."""
        texts = [self.render(prompt) for prompt in prompts]
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self.templated)["input_ids"]
        check_ids(texts, encoded, self._embeddings, least=1)
        return encoded

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        return [len(ids) for ids in self.tokenize(prompts)]

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        first_prompt: int = 0,
        poll: Poll | None = None,
        ended: Ended | None = None,
    ) -> Sampled:
        tokens = self.tokenize(prompts)
        ids, attention_mask = self._pad_left(tokens)
        longest = self.ranks.most(ids.shape[1] + sampling.max_new_tokens)  # all take the same path, or refuse
        self._check_context(longest, "rollout.max_new_tokens")
        path = self._shared_path(longest)
        memory: Memory = (
            path.memory(tokens, group_size, unroll=self._unroll, ranks=self.ranks)
            if path
            else PlainMemory(self.model, ids, attention_mask, group_size)
        )
        rows = [(first_prompt + prompt, member) for prompt in range(len(tokens)) for member in range(group_size)]
        with evaluation(self.model):
            completions, mask, logprobs, entropy, finished = decode(
                memory,
                uniforms(seed, rows, sampling.max_new_tokens).to(ids.device),
                sampling=sampling,
                end_ids=self.end_ids,
                pad_id=self.pad_id,
                stops=stop_test(self.tokenizer, sampling.stop),
                poll=poll,
                ended=reporter(self.tokenizer, ended),
                ranks=self.ranks,
            )
        return Sampled(
            ids=torch.cat([ids.repeat_interleave(group_size, 0), completions], 1),
            attention_mask=torch.cat([attention_mask.repeat_interleave(group_size, 0), mask], 1),
            mask=mask,
            logprobs=logprobs,
            entropy=entropy,
            texts=decoded(self.tokenizer, completions, mask),
            finished=tuple(finished.tolist()),
        )

    def score(
        self, rows: Sampled | Rollout, *, temperature: float, entropy: bool = False, slope: Slope | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if path := self._shared_path(rows.ids.shape[1]):
            return path.score(rows, temperature=temperature, entropy=entropy, slope=slope)
        return score.plain(self.model, rows, temperature=temperature, entropy=entropy)

    def split(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        return microbatches(rows, tokens, shared=self.share_prompts and self._reaches(rows.ids.shape[1]))

    def work(self, rows: Sampled | Rollout) -> float:
        return forward_flops(self._base.get_decoder(), self._base.config.get_text_config().vocab_size, rows)

    def peak(self) -> float:
        kind = self.model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype
        return gemm_peak(self._base.config.get_text_config().hidden_size, device=self.model.device, dtype=dtype)

    def shape(self) -> Shape:
        return shape_of(self.model)

    @property
    def _base(self) -> Any:
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def demonstrate(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Sampled:
        ids, attention_mask = self._pad_left(self.tokenize(prompts))
        encoded = self.tokenizer(list(completions), add_special_tokens=False)["input_ids"]
        check_ids(completions, encoded, self._embeddings)
        answers = [[*tokens, self.tokenizer.eos_token_id] for tokens in encoded]
        length = max(map(len, answers))
        self._check_context(ids.shape[1] + length, "the demonstrations")
        padded = torch.tensor([row + [self.pad_id] * (length - len(row)) for row in answers], device=ids.device)
        mask = torch.tensor([[t < len(row) for t in range(length)] for row in answers], device=ids.device)
        return Sampled(
            ids=torch.cat([ids, padded], 1),
            attention_mask=torch.cat([attention_mask, mask], 1),
            mask=mask,
            logprobs=torch.zeros(mask.shape, device=ids.device),
            entropy=torch.zeros(mask.shape, device=ids.device),
            texts=tuple(completions),
            finished=(True,) * len(answers),
        )

    def token_at(self, ids: Sequence[int], end: int) -> int:
        # The text of a longer prefix is never shorter, so the first prefix that reaches ``end`` can be searched.
        def reaches(tokens: int) -> bool:
            text = self.tokenizer.decode(
                ids[: tokens + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return len(text) >= end

        return min(bisect.bisect_left(range(len(ids)), True, key=reaches), len(ids) - 1)

    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        model = self.model
        if weights is not None:
            model = AutoModelForCausalLM.from_config(self._base.config)
            if isinstance(self.model, PeftModel):
                model = get_peft_model(model, self.model.peft_config["default"])
            model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
        elif isinstance(model, PeftModel):
            model = copy.deepcopy(model)
        if isinstance(model, PeftModel):
            model = model.merge_and_unload()
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def _shared_path(self, longest: int) -> SharedPath | None:
        """The way on which a group's prompt is computed once, for rows of this length; None if it is not exact."""
        if self.share_prompts and not self._tried:
            self._tried = True
            try:
                self._unroll = check(self.model)
            except CannotShare as error:
                log.warning("policy.share_prompts is off: %s has another forward pass (%s)", type(self.model), error)
                self.share_prompts = False
        return SharedPath.of(self.model) if self.share_prompts and self._reaches(longest) else None

    def _reaches(self, longest: int) -> bool:
        """Whether the model's attention sees all of rows of this length."""
        return longest <= (window(self.model) or longest)

    def _pad_left(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[t >= width - len(row) for t in range(width)] for row in rows], device=device)
        return ids, mask

    def _check_context(self, tokens: int, key: str) -> None:
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and tokens > context:
            raise ValueError(
                f"prompt and completion need up to {tokens} tokens, the model's context holds {context}: "
                f"lower {key} or data.max_prompt_length"
            )


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

    Raises:
        ValueError: There is no such model, it lacks weights or tokens, or ``quantization`` is unknown.
    """
    disable_progress_bar()
    model, tokenizer = pretrained(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
    )
    if adapter is not None:
        if quantization:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapter))
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
        )
