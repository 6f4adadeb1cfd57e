"""The path through a model on which a group's prompt is computed once, and a check that it computes the same."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.policy.adapters import base_of, weight_of
from grpo_lightning.sampler.native.fused_decode import FusedDecodeStep, PackedLinear, packs
from grpo_lightning.sampler.native.sampler import decode
from grpo_lightning.sampler.native.shared_prompt_cache import SharedPromptCache
from grpo_lightning.sampler.native.token_sampling import uniforms
from grpo_lightning.transformer import logprobs
from grpo_lightning.transformer.lm_head import LMHead, LossGradient
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
    def of(cls, model: Any) -> "SharedPath":
        """The shared path of a transformers causal language model, with or without an adapter.

        Raises:
            CannotShare: Its last layer is not a plain linear one.
        """
        base = base_of(model)
        if (head := LMHead.of(base)) is None:
            raise CannotShare("its last layer is not a plain linear one")
        return cls(base.get_decoder(), head)

    def logprobs_and_entropy(
        self, rows: Sampled | Rollout, *, temperature: float, entropy: bool, loss_gradient: LossGradient | None
    ) -> tuple[Tensor, Tensor | None]:
        """``Policy.logprobs_and_entropy`` with every prompt computed once."""
        return logprobs.shared(
            self.decoder, self.head, rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
        )

    @torch.no_grad()
    def kv_cache(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        *,
        longest: int,
        fused: bool,
        windows: Mapping[int, int],
    ) -> SharedPromptCache:
        """``Policy.kv_cache`` with every prompt held once.

        With ``fused``, single tokens go through a `FusedDecodeStep` where the decoder allows one; ``windows`` as
        `windows` gives them, empty where the attention of all layers reaches all the way.
        """
        head, dtype = self.head, compute_dtype(self.decoder)
        weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
        packed = PackedLinear(weight, bias) if packs(weight.device, dtype) else None
        step = None
        if fused:
            try:
                step = FusedDecodeStep(self.decoder, dtype, weight_of)
            except (TypeError, AttributeError) as error:
                log.debug("no fused decode step: %s", error)

        def logits(hidden: Tensor) -> Tensor:
            if packed is None:
                return head.logits(hidden.to(weight.dtype), weight, bias, 1.0)
            return head.scaled(packed(hidden.to(dtype)).float(), 1.0)

        return SharedPromptCache(
            self.decoder,
            logits,
            prompts,
            group_size,
            longest=longest,
            fused=step,
            windows=windows,
            is_static=_is_static(self.decoder),
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


def window(model: Any) -> int | None:
    """How many tokens back the model's attention reaches; None where it reaches all the way."""
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    return int(size) if size and getattr(config, "use_sliding_window", True) is not False else None


def windows(model: Any) -> dict[int, int]:
    """How many tokens back the attention of each layer reaches, by layer; those that reach all the way are left out."""
    config, size = model.config.get_text_config(), window(model)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return {} if size is None else {n: size for n, kind in enumerate(kinds) if kind == "sliding_attention"}


@torch.no_grad()
def check(model: Any) -> bool:
    """Compare the shared path with the model's own forward pass, on random tokens and on sampled ones.

    Returns:
        Whether a `FusedDecodeStep` computes the same, too.

    Raises:
        CannotShare: The two differ, or the shared path fails.
    """
    path = SharedPath.of(model)
    device, size = model.device, path.head.weight.shape[0]
    ids = torch.randint(size, (5, 8), generator=torch.Generator().manual_seed(0))
    ids[1:3, :4] = ids[0, :4]  # a group of three and one of two with a shorter prompt
    ids[4, :4] = ids[3, :4]
    attention = torch.ones(5, 8, dtype=torch.bool)
    attention[3:, :2] = False
    attention[torch.tensor([0, 1, 1, 4, 4, 4]), torch.tensor([7, 6, 7, 5, 6, 7])] = False
    rows = _rows(ids.to(device), attention.to(device), attention[:, 4:].to(device))
    expected = logprobs.separate(model, rows, temperature=0.9, entropy=True)
    with _cannot_share():
        _compare(model, expected, path.logprobs_and_entropy(rows, temperature=0.9, entropy=True, loss_gradient=None))

    def sample(*, fused: bool) -> None:
        drawn = decode(
            path.kv_cache([ids[0, :4].tolist(), ids[3, 2:4].tolist()], 2, longest=7, fused=fused, windows={}),
            uniforms(0, [(0, 0), (0, 1), (1, 0), (1, 1)], 3).to(device),
            sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=3),
            end_ids=[],
            pad_id=0,
        )
        prompts = rows[torch.tensor([0, 0, 3, 3], device=device)]
        tokens = torch.cat([prompts.ids[:, :4], drawn.ids], 1)
        sampled = _rows(tokens, torch.cat([prompts.attention_mask[:, :4], drawn.mask], 1), drawn.mask)
        scored = logprobs.separate(model, sampled, temperature=1.0, entropy=True)
        _compare(model, scored, (drawn.logprobs, drawn.entropies))

    try:
        sample(fused=True)
    except Exception as error:
        log.info("no fused decode step for sampling: %s", error)
        with _cannot_share():
            sample(fused=False)
        return False
    return True


@contextmanager
def _cannot_share() -> Iterator[None]:
    """Inside, every error is a `CannotShare`."""
    try:
        yield
    except Exception as error:
        raise CannotShare(f"{type(error).__name__}: {error}") from error


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
