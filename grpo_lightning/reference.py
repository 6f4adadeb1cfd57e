"""The policy that the KL term measures against. Each function takes the trained policy as it is at the start."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy import Policy
from grpo_lightning.policy.base import check_adapted
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Rollout, Sampled


def frozen_copy(policy: Policy, *, dtype: str | None = None, offload: bool = False) -> Policy:
    """A second set of weights, as ``policy`` is at the moment of the call; costs its memory again.

    Args:
        policy: Copied.
        dtype: Of the copy: float32 or bfloat16, which is half as large and rounds; null: as the policy's.
        offload: Whether the copy is kept in CPU RAM and is on the device only while it scores.
    """
    copied = copy.deepcopy(policy).requires_grad_(False).eval()
    if dtype is not None:
        copied = copied.to(getattr(torch, dtype))
    if offload:
        copied.offload()
    return copied


def none(policy: Policy) -> None:
    """No reference; needs ``loss.kl_coef=0``."""


def adapter_off(policy: Policy) -> Policy:
    """The policy without its adapter, which is the model of ``policy.path``; costs no memory."""
    check_adapted(policy, "reference=adapter_off")
    return _AdapterOff(policy)


class _AdapterOff(Policy):
    """Scores with the policy's weights, without its adapter."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.tokenizer, end_ids=policy.end_ids, context=policy.context)
        self._shared = (policy,)  # a tuple, so that the weights are not registered a second time

    @property
    def device(self) -> torch.device:
        return self._shared[0].device

    def logprobs_and_entropy(self, rows: Sampled | Rollout, **options: Any) -> tuple[Tensor, Tensor | None]:
        policy: Any = self._shared[0]
        with policy.model.disable_adapter():
            scored: tuple[Tensor, Tensor | None] = policy.logprobs_and_entropy(rows, **options)
        return scored

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        return self._shared[0].microbatches(rows, tokens)

    def flops(self, rows: Sampled | Rollout) -> float:
        return self._shared[0].flops(rows)


def of_model(policy: Policy, model: nn.Module) -> Policy:
    """A model of the policy's kind that a program has loaded itself, frozen, with the policy's tokenizer."""
    if model is getattr(policy, "model", None):
        raise ValueError("reference: the policy's own model would be trained; use copy.deepcopy(model)")
    from grpo_lightning.policy.generic import GenericPolicy

    if not isinstance(policy, HFPolicy | GenericPolicy):
        raise ValueError(f"reference={type(model).__name__}: expected a Policy like the {type(policy).__name__}")
    return type(policy)(model, policy.tokenizer).requires_grad_(False).eval()


def another_model(policy: Policy, *, path: str, **options: Any) -> Policy:
    """Another model with the same vocabulary, such as distilgpt2 for gpt2; path and options as `load` takes them."""
    other = load(path, key="reference.path", **options)
    if policy.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise ValueError(f"reference.path={path!r}: its vocabulary differs from the policy's")
    return other.requires_grad_(False).eval()
