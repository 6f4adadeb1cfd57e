"""Loops and trainers of one's own, and ``fit`` called again: the weights of one run, bit for bit."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys

import lightning
import pytest
import torch
from lightning import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

import grpo_lightning as grpo
from grpo_lightning.distributed.signals import Preempted
from tests.kills import difference
from tests.support.composed import ROOT
from tests.support.running import SMALL, contents, letters, same, small_run, weights
from tests.test_compose import ROWS
from tests.test_compose import SMALL as SHORT

SETTINGS = (
    *("steps=5", "data.prompts_per_step=4", "rollout.group_size=4", "data.validation_size=6", "validation.every=2"),
)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


@pytest.mark.slow
def test_a_loop_of_ones_own_makes_the_steps_of_the_trainer(tmp_path):
    settings = [*SHORT[1:], "steps=3", "data.validation_size=4", "schedule=linear", "rollout.max_new_tokens=36"]
    trained = grpo.compose(*settings, run_dir=tmp_path).fit()
    run = grpo.compose(*settings, "validation.every=2", run_dir=tmp_path / "own")
    loader = run.module and run.data.train_dataloader()
    metrics = []
    for _ in range(2):  # each time up to a validation
        metrics += [run.module.train_step(prompts) for prompts in loader]
        assert "val/pass@1" in run.validate()  # which changes nothing
    assert len(metrics) == run.module.completed_steps == 3
    assert same(weights(run.module), weights(trained.module))
    assert metrics[-1]["reward/total"] == trained.metrics["reward/total"]
    assert metrics[-1]["optim/lr"] == trained.metrics["optim/lr"] < metrics[0]["optim/lr"]


def test_a_loop_of_ones_own_has_precision_and_columns(tmp_path):
    seen, norms = [], []

    def right(completions, answer):
        seen.extend(answer)
        return [float(len(set(text))) for text in completions]

    for precision in ("32-true", "bf16-mixed"):
        run = grpo.compose(*SHORT, f"trainer.precision={precision}", run_dir=tmp_path, reward=right, data=ROWS)
        norms.append(run.module.train_step(["one", "two"], answer=["x", "y"])["optim/grad_norm"])
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.3)
    assert seen == 2 * (["x"] * 4 + ["y"] * 4)


SCRIPT = """
import sys
import lightning, torch
import grpo_lightning as grpo

if __name__ == "__main__":
    kind, directory, *settings = sys.argv[1:]
    run = grpo.compose(*settings, run_dir=directory)
    several = {"strategy": kind, "devices": 2} if kind != "one" else {"devices": 1}
    trainer = lightning.Trainer(accelerator="cpu", logger=False, default_root_dir=directory, **several)
    trainer.fit(run.module, datamodule=run.data)
    if trainer.is_global_zero:
        torch.save([run.module.policy.state_dict(), run.module.metrics], f"{directory}/result.pt")
