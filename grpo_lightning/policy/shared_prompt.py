"""The path through a model on which a group's prompt is computed once, and a check that it computes the same.

Shapes: B rows of S prompt and T completion tokens; N tokens in a stream, C completion tokens in the mask, to be
predicted; H the size of a hidden state, V of the vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.policy.base import base_of, same_prompts
from grpo_lightning.sampler import GenerationRequest
from grpo_lightning.sampler.fused_decode import FusedDecodeStep, PackedLinear, has_onednn
from grpo_lightning.sampler.kv_cache import SharedPromptCache
from grpo_lightning.sampler.native import decode
from grpo_lightning.transformer.attention import Stream, forward, shared_prefix
from grpo_lightning.transformer.lm_head import (
    Chunk,
    LMHead,
    LossGradient,
    completion_ends,
    tokens_per_chunk,
    unshared_logprobs,
)
from grpo_lightning.types import Rollout, Sampled, Sampling

log = logging.getLogger(__name__)


class CannotShare(Exception):
    """The model would compute something else if prompts were shared; the message says why."""


@dataclass(frozen=True)
class SharedPath:
    """A decoder whose attention can be replaced, and its LM head."""

    decoder: Any
    head: LMHead

    @classmethod
    def from_model(cls, model: Any) -> "SharedPath":
        """The shared path of a transformers causal language model, with or without an adapter.

        Raises:
            CannotShare: Its last layer is not a plain linear one.
        """
        base = base_of(model)
        if (head := LMHead.from_model(base)) is None:
            raise CannotShare("its logits are more than a matrix times hidden states")
        return cls(base.get_decoder(), head)

    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``Policy.logprobs_and_entropy`` with every prompt computed once, and logits for completions only."""
        start = rows.ids.shape[1] - rows.mask.shape[1]
        hidden, numbers = self._predicting(rows)
        zeros = torch.zeros(rows.mask.numel(), device=rows.ids.device)
        if not len(numbers):
            # Zeros that depend on all weights: a backward pass gives every weight a gradient of zero, not an error.
            logprobs, entropies = self.head(
                hidden, rows.ids[0, start - 1 : start], temperature=temperature, entropy=entropy
            )
            nothing = zeros.view_as(rows.mask)  # [B * T] -> [B, T]
            return nothing + 0.0 * logprobs, None if entropies is None else nothing + 0.0 * entropies
        logprobs, entropies = self.head(
            hidden,
            rows.ids[:, start:].flatten()[numbers],  # [B, T] -> [B * T] -> [C]
            temperature=temperature,
            entropy=entropy,
            loss_gradient=None if loss_gradient is None else lambda values, part: loss_gradient(values, numbers[part]),
            support=None if rows.support is None else rows.support.select(numbers),
        )
        outside = ~rows.mask

        def pad_completions(values: Tensor) -> Tensor:
            # [C] -> [B * T] -> [B, T]
            return zeros.index_copy(0, numbers, values).view_as(rows.mask).masked_fill(outside, 0.0)

        return pad_completions(logprobs), None if entropies is None else pad_completions(entropies)

    @torch.no_grad()
    def logits(self, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
        """``Policy.logits`` with every prompt computed once."""
        hidden, numbers = self._predicting(rows)
        size = tokens_per_chunk(len(self.head.weight), hidden.device)
        for start in range(0, len(numbers), size):
            part = slice(start, start + size)
            yield numbers[part], self.head.logits(hidden[part], self.head.weight, temperature)

    def _predicting(self, rows: Sampled | Rollout) -> tuple[Tensor, Tensor]:
        """The hidden states [C, H] that tokens are predicted from, and their numbers [C] in a flattened [B, T].

        Where no row has a token, one hidden state [1, H] and no number [0].
        """
        length = rows.mask.shape[1]
        start = rows.ids.shape[1] - length
        # The stream is put together from small pieces, each of which would be a call of its own on a GPU.
        ids, real, mask = rows.ids.cpu(), rows.attention_mask.cpu(), rows.mask.cpu()
        ends = completion_ends(mask).tolist()
        members = [[row for row in group if ends[row]] for group in same_prompts(rows)]
        members = [group for group in members if group]
        prompts = [ids[group[0], :start][real[group[0], :start]] for group in members]
        prefix = shared_prefix(self.decoder, [prompt.tolist() for prompt in prompts])
        groups, order, tokens = [], [], [prompt[:prefix] for prompt in prompts[:1]]
        for group, prompt in zip(members, prompts, strict=True):
            # A completion's last token predicts nothing that is asked for, so it need not be in the stream.
            groups.append((len(prompt) - prefix, tuple(ends[row] - 1 for row in group)))
            tokens += [prompt[prefix:], *(ids[row, start : start + ends[row] - 1] for row in group)]
            order += group
        device = rows.ids.device
        if not groups:
            prompt = ids[0, :start][real[0, :start]].to(device)
            stream = Stream(((len(prompt), ()),), device)
            hidden = forward(self.decoder, prompt[None], stream.positions, stream)[0]  # [1, S, H] -> [S, H]
            return hidden[-1:], torch.empty(0, dtype=torch.long, device=device)
        stream = Stream(tuple(groups), device, prefix)
        # [1, N, H] -> [N, H]
        hidden = forward(self.decoder, torch.cat(tokens)[None].to(device), stream.positions, stream)[0]
        numbers = torch.cat([torch.arange(row * length, row * length + ends[row]) for row in order])
        predictors, asked = torch.cat(stream.predictors), mask.flatten()[numbers]
        if not asked.all():  # replies are read, not predicted
            numbers, predictors = numbers[asked], predictors[asked]
        # On a GPU index_select's backward pass adds up equal places in any order; that of indexing sorts them first.
        predicting = hidden.index_select(0, predictors) if device.type == "cpu" else hidden[predictors.to(device)]
        return predicting, numbers.to(device)  # [N, H] -> [C, H]

    @torch.no_grad()
    def kv_cache(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, longest: int, fused: bool
    ) -> SharedPromptCache:
        """``Policy.kv_cache`` with every prompt held once.

        With ``fused``, single tokens go through a `FusedDecodeStep` where the decoder allows one.
        """
        dtype = compute_dtype(self.decoder)
        weight = self.head.weight.to(dtype)
        packed = PackedLinear(weight, None) if has_onednn(weight.device, dtype) else None
        step = None
        if fused:
            try:
                step = FusedDecodeStep(self.decoder, dtype)
            except (TypeError, AttributeError) as error:
                log.debug("no fused decode step: %s", error)

        def logits(hidden: Tensor) -> Tensor:
            if packed is None:
                return LMHead.logits(hidden.to(dtype), weight, 1.0)
            return packed(hidden.to(dtype)).float()

        return SharedPromptCache(
            self.decoder, logits, prompts, group_size, longest=longest, fused=step, is_static=_is_static(self.decoder)
        )


def compute_dtype(model: Any) -> torch.dtype:
    """The dtype that a model's products take and give, as it stands now."""
    kind = model.device.type
    dtype: torch.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    return dtype


def _is_static(decoder: Any) -> bool:
    """Whether a decoder makes the same operations whatever the tokens and their positions are."""
    config = decoder.config.get_text_config()
    # Experts are chosen by the tokens, and some rotary embeddings look how long the longest row is.
    has_experts = any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    rotary = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return not has_experts and "dynamic" not in rotary and "longrope" not in rotary


def attention_window(model: Any) -> int | None:
    """How many tokens back the model's attention reaches; None where it reaches all the way."""
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    return int(size) if size and getattr(config, "use_sliding_window", True) is not False else None


@torch.no_grad()
def check(model: Any) -> bool:
    """Compare the shared path with the model's own forward pass, on random tokens and on sampled ones.

    Returns:
        Whether a `FusedDecodeStep` computes the same, too.

    Raises:
        CannotShare: The two differ, or the shared path fails.
    """
    path = SharedPath.from_model(model)
    device, size = model.device, path.head.weight.shape[0]
    ids = torch.randint(size, (5, 8), generator=torch.Generator().manual_seed(0))
    ids[1:3, :4] = ids[0, :4]  # a group of three and one of two with a shorter prompt
    ids[4, :4] = ids[3, :4]
    attention = torch.ones(5, 8, dtype=torch.bool)
    attention[3:, :2] = False
    attention[torch.tensor([0, 1, 1, 4, 4, 4]), torch.tensor([7, 6, 7, 5, 6, 7])] = False
    rows = _rows(ids.to(device), attention.to(device), attention[:, 4:].to(device))

    def sample(*, fused: bool) -> None:
        texts, places = [ids[0, :4].tolist(), ids[3, 2:4].tolist()], [(0, 0), (0, 1), (1, 0), (1, 1)]
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=3)
        request = GenerationRequest(
            prompts=texts, places=places, longest=7, sampling=sampling, seed=0, end_ids=[], pad_id=0
        )
        drawn = decode(path.kv_cache(texts, 2, longest=7, fused=fused), request)
        prompts = rows[torch.tensor([0, 0, 3, 3], device=device)]
        tokens = torch.cat([prompts.ids[:, :4], drawn.ids], 1)
        sampled = _rows(tokens, torch.cat([prompts.attention_mask[:, :4], drawn.mask], 1), drawn.mask)
        scored = unshared_logprobs(model, sampled, temperature=1.0, entropy=True)
        _compare(model, scored, (drawn.logprobs, drawn.entropies))

    expected = unshared_logprobs(model, rows, temperature=0.9, entropy=True)
    try:
        _compare(model, expected, path.logprobs_and_entropy(rows, temperature=0.9, entropy=True))
        try:
            sample(fused=True)
        except Exception as error:
            log.info("no fused decode step for sampling: %s", error)
            sample(fused=False)
            return False
    except Exception as error:
        raise CannotShare(f"{type(error).__name__}: {error}") from error
    return True


def _compare(model: Any, expected: Sequence[Tensor | None], actual: Sequence[Tensor | None]) -> None:
    """Raise ``ValueError`` where log-probabilities or entropies differ by more than rounding."""
    half = compute_dtype(model).itemsize == 2
    for one, other in zip(expected, actual, strict=True):
        if one is None or other is None:
            raise ValueError("an entropy is missing")
        gap = (one - other).abs()
        if not (gap.mean() < 0.05 if half else gap.max() < 1e-3):
            raise ValueError(f"log-probabilities or entropies differ by up to {float(gap.max()):.2g} nats")


def _rows(ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Sampled:
    zeros = torch.zeros(mask.shape, device=mask.device)
    return Sampled(ids, attention_mask, mask, zeros, zeros, ("",) * len(ids), (True,) * len(ids))
