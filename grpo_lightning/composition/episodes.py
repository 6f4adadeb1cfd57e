"""What an environment asks of the policy: a chat template that shows its replies and its tools."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_lightning.environment import Environment

if TYPE_CHECKING:  # policies import torch
    from grpo_lightning.policy import Policy

TOOLS = "environment.tools"
"""What the tools are called among live objects."""


def with_replies(module: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """Settings of a module whose policy looks, before weights are read, whether its template shows replies and tools.

    Args:
        module: Its settings, the policy's among them.
        environment: Who replies. Its tools are referred to as the live object ``TOOLS``.

    Raises:
        ValueError: The settings have tools of their own.
    """
    policy = dict(module["policy"])
    if "reply_role" in policy:
        policy["reply_role"] = environment.reply_role or policy["reply_role"] or "user"
    if environment.tools and "template_kwargs" in policy:
        own = policy["template_kwargs"] or {}
        if own.get("tools") is not None:
            raise ValueError(
                f"policy.template_kwargs.tools: allowed is null with environment {environment.name}, which has tools"
            )
        policy["template_kwargs"] = {**own, "tools": {"_target_": f"{__package__}.part", "name": TOOLS}}
    return {**module, "policy": policy}


def check_replies(policy: "Policy", environment: Environment) -> None:
    """Look whether a policy can be told what an environment replies.

    Raises:
        ValueError: It has no replies, was not told of the tools, or its chat template cannot show them.
    """
    replies: Any = getattr(policy, "replies", None)
    if replies is None:
        raise ValueError(f"policy={type(policy).__name__}: allowed with an environment is one that can be replied to")
    if environment.tools and getattr(policy, "template_kwargs", {}).get("tools") is None:
        raise ValueError(
            f"policy: environment {environment.name} has tools, which the policy that was given as an object does not "
            "show; allowed is one with template_kwargs={'tools': environment.tools}"
        )
    replies.check(environment.reply_role or getattr(policy, "reply_role", None) or "user")