"""


def run_script(directory, text, *words):
    directory.mkdir(exist_ok=True)
    (directory / "script.py").write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", *words]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_trainer_of_ones_own_gives_one_processs_weights(tmp_path):
    run = grpo.compose(*SETTINGS, "+optimizer.eps=1e-7", run_dir=tmp_path / "run").fit()
    found = {}
    for name, kind in (("one", "one"), ("two", "ddp_find_unused_parameters_true")):
        run_script(tmp_path / name, SCRIPT, kind, str(tmp_path / name), *SETTINGS, "+optimizer.eps=1e-7")
        found[name], metrics = torch.load(tmp_path / name / "result.pt", weights_only=True)
        assert metrics["val/pass@1"] == run.metrics["val/pass@1"]
    alone, two = found["one"], found["two"]
    assert same(alone, weights(run.module))
    gap = torch.stack([(two[name] - alone[name]).norm() for name in alone]).norm()
    assert gap < 1e-6 * torch.stack([value.norm() for value in alone.values()]).norm()


@pytest.mark.slow
def test_a_trainer_of_ones_own_resumes(tmp_path):
    settings, plain = [*SETTINGS, "schedule=constant"], QUIET | {"default_root_dir": tmp_path}
    whole = grpo.compose(*settings, run_dir=tmp_path / "a")
    lightning.Trainer(**plain).validate(whole.module, datamodule=whole.data)  # which changes nothing
    lightning.Trainer(**plain).fit(whole.module, datamodule=whole.data)
    part = grpo.compose(*settings, "steps=3", run_dir=tmp_path / "b")
    trainer = lightning.Trainer(**plain)
    trainer.fit(part.module, datamodule=part.data)
    trainer.save_checkpoint(tmp_path / "at3.ckpt")
    rest = grpo.compose(*settings, run_dir=tmp_path / "c")
    lightning.Trainer(**plain).fit(rest.module, datamodule=rest.data, ckpt_path=tmp_path / "at3.ckpt")
    assert rest.module.completed_steps == 5
    assert same(weights(rest.module), weights(whole.module))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fit", "validate", "export", "preflight"])
def test_a_run_fits_validates_exports_and_previews_in_any_order(first, tmp_path, caplog):
    whole = grpo.compose(*SHORT, "data.validation_size=4", run_dir=tmp_path / "whole").fit()
    for second, third in itertools.product(("fit", "validate", "export", "preflight"), repeat=2):
        run = grpo.compose(*SHORT, "data.validation_size=4", "preflight.prompts=2", run_dir=tmp_path / second / third)
        for name in (first, second, third):
            getattr(run, name)()
        assert run.module.completed_steps == (2 if "fit" in (first, second, third) else 0)
        assert "training goes on" not in caplog.text
        assert "fit" not in (first, second, third) or same(weights(run.module), weights(whole.module))


@pytest.mark.slow
def test_a_module_has_the_weights_of_its_checkpoint(tmp_path):
    trained = small_run(tmp_path / "run", "optimizer.lr=0.1", "policy.seed=3")
    path = (tmp_path / "run" / "checkpoints" / "last.ckpt").rename(tmp_path / "step 1, (copy).ckpt")
    module = grpo.compose(f"checkpoint='{path}'").module
    assert same(weights(module), weights(trained))
    ids = module.policy.model.generate(torch.tensor([module.policy.tokenizer.encode("Spell")]), max_new_tokens=5)
    expected = trained.policy.model.generate(ids[:, :-5], max_new_tokens=5)
    assert module.policy.tokenizer.decode(ids[0, -5:]) == trained.policy.tokenizer.decode(expected[0, -5:])
    words = [word for word in SMALL if not word.startswith("policy")]
    goes_on = grpo.compose(*words, f"checkpoint='{path}'", "steps=2", run_dir=tmp_path / "on")
    assert goes_on.module.completed_steps == 0
    assert goes_on.fit().module.completed_steps == 2


@pytest.mark.slow
def test_a_look_at_two_batches_is_no_validation(tmp_path):
    class Watch(Callback):
        def on_train_start(self, trainer, module):
            self.seen = module.validated_at, "val/pass@1" in module.metrics

    watch = Watch()
    run = grpo.compose(*SETTINGS, "data.validation_batch_size=2", run_dir=tmp_path)
    trainer = lightning.Trainer(**QUIET, callbacks=[watch], default_root_dir=tmp_path, max_epochs=-1)
    trainer.fit(run.module, datamodule=run.data)
    assert watch.seen == (-1, False)
    assert run.module.validated_at == 5


@pytest.mark.slow
def test_trainers_that_would_end_early_or_read_checkpoints_themselves_are_refused(tmp_path, monkeypatch):
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):  # that Lightning sets, and leaves
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda strategy: None)
    for options, message in (
        ({"max_steps": 3}, "trainer.max_steps=3"),
        ({"max_epochs": 2}, "trainer.max_epochs=2"),
        ({"strategy": ModelParallelStrategy()}, "trainer.strategy=ModelParallelStrategy"),
    ):
        run = grpo.compose(*SETTINGS, run_dir=tmp_path)
        trainer = lightning.Trainer(**QUIET, default_root_dir=tmp_path, **options)
        with pytest.raises(ValueError, match=message):
            trainer.fit(run.module, datamodule=run.data, ckpt_path=tmp_path if "strategy" in options else None)


AGAIN = [
    *(word for word in SMALL if not word.startswith(("reward", "steps", "data.train", "validation"))),
    *("steps=6", "data.validation_size=4", "validation.every=3", "optimizer.lr=0.01", "logger=[csv,tensorboard]"),
]


class Failing:
    """A reward that raises when it is called for the ``bad``-th time, once; or Ctrl-C is pressed at the -``bad``-th."""

    def __init__(self, bad=0):
        self.calls, self.bad = 0, bad

    def __call__(self, completions, **_):
        self.calls += 1
        if self.calls == self.bad:
            raise RuntimeError("the network is away")
        if self.calls == -self.bad:
            signal.raise_signal(signal.SIGINT)
        return letters(completions)


def logged_of(directory):
    """The rows of metrics.csv, of which what a clock measures is left out."""
    with (directory / "csv" / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_fit_called_again_continues_what_failed_and_leaves_what_has_finished(tmp_path):
    """A call for each step, and for the validations before the first and after the third; Ctrl-C if negative."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        whole = grpo.compose(*AGAIN, run_dir=tmp_path / "whole", reward=Failing(), data=ROWS).fit()
        files, metrics = contents(tmp_path / "whole"), dict(whole.metrics)
        assert whole.fit() is whole
        assert contents(tmp_path / "whole") == files
        assert whole.metrics == metrics
        for bad, made, message in ((8, 5, "the network is away"), (-3, 1, "^interrupted: step 1 is saved")):
            place = tmp_path / f"run{bad}"
            run = grpo.compose(*AGAIN, run_dir=place, reward=Failing(bad), data=ROWS)
            with pytest.raises((RuntimeError, ValueError, Preempted), match=message):
                run.fit()
            assert run.module.completed_steps == made
            seconds = json.loads((place / "summary.json").read_text())["seconds"]
            run.fit()
            assert same(weights(run.module), weights(whole.module))
            assert logged_of(place) == logged_of(tmp_path / "whole")
            summary = json.loads((place / "summary.json").read_text())
            assert (summary["status"], summary["steps"]) == ("finished", 6)
            assert summary["seconds"] > seconds
            ended = [torch.load(p / "checkpoints/last.ckpt", weights_only=True) for p in (tmp_path / "whole", place)]
            assert len(ended[0]["optimizer_states"][0]["state"]) > 5
            assert difference(ended[0]["optimizer_states"], ended[1]["optimizer_states"]) is None
    finally:
        signal.signal(signal.SIGINT, before)
