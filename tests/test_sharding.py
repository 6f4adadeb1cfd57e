"""Sharded weights: what is gathered, and what becomes of gradients; whole runs are in test_processes.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

from grpo_lightning.distributed.sharding import gathered, layers, shard
from grpo_lightning.policy import Policy
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Sampled, Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.sampling import generate

METHODS = ("logprobs_and_entropy",)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def policy(path: Path, *, exact_norms: bool = False) -> Policy:
    made = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters():  # those of norms are 1, which is not rounded
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    for name, weight in made.named_parameters():
        if exact_norms and is_norm(name):  # so that nothing is rounded that autocast leaves alone
            weight.data = weight.data.bfloat16().float()
    return made


def is_norm(name: str) -> bool:
    """Whether a weight is that of a norm in one of the layers."""
    return "norm" in name and "layers" in name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "model", "llama", chat=False))


def rows(of: Policy) -> Sampled:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=9, stop=())
    return generate(of, ["one prompt", "another"], group_size=3, sampling=sampling, seed=3)


def found(of: Policy, given: Sampled, part: slice = slice(None)) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities under autocast, and the gradient of every weight after two backward passes."""
    slopes = torch.randn(given.mask.shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            logprobs = of.logprobs(given[torch.arange(len(given))[part]], temperature=0.9)
            (logprobs * slopes[part]).sum().backward()
    whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in of.named_parameters()}
    return logprobs.detach(), whole


def test_layers_gathered_in_bfloat16_compute_what_autocast_does(path: Path, mesh: DeviceMesh) -> None:
    alone, sharded = policy(path, exact_norms=True), policy(path, exact_norms=True)
    given = rows(alone)
    expected, right = found(alone, given)
    shard(sharded, mesh, methods=METHODS, half=True)
    logprobs, gradients = found(sharded, given)
    assert torch.equal(logprobs, expected)
    assert gradients.keys() == right.keys()
    for name, value in right.items():
        assert gradients[name].dtype == torch.float32
        assert_close(gradients[name], value, rtol=0, atol=0.01 * float(value.abs().max()))
        if not is_norm(name):
            assert torch.equal(gradients[name], value), name
    assert sum(is_norm(name) for name in right) == 4


def test_weights_are_kept_in_float32_and_only_layers_are_gathered_in_half(path: Path, mesh: DeviceMesh) -> None:
    plain, sharded = policy(path), policy(path)
    expected, _ = found(plain, given := rows(plain))
    shard(sharded, mesh, methods=METHODS, half=True)
    logprobs, _ = found(sharded, given)
    # Weights of norms are rounded to 8 bits, others as autocast does it.
    assert_close(logprobs, expected, rtol=0, atol=0.05)
    assert not torch.equal(logprobs, expected)
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    inside = {id(p) for layer in layers(plain) for p in layer.parameters()}
    halves = {name for name, p in plain.named_parameters() if id(p) in inside}
    with gathered(sharded):
        assert {name for name, p in sharded.named_parameters() if p.dtype == torch.bfloat16} == halves
    for name, weight in sharded.named_parameters():
        assert torch.equal(weight.to_local(), dict(plain.named_parameters())[name]), name  # type: ignore[attr-defined]


def test_in_float32_nothing_is_rounded(path: Path, mesh: DeviceMesh) -> None:
    plain, sharded = policy(path), policy(path)
    given = rows(plain)
    shard(sharded, mesh, methods=METHODS)
    assert torch.equal(sharded.logprobs(given, temperature=1.0), plain.logprobs(given, temperature=1.0))
    with gathered(sharded):
        assert {p.dtype for p in sharded.parameters()} == {torch.float32}


@pytest.mark.slow
def test_gradients_of_two_processes_add_up_to_those_of_one(path: Path) -> None:
    torch.multiprocessing.spawn(one_of_two, args=(path,), nprocs=2)  # type: ignore[attr-defined]


def one_of_two(rank: int, path: Path) -> None:
    """In a process of its own: two of the rows here, four in the other process."""
    store = dist.FileStore(str(path.parent / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    alone, sharded = policy(path, exact_norms=True), policy(path, exact_norms=True)
    given = rows(alone)
    expected, right = found(alone, given)
    shard(sharded, init_device_mesh("cpu", (2,)), methods=METHODS, half=True)
    part = slice(0, 2) if rank == 0 else slice(2, 6)
    logprobs, gradients = found(sharded, given, part)
    assert_close(logprobs, expected[part], rtol=0, atol=1e-6)
    for name, value in right.items():
        # Every gradient was rounded to 8 bits in each process, of which it is a part.
        assert gradients[name].dtype == torch.float32
        assert_close(gradients[name], value, rtol=0, atol=0.01 * float(value.abs().max()), msg=name)
    dist.destroy_process_group()
