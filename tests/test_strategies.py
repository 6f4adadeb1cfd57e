"""What is refused before several processes start; what they do is in test_processes.py."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from grpo_lightning.checkpoint.resume import recorded_run
from grpo_lightning.distributed.devices import num_processes
from grpo_lightning.distributed.strategies import (
    FullyShardedStrategy,
    check_processes,
    sum_gradients,
)
from tests.support.composed import composed
from tests.support.running import small_run

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"devices": 3}, 3),
        ({"devices": "2"}, 2),
        ({"devices": [0, 4]}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({}, 1),
    ],
)
def test_processes_that_a_trainer_starts(trainer, expected):
    assert num_processes(trainer) == expected


def test_a_sweep_does_not_start_processes():
    several = composed("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    with pytest.raises(
        ValueError, match=r"trainer.devices=2: each further process would start .* torchrun --nproc_per_node=2"
    ):
        check_processes(several, directory_given=True, multirun=True)
    check_processes(several, directory_given=False, multirun=False)
    check_processes(composed(), directory_given=False, multirun=True)


@pytest.mark.parametrize("multirun", [False, True])
def test_processes_started_from_outside_share_a_named_directory(monkeypatch, multirun):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    with pytest.raises(ValueError, match=f"{key}: name a directory, such as {key}=runs/mine"):
        check_processes(composed("trainer=ddp"), directory_given=False, multirun=multirun)
    check_processes(composed("trainer=ddp"), directory_given=True, multirun=multirun)


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        (ModelParallelStrategy(), "ModelParallelStrategy"),
        (FSDPStrategy(), "FSDPStrategy"),
        (DDPStrategy(ddp_comm_hook=lambda state, bucket: None), "DDPStrategy with a ddp_comm_hook"),
    ],
)
def test_a_strategy_whose_gradients_cannot_be_added_up_is_refused_by_name(strategy, named):
    with pytest.raises(ValueError, match=f"trainer.strategy={named} averages gradients"):
        sum_gradients(strategy)


def test_layers_are_not_split():
    with pytest.raises(ValueError, match=r"trainer.strategy.tensor_parallel_size=2: must be 1"):
        FullyShardedStrategy(timeout=1, tensor_parallel_size=2)


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
    torch.testing.assert_close(weight.detach(), torch.tensor([0.891, 1.091]), rtol=0.02, atol=0)  # a whole first step
    known = {"state": {"w": {"step": torch.tensor(1.0)}}}
    monkeypatch.setattr(ModelParallelStrategy, "optimizer_state", lambda self, optimizer: known)
    assert FullyShardedStrategy(timeout=1).optimizer_state(optimizer)["state"]["w"]["step"] == 1
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.slow
def test_another_number_of_processes_is_noticed(tmp_path, caplog):
    small_run(tmp_path, "steps=1")
    path = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["step"]["processes"] = 3
    torch.save(content, path)
    small_run(tmp_path, "steps=2", "checkpoint=last")
    assert "the checkpoint is of a run in 3 processes, which now goes on in 1" in caplog.text


def test_an_adapter_of_another_trainer_is_refused_where_its_optimizer_would_be_mixed_up(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"run": {"events": {}}, "step": {"completed": 1, "processes": 2, "sharded": False}}, path)
    sharded = SimpleNamespace(world_size=2, strategy=FullyShardedStrategy(timeout=1))
    with pytest.raises(ValueError, match=r"last.ckpt is of an adapter trained without trainer=fsdp"):
        recorded_run(path, sharded, is_adapter=True)
    assert recorded_run(path, SimpleNamespace(world_size=2, strategy=None), is_adapter=True) == {"events": {}}
    assert recorded_run(path, sharded, is_adapter=False) == {"events": {}}
