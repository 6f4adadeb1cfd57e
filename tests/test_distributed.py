"""How processes share work, weights and gradients; whole runs of several processes are in test_processes.py."""

import socket
import sys

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from grpo_lightning.config.rules import num_processes
from grpo_lightning.distributed import strategies
from grpo_lightning.distributed.ranks import SINGLE_PROCESS, PeerError, Ranks, lost_contact
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.distributed.strategies import (
    FullyShardedStrategy,
    ReplicatedStrategy,
    check_processes,
    gather_weights,
    layers,
    shard,
    sum_gradients,
)
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import composed
from tests.support.sampling import generate


def test_shards_and_balanced_rows_by_hand():
    for count, expected in ((6, [2, 2, 2]), (8, [2, 3, 3]), (2, [0, 1, 1])):
        parts = [Ranks(rank, 3).shard_range(count) for rank in range(3)]
        assert [len(part) for part in parts] == expected
        assert [i for part in parts for i in part] == list(range(count))
    groups, sizes = [[0, 1], [2, 3], [4, 5]], [5, 5, 1, 1, 4, 4]
    for rank in (0, 1):
        assert Ranks(rank, 2).balance(groups, sizes) == [[0, 1], [2, 3, 4, 5]]  # 10 against 8 + 2
    assert Ranks(0, 2).balance([[0, 1, 2]], [3, 2, 1]) == [[0], [1, 2]]  # one group for two: its rows part


def test_a_single_process_communicates_with_nobody():
    assert SINGLE_PROCESS.gather("a") == ["a"]
    assert SINGLE_PROCESS.all_or_raise(lambda: 3) == [3]
    assert SINGLE_PROCESS.sum({"x": torch.tensor(2.0)}) == {"x": torch.tensor(2.0)}
    with pytest.raises(Preempted, match="asked to end by SIGTERM: now"):
        SINGLE_PROCESS.all_or_raise(lambda: (_ for _ in ()).throw(Preempted(15, saved="now")))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", "llama", chat=False)


def policy_of(path, *, exact_norms=False):
    policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.named_parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)  # norms are 1, which is not rounded
        if exact_norms and is_norm(name):  # so that nothing is rounded that autocast leaves alone
            weight.data = weight.data.bfloat16().float()
    return policy


def is_norm(name):
    """Whether a weight is that of a norm in one of the layers."""
    return "norm" in name and "layers" in name


def rows_of(policy, *, prompts=("one prompt", "another"), stop=(), length=9):
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=length, stop=stop)
    return generate(policy, list(prompts), group_size=3, sampling=sampling, seed=3)


def test_microbatches_cover_every_row_once_and_add_up_to_the_gradient_of_one_process(path):
    policy = policy_of(path)
    prompts = ("one prompt", "another", "a third and longer prompt", "four")
    rows = rows_of(policy, prompts=prompts, stop=("e", "a"), length=12)
    weights = torch.rand(rows.mask.shape) * rows.mask

    def gradient(parts):
        policy.zero_grad()
        for index in parts:
            (policy.logprobs(rows[index], temperature=1.0) * weights[index]).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    expected = gradient([torch.arange(len(rows))])
    for processes in (2, 3, 5):
        counts, seen, total = set(), [], torch.zeros_like(expected)
        for rank in range(processes):
            parts, idle = policy.local_microbatches(rows, 60, Ranks(rank, processes))
            busy = parts[: len(parts) - idle]
            counts.add(len(parts))  # as many in every process, some of them idle
            seen += [row for part in busy for row in part.tolist()]
            total += gradient(busy) if busy else 0
        assert len(counts) == 1
        assert sorted(seen) == list(range(len(rows)))
        assert (total - expected).norm() < 1e-6 * expected.norm()
    assert sorted(policy.local_microbatches(rows[torch.arange(9)], 50, Ranks(r, 2))[1] for r in range(2)) == [0, 1]


METHODS = ("logprobs_and_entropy",)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def logprobs_and_gradients(policy, rows, part=slice(None)):
    """Log-probabilities under autocast, and the gradient of every weight after two backward passes."""
    slopes = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            logprobs = policy.logprobs(rows[torch.arange(len(rows))[part]], temperature=0.9)
            (logprobs * slopes[part]).sum().backward()
    whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in policy.named_parameters()}
    return logprobs.detach(), whole


def test_layers_are_gathered_in_bfloat16_kept_in_float32_and_compute_what_autocast_does(path, mesh):
    plain, sharded = policy_of(path, exact_norms=True), policy_of(path, exact_norms=True)
    rows = rows_of(plain)
    expected, gradients = logprobs_and_gradients(plain, rows)
    shard(sharded, mesh, methods=METHODS, half=True)
    logprobs, found = logprobs_and_gradients(sharded, rows)
    assert torch.equal(logprobs, expected)
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        assert found[name].dtype == torch.float32
        assert_close(found[name], value, rtol=0, atol=0.01 * float(value.abs().max()))
        assert is_norm(name) or torch.equal(found[name], value), name
    assert sum(is_norm(name) for name in gradients) == 4
    inside = {id(p) for layer in layers(plain) for p in layer.parameters()}
    halves = {name for name, p in plain.named_parameters() if id(p) in inside}
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    with gather_weights(sharded):
        assert {name for name, p in sharded.named_parameters() if p.dtype == torch.bfloat16} == halves
    for name, weight in sharded.named_parameters():
        assert torch.equal(weight.to_local(), dict(plain.named_parameters())[name]), name


