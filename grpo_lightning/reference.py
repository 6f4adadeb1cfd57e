"""The policy that the KL term measures against. Each function takes the trained policy as it is at the start."""

import copy

from grpo_lightning.policy import Policy
from grpo_lightning.policy.hf import load


def frozen_copy(policy: Policy) -> Policy:
    """A second set of weights, as ``policy`` is at the moment of the call; costs its memory again."""
    return copy.deepcopy(policy).requires_grad_(False).eval()


def none(policy: Policy) -> None:
    """No reference; needs ``loss.kl_coef=0``."""


def another_model(
    policy: Policy, *, path: str, dtype: str, attn_implementation: str, trust_remote_code: bool
) -> Policy:
    """Another model with the same vocabulary, such as distilgpt2 for gpt2.

    Args:
        policy: Only its vocabulary is compared.
        path: As in ``policy.hf.load``, like the other arguments.
        dtype: Of the reference's weights.
        attn_implementation: transformers' name.
        trust_remote_code: Whether code that comes with the weights may run.

    Raises:
        ValueError: The two tokenizers differ, so that token ids would mean different things.
    """
    other = load(path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    mine = getattr(policy, "tokenizer", None)
    if mine is None or mine.get_vocab() != other.tokenizer.get_vocab():
        raise ValueError(f"reference.path={path!r}: its vocabulary differs from the policy's")
    return other.requires_grad_(False).eval()
