"""A run: which checkpoint it starts from, what it says and keeps, and that no file of the user's is lost."""

import json
import math
import shutil
import sys

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import grpo_lightning as grpo
from grpo_lightning.callbacks.checkpoint import check_replaceable
from grpo_lightning.checkpoint.resume import EVENTS_SUFFIX, find_checkpoint
from grpo_lightning.run import Run
from tests.support.board import scalars
from tests.support.composed import build, composed
from tests.support.running import SMALL, contents, letters, small_module, small_run


def find(directory, given=True, overrides=(), **changed):
    config = {"checkpoint": None, "mode": "fit", "sweep_metric": "val/pass@1", "trainer": {}} | changed
    return find_checkpoint(config, directory, directory_given=given, overrides=overrides)


def summary(directory):
    return json.loads((directory / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run of two steps."""
    place = tmp_path_factory.mktemp("finished") / "run"
    small_run(place, "steps=2", "validation.every=2")
    return place


def test_which_checkpoint_a_run_starts_from(tmp_path, caplog):
    assert find(tmp_path) is None
    with pytest.raises(ValueError, match=r"name the run to continue with hydra.run.dir="):
        find(tmp_path, given=False, checkpoint="last")
    assert find(tmp_path, checkpoint="last") is None
    assert "starting from the beginning" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint=last: there is no .*last.ckpt"):
        find(tmp_path, checkpoint="last", mode="export")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "best.ckpt").touch()
    torch.save({"step": {"completed": 1}}, folder / "last.ckpt")
    assert find(tmp_path, checkpoint="last") == folder / "last.ckpt"
    with pytest.raises(ValueError, match=r"already holds a run: checkpoint=last continues it"):
        find(tmp_path)
    assert find(tmp_path, mode="preflight") is None
    with pytest.raises(ValueError, match=f"^checkpoint={tmp_path} is a directory of checkpoints"):
        find(tmp_path / "run", checkpoint=f"{tmp_path}")
    assert find(tmp_path / "run", checkpoint=str(folder / "last.ckpt")) == folder / "last.ckpt"
    for named in ("absent.ckpt", "https://x/y.ckpt"):
        with pytest.raises(ValueError, match=f"checkpoint={named}: no such file"):
            find(tmp_path, checkpoint=named)


def test_a_run_that_is_there_is_what_is_meant(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path / "export")
    told = "holds a run: checkpoint=last takes its policy, and checkpoint=null the one that the settings name$"
    for mode in ("export", "validate"):
        with pytest.raises(ValueError, match=told):
            small_run(tmp_path, f"mode={mode}")
    with pytest.raises(ValueError, match=told):
        find(tmp_path, mode="export", overrides=["policy.path=mine", "checkpoints=1"])
    assert contents(tmp_path / "export") == before
    for mode, word in (
        ("validate", "policy.path=mine"),
        ("validate", "policy=hf"),
        ("export", "checkpoint=null"),
    ):
        assert find(tmp_path, mode=mode, overrides=[word]) is None


def test_a_refused_start_loses_nothing_and_loads_nothing(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "other")
    before = contents(finished)
    for overrides in ((), (f"checkpoint={tmp_path}/other/checkpoints/best.ckpt",)):
        with pytest.raises(ValueError, match="already holds"):
            small_run(finished, *overrides)
    assert contents(finished) == before
    monkeypatch.setattr("grpo_lightning.policy.loading.LlamaForCausalLM", lambda *_: pytest.fail("weights were made"))
    monkeypatch.setattr("tests.support.rewards.vowels", lambda completions, colour: [0.0] * len(completions))
    with pytest.raises(ValueError, match="colour"):  # the data has no such column
        small_run(tmp_path / "column")
    assert summary(tmp_path / "column")["status"] == "failed"
    monkeypatch.setattr("grpo_lightning.data.PromptData.load", lambda *_: pytest.fail("data was loaded"))
    with pytest.raises(ValueError, match="rollout.group_size=1"):
        small_run(tmp_path / "new", "rollout.group_size=1")
    assert not (tmp_path / "new").exists()


def test_a_finished_run_has_nothing_to_continue(finished, caplog, monkeypatch):
    caplog.set_level("INFO")
    before = contents(finished)
    monkeypatch.setattr("grpo_lightning.data.PromptData.load", lambda *_: pytest.fail("data was loaded"))
    for steps in ("steps=2", "steps=1"):
        arguments = [*SMALL, "validation.every=2", f"run_dir={finished}", "checkpoint=last", steps]
        again = Run(composed(*arguments), build(*arguments), overrides=[], directory_given=True)
        assert again.execute() == summary(finished)["metrics"]["val/pass@1"]
        assert caplog.text.count(f"{finished} has made its 2 steps: steps=N continues it") == 1
        caplog.clear()
    assert contents(finished) == before


def test_a_run_that_was_killed_after_its_last_step_is_exported_later(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "export")
    (tmp_path / "summary.json").unlink()
    small_run(tmp_path, "steps=2", "validation.every=2", "checkpoint=last")
    assert (tmp_path / "export" / "config.json").exists()
    assert summary(tmp_path)["steps"] == 2


def test_a_sweep_always_gets_a_finite_number(tmp_path, caplog):
    arguments = [*SMALL, f"run_dir={tmp_path}", "sweep_metric=reward/format", "mode=validate"]
    run = Run(composed(*arguments), build(*arguments), overrides=[], directory_given=True)
    assert run.execute() == -sys.float_info.max  # a validation measures val/reward/format
    assert "sweep_metric=reward/format was not measured" in caplog.text


@pytest.mark.slow
def test_seconds_and_steps_add_up_over_restarts(tmp_path, monkeypatch):
    small_run(tmp_path, "steps=1")
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert 0 < content["run"]["seconds"] <= summary(tmp_path)["seconds"]
    content["run"]["seconds"] = 500.0
    torch.save(content, last)
    small_run(tmp_path, "steps=2", "checkpoint=last")
    assert 500 < summary(tmp_path)["seconds"] < 600
    assert 500 < torch.load(last, weights_only=True)["run"]["seconds"] < 600
    (tmp_path / "summary.json").write_text(json.dumps(summary(tmp_path) | {"seconds": 900.0}))
    monkeypatch.setattr("lightning.Trainer.fit", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(tmp_path, "steps=3", "checkpoint=last")
    assert summary(tmp_path)["steps"] == 2
    assert 900 < summary(tmp_path)["seconds"] < 1000


@pytest.mark.slow
def test_changed_settings_and_data_are_listed_once_each(tmp_path, caplog):
    def warnings():
        return [record.getMessage() for record in caplog.records if record.name.endswith("resume")]

    small_run(tmp_path / "run")
    changed = ["trainer.precision=bf16-mixed", "reward.format.weight=0.3", "optimizer.lr=0.5", "steps=2"]
    caplog.clear()
    small_run(tmp_path / "run", *changed, "checkpoint=last")
    (told,) = warnings()
    assert told.splitlines() == [
        "settings that have changed since the checkpoint was written:",
        "  optimizer.lr was 0.001 and is 0.5 now, which is ignored: a continued run keeps its optimizer",
        "  reward.format.weight was 0.1 and is 0.3 now",
        "  trainer.precision was 32-true and is bf16-mixed now",
    ]
    rows = [{"prompt": f"{number} a", "answer": str(number)} for number in range(60)]
    words = [word for word in SMALL if not word.startswith(("reward", "data.t"))]
    for name, now, count in (("same", rows, 0), ("fewer", rows[:40], 36), ("other", [*rows[1:], rows[0]], 56)):
        grpo.compose(*words, run_dir=tmp_path / name, reward=letters, data=rows).fit()
        caplog.clear()
        again = ("steps=2", "checkpoint=last")
        grpo.compose(*words, *again, run_dir=tmp_path / name, reward=letters, data=now).fit()
        told = f"56 training and 4 held-out prompts then, {count} and 4 now, or other rows"
        assert [told in one for one in warnings()] == [True] * (now is not rows)


def test_damaged_weights_name_the_step_and_what_to_try(tmp_path):
    with pytest.raises(FloatingPointError, match="logits are not finite") as error:
        small_run(tmp_path, "optimizer.lr=1e38", "steps=9", "validation.every=9", "module.max_grad_norm=1.5")
    for text in ("in the rollout after step ", "optimizer.lr", "module.max_grad_norm"):
        assert text in str(error.value)
    module = small_module()
    with torch.no_grad():
        next(module.policy.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"in the rollout before any step, .* not finite; .*policy.path"):
        module.train_step(["a", "b"])


def test_a_directory_with_more_than_an_export_is_not_replaced(tmp_path):
    export = tmp_path / "export"
    assert check_replaceable(export) == export
    export.mkdir()
    assert check_replaceable(export) == export
    (export / "README.md").write_text("Post-trained with grpo-lightning 0.2.0")
    (export / "model.safetensors").write_text("")
    assert check_replaceable(export) == export
    (tmp_path / "link").symlink_to(export)
    assert check_replaceable(tmp_path / "link") == tmp_path / "link"
    (export / ".git").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for place in (export, tmp_path / "mine", tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(ValueError, match=f"callbacks.export.directory={place}"):
            check_replaceable(place)


@pytest.mark.slow
def test_a_new_run_removes_no_foreign_logs(tmp_path):
    def logged(directory, step, suffix=""):
        before = set(directory.rglob("*"))
        writer = SummaryWriter(str(directory), filename_suffix=suffix)
        writer.add_scalar("x", 1.0, step)
        writer.close()
        return next(path for path in directory.rglob("events*") if path not in before)

    logs = tmp_path / "tensorboard"
    foreign = [logged(logs, 1), logged(logs / "exp1", 1), logged(logs / "exp2", 1, EVENTS_SUFFIX)]
    killed = logged(logs, 7, EVENTS_SUFFIX)  # of a run that was killed before its first checkpoint
    before = {path: path.read_bytes() for path in foreign}
    small_run(tmp_path, "steps=1")
    assert not killed.exists()
    small_run(tmp_path / "two", "steps=2", f"checkpoint={tmp_path}/checkpoints/last.ckpt")
    small_run(tmp_path, "steps=2", "checkpoint=last")
    assert {path: path.read_bytes() for path in before} == before
    steps = [step for step, _ in scalars(logs)["reward/total"]]
    assert sorted(steps) == [1, 2]  # files of the same second are read in any order
