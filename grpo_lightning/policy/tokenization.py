"""From prompts to token ids and back: what every policy with a tokenizer shares."""

import bisect
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.policy import Policy
from grpo_lightning.policy.demonstrated import Demonstration, demonstrated, padded
from grpo_lightning.policy.loading import check_ids, is_ids
from grpo_lightning.policy.replies import Replies, is_templated
from grpo_lightning.sampler.native.kv_cache import KVCache
from grpo_lightning.sampler.support import EngineSupport, engine_support
from grpo_lightning.transformer.logits import Chunk
from grpo_lightning.types import Prompt, Rollout, Sampled, Sampling


class TextPolicy(Policy):
    """A policy with a tokenizer: renders prompts and decodes; subclasses know how logits are computed.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        end_ids: Token ids that end a completion.
        embeddings: How many token ids the model can read; None: not known.
        context: Most tokens of prompt and completion together; None: any number.
        system_prompt: Put before every prompt that has no system message of its own; null for none.
        plain_text: Hand prompts to the tokenizer as they are, although it has a chat template.
        template_kwargs: Further arguments of the chat template, such as ``enable_thinking``.
        reply_role: Who replies to the model where nothing else is said: user or tool; None: the user.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        embeddings: int | None,
        context: int | None,
        system_prompt: str | None,
        plain_text: bool,
        template_kwargs: Mapping[str, Any] | None,
        reply_role: str | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.templated = is_templated(tokenizer, plain_text=plain_text)
        self.template_kwargs = dict(template_kwargs or {})
        self.end_ids = list(end_ids)
        padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, *self.end_ids, 0)
        self.pad_id = next(number for number in padding if number is not None)
        self._embeddings = embeddings
        self._context = context
        self.reply_role = reply_role or "user"
        self.replies = Replies(
            tokenizer,
            templated=self.templated,
            template_kwargs=self.template_kwargs,
            system_prompt=system_prompt,
            end_ids=self.end_ids,
        )

    @property
    def context(self) -> int | None:
        return self._context

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @abstractmethod
    def cache(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
    ) -> KVCache:
        """The model at the beginning of ``group_size`` completions of every prompt.

        Args:
            prompts: Token ids of each.
            group_size: Completions of each.
            longest: Tokens that a prompt and its completion may have together.
        """

    @abstractmethod
    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        """The logits that the completion tokens of ``rows`` are drawn from, without gradient, a few tokens at a time.

        Args:
            rows: Prompt and completion as token ids.
            temperature: Divides the logits, > 0.
        """

    @torch.no_grad()
    def support(self, rows: Sampled | Rollout, sampling: Sampling) -> EngineSupport:
        return engine_support(rows, self.logits(rows, temperature=sampling.temperature), sampling)

    def at_once(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, longest: int) -> int | None:
        """How many completions may be drawn at a time, so that keys and values stay in their budget; None: all."""
        return None

    @abstractmethod
    def evaluation(self) -> AbstractContextManager[None]:
        """Inside, the model is as it should be for sampling."""

    def render(self, prompt: str | list[dict[str, str]]) -> str:
        """The text that the model continues: the chat template's, or the messages' own text where there is none."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
        if self.system_prompt and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if not self.templated:
            return "\n\n".join(message["content"] for message in messages)
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
        )
        return text

    def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt; those that are token ids already stay as they are.

        A chat template brings its own special tokens, plain text gets the tokenizer's.
        """
        texts = ["" if is_ids(prompt) else self.render(prompt) for prompt in prompts]  # type: ignore[arg-type]
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self.templated)["input_ids"]
        for number, prompt in enumerate(prompts):
            if is_ids(prompt):
                encoded[number] = [int(one) for one in prompt]  # type: ignore[arg-type]
                texts[number] = str(prompt)
        check_ids(texts, encoded, self._embeddings, least=1)
        return encoded

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        return [len(ids) for ids in self.tokenize(prompts)]

    def reply_ids(self, text: str, *, after: int | None, role: str | None = None) -> list[int]:
        """The tokens that follow what the model has said, when an environment or a tool replies to it.

        Args:
            text: The reply. Special tokens that it names are taken out.
            after: The last token of what the model has said.
            role: Who replies, user or tool; None: ``reply_role``.

        Raises:
            ValueError: The chat template does not show replies as they are, or the model cannot read one.
        """
        if not (ids := self.replies.ids(text, role=role or self.reply_role, after=after)):
            raise ValueError(f"the reply {text[:80]!r} has no tokens: allowed are texts that the tokenizer can express")
        check_ids([text], [ids], self._embeddings)
        return ids

    def demonstrate(self, prompts: Sequence[Prompt], completions: Sequence[Demonstration]) -> Sampled:
        if (end := self.tokenizer.eos_token_id) is None:
            raise ValueError("module=sft: the tokenizer names no end-of-sequence token to end demonstrations with")
        ids, attention_mask = self.pad_left(self.tokenize(prompts))
        rows = [
            demonstrated(self.tokenizer, self.replies, one, end=end, embeddings=self._embeddings) for one in completions
        ]
        self.check_context(ids.shape[1] + max(len(row.ids) for row in rows), "the demonstrations")
        return padded(ids, attention_mask, rows, pad_id=self.pad_id)

    def token_at(self, ids: Sequence[int], end: int) -> int:
        # The text of a longer prefix is never shorter, so the first prefix that reaches ``end`` can be searched.
        def reaches(tokens: int) -> bool:
            text = self.tokenizer.decode(
                ids[: tokens + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return len(text) >= end

        return min(bisect.bisect_left(range(len(ids)), True, key=reaches), len(ids) - 1)

    def pad_left(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids [n, S] and which of them are real [n, S]."""
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[t >= width - len(row) for t in range(width)] for row in rows], device=self.device)
        return ids, mask

    def check_context(self, tokens: int, key: str) -> None:
        """Raise ``ValueError`` if so many tokens of prompt and completion do not fit; ``key`` is what to lower."""
        if self._context is not None and tokens > self._context:
            raise ValueError(
                f"prompt and completion need up to {tokens} tokens, the model's context holds {self._context}: "
                f"lower {key} or data.max_prompt_length"
            )
