"""How processes are in contact, and how the loss of it is recognized; what real ones do is in test_processes.py."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from grpo_lightning.distributed import strategies
from grpo_lightning.distributed.ranks import PeerError, lost_contact
from grpo_lightning.distributed.strategies import FullyShardedStrategy, ReplicatedStrategy


class Alone:
    """A cluster of one process."""

    main_address, main_port, creates_processes_externally = "127.0.0.1", 1, True

    def global_rank(self):
        return 0

    local_rank = node_rank = global_rank

    def world_size(self):
        return 1

    def set_global_rank(self, rank): ...

    set_world_size = set_global_rank


@pytest.mark.parametrize("kind", [ReplicatedStrategy, FullyShardedStrategy])
def test_on_gpus_objects_are_exchanged_by_the_cpus(kind, monkeypatch):
    monkeypatch.setattr(Strategy, "setup_environment", lambda self: None)  # which moves to the device
    asked = []
    monkeypatch.setattr(strategies.atexit, "register", lambda end: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **named: asked.append((backend, named["device_id"]))
    )
    for place in ("cpu", "cuda:0"):
        strategy = kind(timeout=1)
        strategy.parallel_devices = [torch.device(place)]
        strategy.cluster_environment = Alone()
        (strategy.setup_distributed if isinstance(strategy, ReplicatedStrategy) else strategy._setup_distributed)()
    assert asked == [("gloo", None), ("cpu:gloo,cuda:nccl", torch.device("cuda:0"))]


def test_the_end_of_another_process_is_recognized():
    for error in (
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"),
        dist.DistNetworkError("The client socket has timed out after 600000ms while trying to connect"),
        dist.DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4"),
        RuntimeError("NCCL communicator was aborted on rank 0."),
        RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)"),
        RuntimeError("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"),
        RuntimeError("Broken pipe. [TCPStore.cpp:127] Failed to send"),
    ):
        found = lost_contact(error)
        assert isinstance(found, PeerError)
        assert str(found).startswith("lost contact with another process of the run")
        assert str(error) in str(found)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("Distributed package doesn't have NCCL built in"),
        RuntimeError("Connection reset by peer"),
        ValueError("Watchdog caught collective operation timeout"),
    ):
        assert lost_contact(error) is None
