"""Fully sharded data parallelism: every process holds a part of every weight, gathered when a layer is used.

PyTorch's ``fully_shard`` (FSDP2): https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from grpo_lightning.policy import Policy


def layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: of all lists of modules inside, the one with most weights."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda parts: sum(p.numel() for part in parts for p in part.parameters()), default=[])


def shard(policy: Policy, mesh: Any) -> None:
    """Distribute every decoder layer and, as one more part, all that lies outside of them; gradients are added up.

    Args:
        policy: Its ``score`` and ``sample`` become what gathers weights.
        mesh: One-dimensional device mesh.
    """
    for part in (*layers(policy), policy):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)  # also the last: a pass may have no backward pass
        one: Any = part
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
    for name in ("score", "sample"):
        register_fsdp_forward_method(policy, name)
    root: Any = policy
    root._get_fsdp_state()._lazy_init()  # `gathered` may come before the first forward pass, which else does this


def is_sharded(policy: nn.Module) -> bool:
    """Whether `shard` was applied."""
    return isinstance(policy, FSDPModule)


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Every process holds all weights inside, so that each may call the policy as often as it likes.

    Entered by all processes. Without `shard` it does nothing.
    """
    parts = [part for part in policy.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """All weights, as ``state_dict`` names them; called by all processes. Sharded ones are on the CPU, in the first."""
    if not is_sharded(module):
        return dict(module.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = get_model_state_dict(module, options=options)
    return found


def load_whole_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The reverse of `whole_weights`; every process is given all of them."""
    if is_sharded(module):
        set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(weights)
