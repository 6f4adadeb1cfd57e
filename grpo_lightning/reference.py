"""The policy that the KL term measures against. Each function takes the trained policy as it is at the start."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.policy import Policy
from grpo_lightning.policy.adapted import is_adapted
from grpo_lightning.policy.hf import HFPolicy, load
from grpo_lightning.policy.plain import PlainPolicy
from grpo_lightning.transformer.head import LossGradient
from grpo_lightning.types import Prompt, Rollout, Sampled


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
    """Uses the policy's weights without owning them; it only gives log-probabilities."""

    def __init__(self, policy: Policy, model: Any) -> None:
        super().__init__()
        self._of_policy = (policy, model)  # a tuple, so no submodules

    def logprobs_and_entropy(
        self,
        rows: Sampled | Rollout,
        *,
        temperature: float,
        entropy: bool = False,
        loss_gradient: LossGradient | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        policy, model = self._of_policy
        with model.disable_adapter():
            return policy.logprobs_and_entropy(
                rows, temperature=temperature, entropy=entropy, loss_gradient=loss_gradient
            )

    def microbatches(self, rows: Sampled | Rollout, tokens: int) -> list[Tensor]:
        return self._of_policy[0].microbatches(rows, tokens)

    def sample(self, *args: Any, **kwargs: Any) -> Sampled:
        raise NotImplementedError("a reference does not sample")

    def demonstrate(self, *args: Any) -> Sampled:
        raise NotImplementedError("a reference does not demonstrate")

    def token_at(self, ids: Sequence[int], end: int) -> int:
        return self._of_policy[0].token_at(ids, end)

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        return self._of_policy[0].count_tokens(prompts)

    def export(self, directory: Path, weights: Any = None) -> None:
        raise NotImplementedError("a reference is not exported")


def of_model(policy: Policy, model: nn.Module) -> Policy:
    """A model that a program has loaded itself, read through the policy's tokenizer and on the policy's path.

    Args:
        policy: An ``HFPolicy`` or a ``PlainPolicy``.
        model: Of the same kind and with the same vocabulary; it is frozen.

    Raises:
        ValueError: The policy is of another kind.
    """
    if model is getattr(policy, "model", None):
        raise ValueError(
            "reference: the policy's own model, which trains; allowed is a copy of it: copy.deepcopy(model)"
        )
    if not isinstance(policy, HFPolicy | PlainPolicy):
        raise ValueError(f"reference={type(model).__name__}: allowed with {type(policy).__name__} is a Policy")
    return type(policy)(model, policy.tokenizer).requires_grad_(False).eval()


@contextmanager
def _named_reference() -> Iterator[None]:
    """Inside, errors of loading a policy name the reference's keys."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("policy.", "reference.", 1)) from error


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
    with _named_reference():
        other = load(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            quantization=quantization,
        )
    own = getattr(policy, "tokenizer", None)
    if own is None or own.get_vocab() != other.tokenizer.get_vocab():
        raise ValueError(f"reference.path={path!r}: its vocabulary differs from the policy's")
    return other.requires_grad_(False).eval()
