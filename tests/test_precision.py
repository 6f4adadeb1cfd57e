"""The precision of a run that leaves it open: the machine's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule

import grpo_lightning as grpo
from grpo_lightning.distributed import devices
from grpo_lightning.distributed.devices import default_precision
from grpo_lightning.module.loop import Loop


@pytest.mark.parametrize(
    ("accelerator", "on_gpu", "elsewhere"),
    [
        ("auto", "bf16-mixed", "32-true"),
        ("gpu", "bf16-mixed", "32-true"),
        ("cuda", "bf16-mixed", "bf16-mixed"),
        ("cpu", "32-true", "32-true"),
        ("mps", "32-true", "32-true"),
    ],
)
def test_the_precision_that_fits_a_device(
    accelerator: str, on_gpu: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, expected in ((True, on_gpu), (False, elsewhere)):
        monkeypatch.setattr(devices, "has_cuda", lambda found=found: found)
        assert default_precision({"accelerator": accelerator}) == expected
    assert default_precision({}) == "32-true"


@pytest.mark.slow
def test_settings_and_trainer_hold_the_precision_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # for Lightning
    for given, on_gpu, expected in (
        ([], True, "bf16-mixed"),
        (["trainer.precision=32-true"], True, "32-true"),
    ):
        monkeypatch.setattr(devices, "has_cuda", lambda on_gpu=on_gpu: on_gpu)
        run = grpo.compose(*given, run_dir=tmp_path)
        assert run.config["trainer"]["precision"] == run.trainer.precision == expected


class Doubling(LightningModule):
    """A layer whose weight doubles in the middle of a training step, as an optimizer step may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2, bias=False)

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=1.0), "lr_scheduler": None}


def test_a_loop_of_ones_own_rounds_weights_anew_after_every_optimizer_step() -> None:
    module = Doubling()
    row = torch.ones(1, 3)
    with Loop(module, precision="bf16-mixed").precision():
        before = module.layer(row)
        module.layer.weight.data *= 2
        assert torch.equal(module.layer(row), 2 * before)
        assert before.dtype == torch.bfloat16
