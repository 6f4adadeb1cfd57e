"""Any module that gives logits for token ids, as a policy: on the plain path, without a cache."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy.base import Policy
from grpo_lightning.sampler.native.kv_cache import KVCache, NoKVCache
from grpo_lightning.transformer.lm_head import LossGradient, token_logprobs
from grpo_lightning.transformer.logprobs import Chunk, logits_in_chunks
from grpo_lightning.transformer.packing import lengths
from grpo_lightning.types import Rollout, Sampled


class GenericPolicy(Policy):
    """A causal model of one's own: ``forward(ids [B, N]) -> logits [B, N, V]``, or an object with these as ``logits``.

    Every token that is sampled takes a forward pass of all tokens before it. Rows are padded on the right with the
    pad token, which a causal model does not look at from the tokens before.

    Args:
        model: Trained in place. It must give the same logits in training and in evaluation: no dropout.
        tokenizer: Of transformers, or any object with ``encode(text) -> ids`` and ``decode(ids) -> text`` and, if it
            has them, ``eos_token_id`` and ``pad_token_id``. None: texts are token ids, as numbers with spaces between.
        context: Most tokens of prompt and completion together; null: any number.
        system_prompt: As in ``HFPolicy``, like the other two, where the tokenizer is of transformers.
        plain_text: As in ``HFPolicy``.
        template_kwargs: As in ``HFPolicy``.
        reply_role: As in ``HFPolicy``.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        context: int | None = None,
        system_prompt: str | None = None,
        plain_text: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        reply_role: str | None = None,
    ) -> None:
        words = tokenizer if hasattr(tokenizer, "batch_decode") else TokenizerAdapter(tokenizer)
        super().__init__(
            words,
            end_ids=[] if words.eos_token_id is None else [words.eos_token_id],
            context=context,
            system_prompt=system_prompt,
            plain_text=plain_text,
            template_kwargs=template_kwargs,
            reply_role=reply_role,
        )
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def kv_cache(self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int) -> KVCache:
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
        own = self.state_dict() if weights is None else weights
        torch.save({name.removeprefix("model."): value for name, value in own.items()}, directory / "model.pt")
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(directory)

    def _logits(self, ids: Tensor) -> Tensor:
        """[B, N] -> [B, N, V]."""
        try:
            output = self.model(ids)
        except IndexError as error:
            raise ValueError(
                f"policy: forward(ids) of {type(self.model).__name__} failed on ids up to {int(ids.max())} in rows of "
                f"{ids.shape[1]}: {error}; allowed are ids that it has embeddings for: the tokenizer may be another's"
            ) from error
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        if logits.shape[:2] != ids.shape:
            raise ValueError(
                f"policy: forward(ids) of {type(self.model).__name__} gave {tuple(logits.shape)} for ids "
                f"{tuple(ids.shape)}: allowed are logits [B, N, V] for ids [B, N]"
            )
        return logits


class TokenizerAdapter:
    """What policies use of transformers' tokenizers, around any object with ``encode`` and ``decode``."""

    chat_template = None

    def __init__(self, own: Any) -> None:
        if own is not None and not (hasattr(own, "encode") and hasattr(own, "decode")):
            raise ValueError(f"policy: tokenizer={own!r:.80}: allowed is an object with encode and decode, or None")
        self._own = own
        self.eos_token_id: int | None = getattr(own, "eos_token_id", None)
        self.pad_token_id: int | None = getattr(own, "pad_token_id", None)

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        encode = _numbers if self._own is None else self._own.encode
        encoded = [encode(text) for text in texts]
        return {"input_ids": [[int(one) for one in getattr(ids, "ids", ids)] for ids in encoded]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of token ids [n] without the special ones."""
        kept = [int(one) for one in ids if one not in (self.eos_token_id, self.pad_token_id)]
        text: str = " ".join(map(str, kept)) if self._own is None else self._own.decode(kept)
        return text

    def batch_decode(self, rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        """The texts of several rows of token ids."""
        return [self.decode(row.tolist() if isinstance(row, Tensor) else row) for row in rows]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(
            f"data: prompt {text[:80]!r}: without a tokenizer allowed are token ids, as a list or as numbers with "
            "spaces between"
        ) from error
