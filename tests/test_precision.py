"""The precision of a run that leaves it open: the machine's own."""

import torch
from lightning import LightningModule

from grpo_lightning.config import rules
from grpo_lightning.config.rules import default_precision
from grpo_lightning.module.base import Loop


def test_the_precision_that_fits_a_device(monkeypatch):
    for accelerator, on_gpu, elsewhere in (
        ("auto", "bf16-mixed", "32-true"),
        ("gpu", "bf16-mixed", "32-true"),
        ("cuda", "bf16-mixed", "bf16-mixed"),
        ("cpu", "32-true", "32-true"),
        ("mps", "32-true", "32-true"),
    ):
        for has_cuda, expected in ((True, on_gpu), (False, elsewhere)):
            monkeypatch.setattr(rules, "has_cuda", lambda has_cuda=has_cuda: has_cuda)
            assert default_precision({"accelerator": accelerator}) == expected
    assert default_precision({}) == "32-true"


class Doubling(LightningModule):
    """A layer whose weight doubles in the middle of a training step, as an optimizer step may change it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2, bias=False)

    def configure_optimizers(self):
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=1.0), "lr_scheduler": None}


def test_a_custom_loop_rounds_weights_anew_after_every_optimizer_step():
    module = Doubling()
    row = torch.ones(1, 3)
    with Loop(module, precision="bf16-mixed").precision():
        before = module.layer(row)
        module.layer.weight.data *= 2
        assert torch.equal(module.layer(row), 2 * before)
        assert before.dtype == torch.bfloat16
