"""Fully sharded data parallelism: every process holds a shard of every weight, gathered when a layer is used.

PyTorch's ``fully_shard`` (FSDP2): https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def trainer_shards(trainer: Trainer) -> bool:
    """Whether a trainer shards the weights of its module."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` was applied to a module."""
    return isinstance(module, FSDPModule)


def layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model: of all lists of modules inside, the one with most weights."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda parts: sum(p.numel() for part in parts for p in part.parameters()), default=[])


def shard(module: nn.Module, mesh: Any, *, methods: tuple[str, ...], half: bool = False) -> None:
    """Shard every decoder layer and, as one more part, all that lies outside of them; gradients are summed.

    Args:
        module: The model whose weights are sharded, in place.
        mesh: A device mesh of one dimension.
        methods: Names of the methods of ``module`` that gather weights when they are called.
        half: Whether the float32 weights of layers are gathered in bfloat16; their gradients are summed in float32. For
            arithmetic that would round them to bfloat16 anyway, except those of layer norms.
    """
    # The layers first: `fully_shard` takes what no part inside has taken yet.
    for part in (*layers(module), module):
        # Embeddings and head are gathered as they are, and inputs of layers are not rounded: else the states between
        # the layers would be bfloat16, too.
        is_half = half and part is not module
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_half else None,
            reduce_dtype=torch.float32 if is_half else None,
            cast_forward_inputs=False,
        )
        # FSDP2 would leave the weights of the outermost part gathered for a backward pass, and there may be none.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        sharded: Any = part
        # The loss's weights are those of the whole optimizer step, so gradients are parts of a sum, not of a mean. The
        # factor alone would be applied in the exchange, by an operation that only NCCL has.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    # FSDP2 gathers weights in `forward` only, which a policy does not have.
    for name in methods:
        register_fsdp_forward_method(module, name)
    # `gathered` may come before the first forward pass, which else does this.
    root: Any = module
    root._get_fsdp_state()._lazy_init()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, every process holds all weights and may call the module as often as it likes.

    All processes enter together. Without `shard` it does nothing.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)  # else the first forward pass would free the weights
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """All weights, by their names in ``state_dict``; all processes call it together.

    Sharded ones are returned on the CPU, in the first process only.
    """
    if not is_sharded(module):
        return dict(module.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(module, options=options)
    return weights


def load_full_state_dict(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load what `full_state_dict` returned; all processes call it together, each with all weights."""
    if is_sharded(module):
        set_model_state_dict(module, dict(weights), options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(weights)


@contextmanager
def explain_read_errors(path: Any) -> Iterator[None]:
    """Inside, torch reads a sharded checkpoint; a part that cannot be read is raised as one sentence.

    Raises:
        ValueError: A part is missing, cut off or of another shape.
    """
    try:
        yield
    except CheckpointException as error:
        first = next((failure for failure, _ in error.failures.values()), error)
        reason = str(first).strip().partition("\n")[0][:200]
        raise ValueError(f"checkpoint={path}: its parts cannot be read: {type(first).__name__}: {reason}") from error
