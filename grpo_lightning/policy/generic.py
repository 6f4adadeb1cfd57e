"""Any module that gives logits for token ids, as a policy: without a KV cache or shared prompts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.base import Policy, lengths
from grpo_lightning.sampler.kv_cache import KVCache, NoKVCache
from grpo_lightning.transformer.lm_head import Chunk, LossGradient, logits_in_chunks, token_logprobs
from grpo_lightning.types import Rollout, Sampled


class GenericPolicy(Policy):
    """A causal model with ``forward(ids [B, N])`` that returns logits [B, N, V], or an object with these as ``logits``.

    Every sampled token takes a forward pass of all tokens before it. Rows are padded on the right with the pad token,
    which a causal model does not look at from the tokens before.

    Args:
        model: Trained in place. It must give the same logits in training and in evaluation: no dropout.
        tokenizer: Of transformers, or any object with ``encode(text) -> ids`` and ``decode(ids) -> text`` and, if it
            has them, ``eos_token_id`` and ``pad_token_id``. None: texts are token ids, as numbers with spaces between.
        options: Those of `Policy`: context, system_prompt, plain_text, template_kwargs and reply_role.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, **options: Any) -> None:
        words = tokenizer if hasattr(tokenizer, "batch_decode") else TokenizerAdapter(tokenizer)
        super().__init__(words, end_ids=[] if words.eos_token_id is None else [words.eos_token_id], **options)
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def kv_cache(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, rewinds: bool = False
    ) -> KVCache:
        return NoKVCache(self._logits, prompts, group_size, longest=longest, pad_id=self.pad_id, device=self.device)

    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies = token_logprobs(
            self._completion_logits(rows),
            rows.ids[:, rows.ids.shape[1] - rows.mask.shape[1] :],
            temperature,
            entropy_gradient=entropy,
            support=None if rows.support is None else rows.support.flat,
        )
        masked = ~rows.mask
        return logprobs.masked_fill(masked, 0.0), entropies.masked_fill(masked, 0.0) if entropy else None

    @torch.no_grad()
    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        return logits_in_chunks(self._completion_logits(rows), rows, temperature=temperature)

    def _completion_logits(self, rows: Sampled | Rollout) -> Tensor:
        """[B, T, V] that the completion tokens are drawn from."""
        width, length = rows.ids.shape[1], rows.mask.shape[1]
        # Rows that are padded on the left move to the left: token n of a row is at place n, as when it was sampled.
        padding = (~rows.attention_mask[:, : width - length]).sum(-1, keepdim=True)  # [B, 1]
        places = torch.arange(width, device=rows.ids.device) + padding  # [B, S + T]
        is_real = places < width
        ids = rows.ids.gather(-1, places.clamp(max=width - 1)).masked_fill(~is_real, self.pad_id)
        used = max(map(sum, zip(*lengths(rows), strict=True)))
        logits = self._logits(ids[:, :used])  # [B, used, V]
        # Completion token t is at place S - padding + t, and predicted from the place before it.
        predictors = width - length - padding + torch.arange(length, device=ids.device) - 1  # [B, T]
        predictors = predictors.clamp(max=used - 1).unsqueeze(-1).expand(-1, -1, logits.shape[-1])  # [B, T, V]
        return logits.gather(1, predictors)

    def export(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights as ``model.pt``, for ``load_state_dict`` of such a module, and the tokenizer if it can."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = self.state_dict() if weights is None else weights
        torch.save({name.removeprefix("model."): value for name, value in weights.items()}, directory / "model.pt")
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(directory)

    def _logits(self, ids: Tensor) -> Tensor:
        """[B, N] -> [B, N, V]."""
        output = self.model(ids)
        logits: Tensor = getattr(output, "logits", output)
        if logits.shape[:2] != ids.shape:
            raise ValueError(
                f"policy: forward(ids) of {type(self.model).__name__} must return logits [B, N, V] for ids [B, N]; it "
                f"returned {tuple(logits.shape)} for {tuple(ids.shape)}"
            )
        return logits


class TokenizerAdapter:
    """What policies use of transformers' tokenizers, around any object with ``encode`` and ``decode``.

    Args:
        tokenizer: The object; None: texts are token ids, as numbers with spaces between.
    """

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise ValueError(f"policy: tokenizer={tokenizer!r:.80} needs methods encode and decode, or None")
        self._tokenizer = tokenizer
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.pad_token_id: int | None = getattr(tokenizer, "pad_token_id", None)

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        encode = self._tokenizer.encode if self._tokenizer is not None else str.split
        encoded = [encode(text) for text in texts]
        if self._tokenizer is None and (words := [word for ids in encoded for word in ids if not word.isdecimal()]):
            raise ValueError(f"data: {words[0]!r} in a prompt: a policy without a tokenizer needs prompts of token ids")
        return {"input_ids": [[int(one) for one in getattr(ids, "ids", ids)] for ids in encoded]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of token ids [n] without padding and end."""
        ids = [int(one) for one in ids if one not in (self.eos_token_id, self.pad_token_id)]
        text: str = " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode(ids)
        return text

    def batch_decode(self, rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        """The texts of several rows of token ids."""
        return [self.decode(row.tolist() if isinstance(row, Tensor) else row) for row in rows]
