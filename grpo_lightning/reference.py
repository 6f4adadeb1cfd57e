"""The policy that the KL term measures against. Each function takes the trained policy as it is at the start."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy import Policy
from grpo_lightning.policy.adapters import is_adapted
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.transformer.lm_head import LossGradient
from grpo_lightning.types import Rollout, Sampled


def frozen_copy(policy: Policy, *, dtype: str | None = None, offload: bool = False) -> Policy:
    """A second set of weights, as ``policy`` is at the moment of the call; costs its memory again.

    Args:
        policy: Copied.
        dtype: Of the copy: float32 or bfloat16, which is half as large and rounds; null: as the policy's.
        offload: Whether the copy lies in the computer's memory and is on the device only while it scores.
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
    """The policy without its adapter, which is what it was at the start; costs no memory.

    Raises:
        ValueError: The policy has no adapter.
    """
    model = getattr(policy, "model", None)
    if not is_adapted(model):
        raise ValueError(
            "reference=adapter_off: allowed with an adapter only, such as policy.adapter={r: 16, lora_alpha: 32}"
        )
    return _AdapterOff(policy, model)


class _AdapterOff(Policy):
    """Scores with the policy's weights, without its adapter."""

    def __init__(self, policy: Policy, model: Any) -> None:
        super().__init__(policy.tokenizer, end_ids=policy.end_ids, context=policy.context)
        self._shared = (policy, model)  # a tuple, so that the weights are not registered a second time

    @property
    def device(self) -> torch.device:
        return self._shared[0].device

    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        policy, model = self._shared
        with model.disable_adapter():
            return policy.logprobs_and_entropy(
                rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
            )

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        return self._shared[0].microbatches(rows, tokens)

    def flops(self, rows: Sampled | Rollout) -> float:
        return self._shared[0].flops(rows)


def of_model(policy: Policy, model: nn.Module) -> Policy:
    """A model that a program has loaded itself, read through the policy's tokenizer and on the policy's path.

    Args:
        policy: An ``HFPolicy`` or a ``GenericPolicy``.
        model: Of the same kind and with the same vocabulary; it is frozen.

    Raises:
        ValueError: The policy is of another kind.
    """
    if model is getattr(policy, "model", None):
        raise ValueError(
            "reference: the policy's own model, which trains; allowed is a copy of it: copy.deepcopy(model)"
        )
    if not isinstance(policy, HFPolicy | GenericPolicy):
        raise ValueError(f"reference={type(model).__name__}: allowed with {type(policy).__name__} is a Policy")
    return type(policy)(model, policy.tokenizer).requires_grad_(False).eval()


def another_model(
    policy: Policy,
    *,
    path: str,
    dtype: str,
    attn_implementation: str,
    trust_remote_code: bool,
    quantization: str | None = None,
) -> Policy:
    """Another model with the same vocabulary, such as distilgpt2 for gpt2.

    Args:
        policy: Only its vocabulary is compared.
        path: As in ``policy.hf.load``, like the other arguments.
        dtype: Of the reference's weights.
        attn_implementation: transformers' name.
        trust_remote_code: Whether code that comes with the weights may run.
        quantization: 8bit or 4bit (bitsandbytes); null: as they are.

    Raises:
        ValueError: The two tokenizers differ, so that token ids would mean different things.
    """
    other = load(
        path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        key="reference.path",
    )
    if policy.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise ValueError(f"reference.path={path!r}: its vocabulary differs from the policy's")
    return other.requires_grad_(False).eval()
