"""The path of a model on which a group's common work is done once, and whether it is the model's own computation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from grpo_lightning.batch import Rollout, Sampled, Sampling
from grpo_lightning.policy import Slope, score
from grpo_lightning.policy.cache import SharedMemory
from grpo_lightning.policy.decode import decode
from grpo_lightning.policy.head import Head
from grpo_lightning.policy.sampler import uniforms
from grpo_lightning.policy.unrolled import Packed, Unrolled
from grpo_lightning.ranks import ALONE, Ranks

log = logging.getLogger(__name__)


class CannotShare(Exception):
    """The model would not compute the same; says why."""


@dataclass(frozen=True)
class SharedPath:
    """A decoder whose attention can be replaced, and its head."""

    decoder: Any
    head: Head

    @classmethod
    def of(cls, model: Any) -> "SharedPath":
        """That of a transformers causal language model, with or without an adapter.

        Raises:
            CannotShare: The model has no such parts.
        """
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        head = Head.of(base)
        if head is None:
            raise CannotShare("its last layer is not a plain linear one")
        if getattr(base.config.get_text_config(), "attention_dropout", 0.0):
            raise CannotShare("its attention has dropout")
        decoder = base.get_decoder()
        if decoder is base:
            raise CannotShare("its decoder cannot be told from its head")
        return cls(decoder, head)

    def score(
        self, rows: Sampled | Rollout, *, temperature: float, entropy: bool, slope: Slope | None
    ) -> tuple[Tensor, Tensor | None]:
        """As ``Policy.score``."""
        return score.shared(self.decoder, self.head, rows, temperature=temperature, entropy=entropy, slope=slope)

    @torch.no_grad()
    def memory(
        self, prompts: Sequence[Sequence[int]], group_size: int, *, unroll: bool, ranks: Ranks = ALONE
    ) -> SharedMemory:
        """For `decode`.

        Args:
            prompts: Token ids.
            group_size: Completions of each.
            unroll: Whether single tokens go through an `Unrolled` copy of the decoder, where there can be one.
            ranks: Processes that may have to make every forward pass together; then nothing is unrolled.
        """
        head = self.head
        unrolled = unrolled_decoder(self.decoder) if unroll and not ranks.lockstep else None
        if unrolled is None:
            return SharedMemory(
                self.decoder,
                lambda h: head.logits(h, head.weight, head.bias, 1.0),
                prompts,
                group_size,
                unrolled=None,
                ranks=ranks,
            )
        packed = Packed(head.weight, head.bias)
        return SharedMemory(self.decoder, lambda h: head.scaled(packed(h), 1.0), prompts, group_size, unrolled=unrolled)


def unrolled_decoder(decoder: Any) -> Unrolled | None:
    """The decoder's copy for single tokens; None where there is none."""
    if torch.is_autocast_enabled("cpu"):
        return None
    try:
        return Unrolled(decoder)
    except (TypeError, AttributeError) as error:
        log.debug("no unrolled decoder: %s", error)
        return None


def window(model: Any) -> int | None:
    """How far back the model's attention reaches, if less than all the way."""
    config = model.config.get_text_config()
    size = getattr(config, "sliding_window", None)
    return int(size) if size and getattr(config, "use_sliding_window", True) is not False else None


@torch.no_grad()
def check(model: Any) -> bool:
    """Score and sample a few tokens on both paths.

    Returns:
        Whether an `Unrolled` decoder computes the same, too.

    Raises:
        CannotShare: They differ, or the shared one fails.
    """
    path = SharedPath.of(model)
    device, size = model.device, path.head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size, (5, 8), generator=generator)
    ids[1:3, :4] = ids[0, :4]  # a group of three and one of two with a shorter prompt
    ids[4, :4] = ids[3, :4]
    attention = torch.ones(5, 8, dtype=torch.bool)
    attention[3:, :2] = False
    attention[torch.tensor([0, 1, 1, 4, 4, 4]), torch.tensor([7, 6, 7, 5, 6, 7])] = False
    rows = _rows(ids.to(device), attention.to(device), attention[:, 4:].to(device))
    expected = score.plain(model, rows, temperature=0.9, entropy=True)
    try:
        found = path.score(rows, temperature=0.9, entropy=True, slope=None)
    except Exception as error:
        raise CannotShare(f"{type(error).__name__}: {error}") from error
    _compare(model, expected, found)
    prompts = [ids[0, :4].tolist(), ids[3, 2:4].tolist()]
    for unroll in (True, False):
        try:
            completions, mask, *found_too, _ = decode(
                path.memory(prompts, 2, unroll=unroll),
                uniforms(0, [(0, 0), (0, 1), (1, 0), (1, 1)], 3).to(device),
                sampling=Sampling(1.0, 1.0, 0, 0.0, 3),
                end_ids=[],
                pad_id=0,
                stops=None,
            )
            chosen = torch.tensor([0, 0, 3, 3], device=device)
            tokens = torch.cat([rows.ids[chosen, :4], completions], 1)
            sampled = _rows(tokens, torch.cat([rows.attention_mask[chosen, :4], mask], 1), mask)
            _compare(model, score.plain(model, sampled, temperature=1.0, entropy=True), found_too)
        except Exception as error:
            if not unroll:
                raise CannotShare(f"{type(error).__name__}: {error}") from error
            log.info("the decoder is not unrolled for sampling: %s", error)
        else:
            return unroll
    return False


def _compare(model: Any, expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    weights = next(model.parameters())
    half = weights.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(weights.device.type)
    for one, other in zip(expected, found, strict=True):
        if one is None or other is None:
            raise CannotShare("an entropy is missing")
        gap = (one - other).abs()
        if not (gap.mean() < 0.05 if half else gap.max() < 1e-3):
            raise CannotShare(f"log-probabilities or entropies differ by up to {float(gap.max()):.2g} nats")


def _rows(ids: Tensor, attention_mask: Tensor, mask: Tensor) -> Sampled:
    zeros = torch.zeros(mask.shape, device=mask.device)
    return Sampled(ids, attention_mask, mask, zeros, zeros, ("",) * len(ids), (True,) * len(ids))
