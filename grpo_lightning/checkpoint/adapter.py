"""Checkpoints of a policy of which a part is trained, as an adapter above frozen weights: they hold that part only."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn


def names(policy: nn.Module) -> set[str]:
    """The names of the trained weights, in the state dict of a module that has the policy as its part ``policy``."""
    return {f"policy.{name}" for name, weight in policy.named_parameters() if weight.requires_grad}


def fingerprint(policy: nn.Module) -> str | None:
    """A short text that tells frozen weights apart, made from the name, the shape and up to 64 values of each.

    Returns:
        16 hexadecimal digits; None where all weights are trained.
    """
    frozen = [(name, weight) for name, weight in policy.named_parameters() if not weight.requires_grad]
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in frozen:
        flat = weight.detach().flatten()
        chosen = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + chosen.numpy().tobytes())
    return digest.hexdigest() if frozen else None


def check(policy: nn.Module, base: str | None, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to a policy.

    Args:
        policy: The policy into which it was or will be loaded.
        base: The policy's `fingerprint`.
        checkpoint: The checkpoint's content.

    Raises:
        ValueError: It holds an adapter of another base, or of one that it does not name, or lacks weights of this
            policy's.
    """
    known: Any = checkpoint.get("state_dict", {})
    if base is None:
        if "base" in checkpoint:
            raise ValueError("the checkpoint holds an adapter only: set policy.adapter as it was in its run")
        return
    missing = sorted(names(policy) - known.keys()) if known else []
    if missing:
        raise ValueError(f"the checkpoint lacks weights that policy.adapter has, {len(missing)} such as {missing[0]}")
    is_whole = {f"policy.{name}" for name in policy.state_dict()} <= known.keys()
    theirs = checkpoint.get("base", base if is_whole else None)
    if theirs != base:
        raise ValueError(f"the checkpoint's adapter was trained above other weights ({theirs}) than policy.path has")
