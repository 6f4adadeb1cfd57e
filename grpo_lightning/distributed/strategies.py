"""Data-parallel strategies for Lightning, replicated (DDP) and sharded (FSDP2), and how sharded weights are gathered.

Sharding is PyTorch's ``fully_shard`` (FSDP2): https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import atexit
import itertools
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from grpo_lightning.config.rules import num_processes
from grpo_lightning.config.settings import command_words


class _TwoBackends:
    """Mixin of strategies: tensors on GPUs travel by NCCL, Python objects by Gloo."""

    root_device: torch.device
    num_nodes: int

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        if self.num_nodes > 1:
            _fail_on_silence()

    def _get_process_group_backend(self) -> str:
        # Lightning ends a group at exit only where NCCL is the one backend. A thread of gloo's that still holds Python
        # objects then would end the process by SIGABRT.
        atexit.register(_destroy_process_group)
        if self.root_device.type != "cuda":
            backend: str = super()._get_process_group_backend()  # type: ignore[misc]
            return backend
        # With NCCL alone every rollout's texts would be pickled through GPU memory; torch sends objects by the CPU's
        # backend where there are two.
        return "cpu:gloo,cuda:nccl"


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)  # FSDP keeps threads of gloo's after the end of a group; they let go of Python's lock


def _fail_on_silence() -> None:
    """Let TCP connections fail after 20 s in which the other host does not answer, on Linux.

    A host that loses power or its network closes no connection, and gloo, which has no option for this, would wait for
    the timeout of the process group. The kernel answers for a process that is busy or stopped.
    """
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 20_000}  # s, s, ms
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError), socket.fromfd(int(descriptor), socket.AF_INET, socket.SOCK_STREAM) as connection:
            for name, value in options.items():  # raises OSError for what is no TCP socket
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class ReplicatedStrategy(_TwoBackends, DDPStrategy):
    """DDP: every process holds all weights and the optimizer's state.

    Args:
        timeout: Minutes that a process waits for the others before the run ends.
    """

    def __init__(self, *, timeout: float) -> None:
        # Gradients lie in the buffers that are exchanged, which else would take as much memory again.
        super().__init__(timeout=timedelta(minutes=timeout), gradient_as_bucket_view=True)


class FullyShardedStrategy(_TwoBackends, ModelParallelStrategy):
    """FSDP2 over all processes; the module shards itself in ``configure_model``. Gradients are summed, not averaged.

    Args:
        timeout: Minutes that a process waits for the others before the run ends.
        sharded_checkpoints: Whether a checkpoint is a directory into which every process writes its own part, rather
            than a file that the first process writes.
    """

    def __init__(self, *, timeout: float, sharded_checkpoints: bool = False) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=sharded_checkpoints,
            timeout=timedelta(minutes=timeout),
        )

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        # Lightning takes the number of machines unless it is given, and the strategy is made before it is known.
        self._data_parallel_size = self.world_size

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's full state, as Lightning gathers it, also before the optimizer's first step.

        To have a state to write, PyTorch lets an optimizer without one make a step with gradients of zero. That step
        would count: AdamW would correct the first true step as if it were the second, to 0.74 of its length.
        """
        is_new = not optimizer.state
        state = super().optimizer_state(optimizer)
        if is_new:
            for tensor in _tensors((dict(optimizer.state), state.get("state", {}))):
                tensor.zero_()
        return state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with explain_read_errors(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; after a kill at any moment the old or the new one is there, complete.

        A sharded one is a directory beside ``filepath``, which becomes a link to it.
        """
        if not self._save_distributed_checkpoint:
            # Not ModelParallelStrategy's, which first removes a sharded checkpoint there, and cannot remove a link.
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        step = checkpoint.get("step", {}).get("completed", 0)
        path = Path(filepath)
        # A new name, since the old directory stays until the link leads to the new one; chosen by the first process.
        names = (path.with_name(f"{path.stem}_{step}_{number}{path.suffix}") for number in itertools.count())
        target = Path(self.broadcast(str(next(name for name in names if not os.path.lexists(name)))))
        path = target.with_name(path.name)
        try:
            super().save_checkpoint(checkpoint, target, storage_options)
        except BaseException:
            if self.is_global_zero:
                shutil.rmtree(target, ignore_errors=True)
            raise
        self.barrier()  # all processes have written their parts
        if self.is_global_zero:
            staged = path.with_name(f".{path.name}.{os.getpid()}")
            staged.symlink_to(target.name)
            staged.replace(path)
            # last.ckpt and best.ckpt may be links; directories that neither leads to are removed.
            used = {link.resolve() for link in path.parent.iterdir() if link.is_symlink()}
            sharded = re.compile(rf"{re.escape(path.stem)}_\d+_\d+{re.escape(path.suffix)}")
            for other in path.parent.iterdir():
                if sharded.fullmatch(other.name) and not other.is_symlink() and other.resolve() not in used:
                    shutil.rmtree(other)
        self.barrier()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(part)


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy whose gradients cannot be summed.

    Raises:
        ValueError: It is one.
    """
    is_known = isinstance(strategy, SingleDeviceStrategy | FullyShardedStrategy | DDPStrategy)
    if not is_known or (isinstance(strategy, DDPStrategy) and strategy._ddp_comm_hook is not None):
        hook = " with a ddp_comm_hook" if is_known else ""
        raise ValueError(
            f"trainer.strategy={type(strategy).__name__}{hook} averages gradients, which are summed here: use a single "
            "device, DDP without a ddp_comm_hook (trainer=ddp, or strategy='ddp' of a Trainer of your own), or "
            f"{FullyShardedStrategy.__module__}.FullyShardedStrategy (trainer=fsdp)"
        )


def sum_gradients(strategy: Strategy) -> None:
    """Make a strategy sum gradients over its processes instead of averaging them.

    The token weights of the loss are those of the whole optimizer step, so the gradients of all processes are the
    parts of one sum. Called once the strategy has wrapped the module.

    Raises:
        ValueError: As `check_strategy`.
    """
    check_strategy(strategy)
    if isinstance(strategy, DDPStrategy):
        # Multiplying the loss by the number of processes would do the same but for rounding.
        wrapped: Any = strategy.model
        wrapped.register_comm_hook(None, _sum_bucket)


def _sum_bucket(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


def is_externally_launched() -> bool:
    """Whether torchrun or SLURM has started the processes, rather than Lightning in the first one."""
    return TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def check_processes(config: Mapping[str, Any], *, directory_given: bool, multirun: bool) -> None:
    """Refuse a number of processes that cannot come about, and what they would do differently from one another.

    Raises:
        ValueError: Processes started by torchrun or SLURM are not as many as the trainer expects, or would each choose
            a run directory; nothing starts those of other machines; or a sweep would start processes of its own, each
            of which would run the sweep.
    """
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    number = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
    trainer = config["trainer"]
    devices, nodes = num_processes(trainer), trainer.get("num_nodes", 1)
    trains = config["mode"] in ("fit", "validate") and trainer.get("_target_") == "lightning.Trainer"
    given = f"trainer.devices={trainer.get('devices', 1)} trainer.num_nodes={nodes}"
    if is_externally_launched():
        if trains and devices * nodes != number:
            raise ValueError(
                f"{given}: {devices} x {nodes} processes, but torchrun or SLURM has started {number} (WORLD_SIZE or "
                "SLURM_NTASKS): set trainer.devices to those on each machine, and trainer.num_nodes to the machines"
            )
        if number > 1 and not directory_given:
            raise ValueError(
                f"{key}: name a directory, such as {key}=runs/mine; each of the {number} processes would make one of "
                "its own"
            )
        return
    *python, name = command_words()
    torchrun = f"torchrun --nproc_per_node={devices}"
    script = shlex.quote(name) if python else f"--no-python {name}"
    if trains and nodes > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"{given}: nothing starts the processes of the other machines; run this on each of them, with N from 0, or "
            f"use SLURM: {torchrun} --nnodes={nodes} --node_rank=N --master_addr=HOST {script} ... {key}=DIRECTORY"
        )
    if multirun and devices > 1:
        raise ValueError(
            f"trainer.devices={trainer['devices']}: each further process would start the sweep (-m) anew; "
            f"start all together: {torchrun} {script} -m ... {key}=DIRECTORY"
        )


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
    # `gather_weights` may come before the first forward pass, which else does this.
    root: Any = module
    root._get_fsdp_state()._lazy_init()


@contextmanager
def gather_weights(module: nn.Module) -> Iterator[None]:
    """Context in which every process holds all weights and may call the module as often as it likes.

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
    """Context of reading a sharded checkpoint: a part that cannot be read is raised as one sentence.

    Raises:
        ValueError: A part is missing, cut off or of another shape.
    """
    try:
        yield
    except CheckpointException as error:
        first = next((failure for failure, _ in error.failures.values()), error)
        reason = str(first).strip().partition("\n")[0][:200]
        raise ValueError(f"checkpoint={path}: its parts cannot be read: {type(first).__name__}: {reason}") from error
