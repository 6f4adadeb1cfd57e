"""A causal language model with its tokenizer: policies score and tokenize, samplers generate.

B = P * G rows, a prompt's rows adjacent; S prompt tokens, T completion tokens, V the size of the vocabulary.
"""

import bisect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from grpo_lightning.distributed.ranks import Ranks
from grpo_lightning.memory import Shape
from grpo_lightning.policy.chat import ChatTokenizer
from grpo_lightning.sampler.kv_cache import KVCache
from grpo_lightning.sampler.token_sampling import EngineSupport, engine_support
from grpo_lightning.transformer.lm_head import Chunk, LossGradient, completion_ends
from grpo_lightning.types import Message, Prompt, Rollout, Sampled, Sampling

if TYPE_CHECKING:
    from peft import PeftModel


def is_adapted(model: Any) -> "TypeGuard[PeftModel]":
    """Whether a model has an adapter of peft's, which is then imported; that takes seconds."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """The model below the adapter, or the model itself where it has none."""
    return model.get_base_model() if is_adapted(model) else model


def check_adapted(policy: Any, setting: str) -> None:
    """Check that a policy has an adapter above the weights that it was loaded with, as ``setting`` needs.

    Raises:
        ValueError: It has none, or one whose initialization has changed those weights.
    """
    if not is_adapted(model := getattr(policy, "model", None)):
        raise ValueError(f"{setting} needs an adapter, such as policy.adapter={{r: 16, lora_alpha: 32}}")
    init = getattr(model.active_peft_config, "init_lora_weights", None)
    if str(init).lower().startswith(("pissa", "olora", "corda", "loftq")):
        raise ValueError(f"policy.adapter.init_lora_weights={init} does not work with {setting}: it changes the base")


class Policy(nn.Module, ABC):
    """A causal language model with its tokenizer; subclasses compute the logits.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        end_ids: Token ids that end a completion.
        num_embeddings: How many token ids the model can read; None: not known.
        context: Most tokens of prompt and completion together; None: any number, or not known.
        options: Those of `ChatTokenizer`: system_prompt, plain_text, template_kwargs and reply_role.

    Raises:
        ValueError: The model has no embedding for a padding or end token; or as `ChatTokenizer`.
    """

    idle_device: torch.device | None = None
    """Where offloaded weights are kept between uses; None: they stay where they are used."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        num_embeddings: int | None = None,
        context: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokenizer, self.end_ids = tokenizer, list(end_ids)
        padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, *self.end_ids, 0)
        self.pad_id: int = next(number for number in padding if number is not None)
        self.num_embeddings, self.context = num_embeddings, context
        for token in (self.pad_id, tokenizer.eos_token_id or 0):
            if num_embeddings is not None and token >= num_embeddings:
                raise ValueError(
                    f"the model has {num_embeddings} embeddings, the tokenizer pads or ends with the token {token}: it "
                    "belongs to another model, or the model's embeddings must be resized first"
                )
        self.chat = ChatTokenizer(tokenizer, end_ids=end_ids, **options)

    # Scoring

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @abstractmethod
    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of every completion token, and entropy of its distribution.

        Args:
            rows: Prompts and completions; with ``support``, probabilities are those within the sets that the tokens
                were drawn from.
            temperature: Divides the logits.
            entropy: Whether to return the entropy, which passes a gradient.
            loss_gradient: The gradient of the loss with respect to the log-probabilities, where it is known
                beforehand: saves time, changes no result.

        Returns:
            Two [B, T] float32 tensors in nats, 0 where masked; None in place of the entropy without ``entropy``.
        """

    def logprobs(self, rows: Sampled | Rollout, *, temperature: float) -> Tensor:
        """The log-probabilities [B, T] of `logprobs_and_entropy`."""
        return self.logprobs_and_entropy(rows, temperature=temperature)[0]

    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        """The logits that completion tokens are drawn from, without gradient, a few tokens at a time."""
        raise NotImplementedError(f"{type(self).__name__} gives no logits")

    @torch.no_grad()
    def support(self, rows: Sampled | Rollout, sampling: Sampling) -> EngineSupport:
        """The sets that an engine with this policy's weights draws the completion tokens of ``rows`` from.

        Returns:
            The sets [B, T], with every drawn token in its own, and which tokens [B, T] had to be added to theirs.
        """
        return engine_support(rows, self.logits(rows, temperature=sampling.temperature), sampling)

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        """Index tensors that cut ``rows`` into micro-batches within a budget of tokens."""
        return padded_microbatches(rows, tokens)

    def local_microbatches(self, rows: Sampled | Rollout, tokens: int, ranks: Ranks) -> tuple[list[Tensor], int]:
        """This process's micro-batches of ``rows``, which are the same in all processes; groups stay together.

        Returns:
            Index tensors, and how many at the end are idle: there only to make as many forward passes as the others.
        """
        if ranks.size == 1:
            return self.microbatches(rows, tokens), 0
        sizes, prompts = lengths(rows)
        groups = same_prompts(rows)
        for group in groups:
            sizes[group[0]] += prompts[group[0]]
        device = rows.mask.device
        of_rank = [torch.tensor(part, dtype=torch.long, device=device) for part in ranks.balance(groups, sizes)]
        batches = [
            [part[index] for index in self.microbatches(rows[part], tokens)] if len(part) else [] for part in of_rank
        ]
        local = batches[ranks.rank]
        idle = max(map(len, batches)) - len(local)
        return [*local, *[torch.zeros(1, dtype=torch.long, device=device)] * idle], idle

    # Size and place

    def flops(self, rows: Sampled | Rollout) -> float:
        """Least floating-point operations of ``logprobs`` without gradient; 0: not known."""
        return 0.0

    def flops_per_second(self) -> float:
        """The machine's peak rate of matrix products, as measured now; 0: not known."""
        return 0.0

    def shape(self) -> Shape | None:
        """The model's sizes, for a prediction of memory; None: not known."""
        return None

    def offload(self) -> None:
        """Keep the weights, which must be frozen, in CPU RAM, except inside `on_device`.

        Raises:
            ValueError: Some are trained.
        """
        if trained := [name for name, weight in self.named_parameters() if weight.requires_grad]:
            raise ValueError(f"offload needs frozen weights; {trained[0]} is trained")
        self.idle_device = torch.device("cpu")
        self.to(self.idle_device)
        if torch.cuda.is_available():
            for weight in self.parameters():
                weight.data = weight.data.pin_memory()  # a GPU reads it several times as fast

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Context in which an offloaded policy has copies of its weights on ``device``; they are dropped afterwards."""
        if self.idle_device is None:
            yield
            return
        kept = [(weight, weight.data) for weight in self.parameters()]
        self.to(device, non_blocking=True)
        try:
            yield
        finally:
            for weight, values in kept:
                weight.data = values
            self.to(self.idle_device)  # buffers, such as rotary frequencies, may have changed

    # For samplers

    def kv_cache(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, rewinds: bool = False
    ) -> KVCache:
        """A KV cache at the beginning of ``group_size`` completions of every prompt [P], given as token ids.

        ``longest`` is the most tokens of a prompt and its completion together; ``rewinds``: `KVCache.rewind` is called.
        """
        raise NotImplementedError(f"{type(self).__name__} does not sample")

    def max_concurrent(self, sampling: Sampling, *, longest: int) -> int | None:
        """How many completions, with their prompts of ``longest`` tokens, fit into the KV cache's budget; None: all."""
        return None

    def eval_mode(self) -> AbstractContextManager[None]:
        """Context in which the model is in evaluation mode, for sampling."""
        return nullcontext()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its name in the model's files, adapters merged and shards gathered, for an engine."""
        raise ValueError(f"sampler: vLLM needs a policy of transformers; this is a {type(self).__name__}")

    def write_config(self, directory: Path) -> torch.dtype:
        """Write the model's configuration for an engine; returns the dtype that the policy computes in."""
        raise ValueError(f"sampler: vLLM needs a policy of transformers; this is a {type(self).__name__}")

    # Text

    def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt; those that are token ids already stay as they are."""
        tokens = self.chat.tokenize(prompts)
        for prompt, ids in zip(prompts, tokens, strict=True):
            self._check_ids(str(prompt), ids)
        return tokens

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Length of each prompt in tokens, chat template included."""
        return [len(ids) for ids in self.tokenize(prompts)]

    def pad_left(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids [n, S] and which of them are real [n, S]."""
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows], device=self.device)
        mask = torch.tensor([[t >= width - len(row) for t in range(width)] for row in rows], device=self.device)
        return ids, mask

    def check_context(self, tokens: int, key: str) -> None:
        """Raise ``ValueError`` if ``tokens`` of prompt and completion exceed the context; it names ``key`` to lower."""
        if self.context is not None and tokens > self.context:
            raise ValueError(
                f"prompt and completion need up to {tokens} tokens, the model's context holds {self.context}: "
                f"lower {key} or data.max_prompt_length"
            )

    def reply_ids(self, text: str, *, after: int | None, role: str | None = None) -> list[int]:
        """Token ids of an environment's or tool's reply behind the token ``after``, see `ChatTokenizer.reply`.

        Raises:
            ValueError: The chat template does not show replies as they are, or the model cannot read one.
        """
        if not (ids := self.chat.reply(text, role=role, after=after)):
            raise ValueError(f"the reply {text[:80]!r} has no tokens: the tokenizer cannot express it")
        self._check_ids(text, ids)
        return ids

    def tokenize_demonstrations(self, prompts: Sequence[Prompt], completions: Sequence[str | list[Message]]) -> Sampled:
        """Demonstrations as rows, each ended by the end-of-sequence token; ``logprobs`` are zero.

        A completion of several turns is a list of messages, the assistant's in turn with replies, which are not in
        ``mask``.
        """
        if (end := self.tokenizer.eos_token_id) is None:
            raise ValueError("module=sft: the tokenizer names no end-of-sequence token to end demonstrations with")
        prompt_ids, prompt_mask = self.pad_left(self.tokenize(prompts))
        rows = [
            self.chat.demonstration(prompt, completion, end=end)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        length = max(len(tokens) for tokens, _ in rows)
        self.check_context(prompt_ids.shape[1] + length, "the demonstrations")
        ids, is_real = prompt_ids.new_full((len(rows), length), self.pad_id), prompt_mask.new_zeros(len(rows), length)
        mask = torch.zeros_like(is_real)
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        for number, (tokens, is_model) in enumerate(rows):
            self._check_ids(texts[number], tokens)
            ids[number, : len(tokens)] = torch.tensor(tokens)
            mask[number, : len(tokens)] = torch.tensor(is_model)
            is_real[number, : len(tokens)] = True
        zeros = torch.zeros(mask.shape, device=ids.device)
        return Sampled(
            ids=torch.cat([prompt_ids, ids], 1),
            attention_mask=torch.cat([prompt_mask, is_real], 1),
            mask=mask,
            logprobs=zeros,
            entropy=zeros,
            texts=tuple(texts),
            finished=(True,) * len(rows),
        )

    def token_at(self, ids: Sequence[int], end: int) -> int:
        """Index of the completion token with which the decoded text has ``end`` characters; else of the last one."""

        # The text of a longer prefix is never shorter, so the first prefix that reaches ``end`` can be searched.
        def reaches(tokens: int) -> bool:
            text = self.tokenizer.decode(
                ids[: tokens + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return len(text) >= end

        return min(bisect.bisect_left(range(len(ids)), True, key=reaches), len(ids) - 1)

    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format.

        ``weights`` are named as in ``state_dict``, where the policy holds a part of them only.
        """
        raise NotImplementedError(f"{type(self).__name__} is not exported")

    def export_adapter(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter in peft's format, and the tokenizer; the arguments are those of `export`."""
        raise NotImplementedError(f"{type(self).__name__} has no adapter")

    def _check_ids(self, text: str, ids: Sequence[int]) -> None:
        if self.num_embeddings is not None and max(ids, default=0) >= self.num_embeddings:
            raise ValueError(
                f"the model has {self.num_embeddings} embeddings, a text has the token {max(ids)}: {text[:80]!r}"
            )


def same_prompts(rows: Sampled | Rollout) -> list[list[int]]:
    """The numbers of the rows that have the same prompt, by prompt, in order of their first appearance."""
    start = rows.ids.shape[1] - rows.mask.shape[1]
    real = rows.attention_mask[:, :start]
    # What stands where a row is padded says nothing of its prompt, and rows of one prompt may differ in it.
    ids = rows.ids[:, :start].masked_fill(~real, -1).cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(ids):
        groups.setdefault(prompt.tobytes(), []).append(row)
    return list(groups.values())


def lengths(rows: Sampled | Rollout) -> tuple[list[int], list[int]]:
    """How many tokens of every completion are read, and how many every prompt has, without padding."""
    completions: list[int] = completion_ends(rows.mask).tolist()
    start = rows.ids.shape[1] - rows.mask.shape[1]
    prompts: list[int] = rows.attention_mask[:, :start].sum(-1).tolist()
    return completions, prompts


def packed_microbatches(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches without padding, for a model that computes a prompt once for all rows that share it.

    Groups are taken from the largest to the smallest. A group stays together unless it is larger than the budget of
    ``tokens`` in one forward pass; a row that is longer goes alone.

    Returns:
        Disjoint index tensors that together cover all B rows.
    """
    completion, prompt = lengths(rows)
    batches: list[list[int]] = []
    used = 0
    groups = sorted(same_prompts(rows), key=lambda group: -prompt[group[0]] - sum(completion[row] for row in group))
    for group in groups:
        own = prompt[group[0]]
        whole = own + sum(completion[row] for row in group)
        if not batches or used + whole > tokens:
            batches.append([])
            used = 0
        used += own
        for row in group:
            # A group that is continued in another micro-batch takes its prompt along.
            if batches[-1] and used + completion[row] > tokens:
                batches.append([])
                used = own
            batches[-1].append(row)
            used += completion[row]
    return [torch.tensor(batch, device=rows.mask.device) for batch in batches]


def padded_microbatches(rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
    """Micro-batches in which every row is padded to the widest prompt and the longest completion.

    Rows are taken from the longest to the shortest, so that little of a micro-batch is padding and the largest one
    comes first. Otherwise as `packed_microbatches`; padding counts as tokens.
    """
    completion, prompt = lengths(rows)
    batches: list[list[int]] = []
    order = sorted(range(len(rows)), key=lambda row: (prompt[row] + completion[row], row), reverse=True)
    widest_prompt = widest_completion = 0
    for row in order:
        longest = max(widest_prompt, prompt[row]), max(widest_completion, completion[row])
        if batches and (len(batches[-1]) + 1) * sum(longest) <= tokens:
            batches[-1].append(row)
            widest_prompt, widest_completion = longest
        else:
            batches.append([row])
            widest_prompt, widest_completion = prompt[row], completion[row]
    return [torch.tensor(batch, device=rows.mask.device) for batch in batches]