def test_processes_that_a_trainer_starts():
    for devices, expected in ((3, 3), ("2", 2), ([0, 4], 2), ("0,4", 2), ("3,", 1), (1, 1)):
        assert num_processes({"devices": devices}) == expected
    assert num_processes({"devices": "auto", "accelerator": "cpu"}) == 1


def test_processes_of_a_sweep_or_a_launcher_share_a_named_directory(monkeypatch):
    several = composed("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    check_processes(several, directory_given=False, multirun=False)
    check_processes(composed(), directory_given=False, multirun=True)
    with pytest.raises(ValueError, match=r"trainer.devices=2: each further process would .* --nproc_per_node=2"):
        check_processes(several, directory_given=True, multirun=True)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    for multirun, key in ((False, "hydra.run.dir"), (True, "hydra.sweep.dir")):
        with pytest.raises(ValueError, match=f"{key}: name a directory, such as {key}=runs/mine"):
            check_processes(several, directory_given=False, multirun=multirun)
        check_processes(several, directory_given=True, multirun=multirun)


def test_as_many_processes_as_the_trainer_expects(monkeypatch):
    two_hosts = composed("trainer=ddp", "trainer.devices=3", "trainer.num_nodes=2", "trainer.accelerator=cpu")
    check = lambda config: check_processes(config, directory_given=True, multirun=False)  # noqa: E731
    with pytest.raises(ValueError, match=r"trainer.num_nodes=2: nothing starts .* --nproc_per_node=3 --nnodes=2 "):
        check(two_hosts)
    check(two_hosts | {"mode": "preflight"})  # by one process
    for name, value in {"RANK": "1", "WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    check(two_hosts)
    check({**composed(), "mode": "export"})
    check({**composed(), "trainer": {"_target_": "mine.Trainer"}})  # which may say otherwise how many
    for config, given in ((composed(), "trainer.devices=1 trainer.num_nodes=1: 1 x 1"), (two_hosts, "2: 3 x 2")):
        monkeypatch.setenv("WORLD_SIZE", "5")
        with pytest.raises(ValueError, match=rf"{given} processes, but torchrun or SLURM has started 5"):
            check(config)


@pytest.mark.skipif(sys.platform != "linux", reason="a host that is lost is noticed by Linux")
def test_connections_of_several_hosts_end_when_the_other_is_silent(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
        for hosts, expected in ((1, (0, 0)), (2, (1, 20_000))):
            strategy = ReplicatedStrategy(timeout=1)
            strategy.num_nodes = hosts
            strategy.setup_environment()
            options = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert tuple(connection.getsockopt(*option) for option in options) == expected


def test_strategies_that_cannot_work_are_refused_by_name():
    for strategy, name in (
        (ModelParallelStrategy(), "ModelParallelStrategy"),
        (FSDPStrategy(), "FSDPStrategy"),
        (DDPStrategy(ddp_comm_hook=lambda state, bucket: None), "DDPStrategy with a ddp_comm_hook"),
    ):
        with pytest.raises(ValueError, match=f"trainer.strategy={name} averages gradients"):
            sum_gradients(strategy)


def test_the_state_of_an_optimizer_that_has_not_stepped_is_written_as_zeros(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step_first(self, optimizer):  # what PyTorch does to have a state
        weight.grad = torch.zeros(2)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        return {"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}

    monkeypatch.setattr(ModelParallelStrategy, "optimizer_state", step_first)
    written = FullyShardedStrategy(timeout=1).optimizer_state(optimizer)
    assert written["state"]["w"]["step"] == 0
    assert optimizer.state[weight]["step"] == 0
    weight.grad = torch.tensor([3.0, -2.0])
    optimizer.step()
    assert_close(weight.detach(), torch.tensor([0.891, 1.091]), rtol=0.02, atol=0)  # a whole first step
    state = {"state": {"w": {"step": torch.tensor(1.0)}}}
    monkeypatch.setattr(ModelParallelStrategy, "optimizer_state", lambda self, optimizer: state)
    assert FullyShardedStrategy(timeout=1).optimizer_state(optimizer)["state"]["w"]["step"] == 1


def test_on_gpus_objects_are_exchanged_by_the_cpus(monkeypatch):
    monkeypatch.setattr(strategies.atexit, "register", lambda end: None)
    for kind in (ReplicatedStrategy, FullyShardedStrategy):
        for place, backend in (("cpu", "gloo"), ("cuda:0", "cpu:gloo,cuda:nccl")):
            on_device = type("OnDevice", (kind,), {"root_device": torch.device(place)})
            assert on_device(timeout=1)._get_process_group_backend() == backend


def test_the_end_of_another_process_is_recognized():
    for error in (
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4"),
        RuntimeError("NCCL communicator was aborted on rank 0.\n\nAt:\n  strategies.py(189): <lambda>"),
        RuntimeError("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"),
        RuntimeError("Broken pipe. [TCPStore.cpp:127] Failed to send"),
    ):
        lost = lost_contact(error)
        assert isinstance(lost, PeerError)
        assert str(lost).startswith("lost contact with another process of the run")
        assert str(error).partition("\n")[0] in str(lost)
        assert "\n" not in str(lost)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("Connection reset by peer"),
        ValueError("Watchdog caught collective operation timeout"),
    ):
        assert lost_contact(error) is None
