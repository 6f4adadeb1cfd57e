"""Which checkpoint a run starts from, what it returns to a sweep, and what it says of changed settings."""

import json
import shutil

import pytest
import torch

from grpo_lightning.checkpoint.resume import config_diff, find_checkpoint
from grpo_lightning.run import Run
from tests.support.composed import build, composed
from tests.support.running import SMALL, small_run


def config(**changed):
    return {"checkpoint": None, "mode": "fit", "sweep_metric": "val/pass@1", "trainer": {}} | changed


def test_no_checkpoint_starts_anew_but_not_over_an_old_run(tmp_path):
    assert find_checkpoint(config(), tmp_path, directory_given=True) is None
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    with pytest.raises(ValueError, match=r"already holds a run: checkpoint=last continues it"):
        find_checkpoint(config(), tmp_path, directory_given=True)
    assert find_checkpoint(config(mode="preflight"), tmp_path, directory_given=True) is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run of two steps."""
    place = tmp_path_factory.mktemp("finished") / "run"
    small_run(place, "steps=2", "validation.every=2")
    return place


def contents(place):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in place.rglob("*") if path.is_file()}


def test_a_run_that_is_there_is_what_is_meant(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    told = r"holds a run: checkpoint=last takes its policy, and checkpoint=null the one that the settings name$"
    for mode in ("export", "validate"):
        with pytest.raises(ValueError, match=told):
            small_run(tmp_path, f"mode={mode}")
    with pytest.raises(ValueError, match=told):
        find_checkpoint(
            config(mode="export"), tmp_path, directory_given=True, overrides=["policy.path=mine", "checkpoints=1"]
        )
    assert {path: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    for mode, words in (
        ("validate", ["policy.path=mine"]),
        ("validate", ["policy=gpt2"]),
        ("export", ["checkpoint=null"]),
    ):
        assert find_checkpoint(config(mode=mode), tmp_path, directory_given=True, overrides=words) is None
    shutil.move(tmp_path / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "my own.ckpt")
    (tmp_path / "checkpoints" / "best.ckpt").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="holds a run"):
        find_checkpoint(config(mode="export"), tmp_path, directory_given=True)


def test_a_directory_of_checkpoints_is_none(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("best.ckpt", "last.ckpt"):
        (tmp_path / "checkpoints" / name).touch()
        told = f"^checkpoint={tmp_path} is a directory of checkpoints: name one of them, checkpoint="
        with pytest.raises(ValueError, match=f"{told}{tmp_path}/checkpoints/{name}$"):
            find_checkpoint(config(checkpoint=f"{tmp_path}"), tmp_path / "run", directory_given=True)


def test_last_is_the_run_directorys_own(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"name the run to continue with hydra.run.dir="):
        find_checkpoint(config(checkpoint="last"), tmp_path, directory_given=False)
    assert find_checkpoint(config(checkpoint="last"), tmp_path, directory_given=True) is None
    assert "starting from the beginning" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint=last: there is no .*last.ckpt"):
        find_checkpoint(config(checkpoint="last", mode="export"), tmp_path, directory_given=True)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    torch.save({"step": {"completed": 1}}, last)
    assert find_checkpoint(config(checkpoint="last"), tmp_path, directory_given=True) == last


def test_a_refused_start_loses_nothing_of_the_run_that_is_there(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "other")
    before = contents(finished)
    for overrides in ((), (f"checkpoint={tmp_path}/other/checkpoints/best.ckpt",)):
        with pytest.raises(ValueError, match="already holds"):
            small_run(finished, *overrides)
    assert contents(finished) == before


def test_a_named_checkpoint_is_a_local_file(tmp_path):
    torch.save({"step": {"completed": 1}}, tmp_path / "some.ckpt")
    assert (
        find_checkpoint(config(checkpoint=str(tmp_path / "some.ckpt")), tmp_path, directory_given=True)
        == tmp_path / "some.ckpt"
    )
    with pytest.raises(ValueError, match=r"checkpoint=absent.ckpt: no such file"):
        find_checkpoint(config(checkpoint="absent.ckpt"), tmp_path, directory_given=True)
    with pytest.raises(ValueError, match=r"checkpoint=https://x/y.ckpt is not a local file"):
        find_checkpoint(config(checkpoint="https://x/y.ckpt"), tmp_path, directory_given=True)


def test_changed_settings_are_named():
    then, now = composed(), composed("optimizer.lr=0.5", "steps=7", "run_dir=/elsewhere", "+loss.extra=1")
    changed = {key: (one, other) for key, one, other in config_diff(then, now)}
    assert changed["optimizer.lr"] == (then["optimizer"]["lr"], 0.5)
    assert changed["loss.extra"] == (None, 1)
    assert not {key for key in changed if key.startswith(("steps", "run_dir", "callbacks"))}
    assert config_diff(then, composed()) == []
    assert config_diff(then, composed("trusted=[x]")) == []


def test_a_broken_setting_stops_before_anything_is_loaded_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.data.PromptData.load", lambda *_: pytest.fail("data was loaded"))
    with pytest.raises(ValueError, match="rollout.group_size=1"):
        small_run(tmp_path / "new", "rollout.group_size=1")
    assert not (tmp_path / "new").exists()


def test_a_reward_without_its_column_stops_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.loading.LlamaForCausalLM", lambda *_: pytest.fail("weights were made"))
    monkeypatch.setattr("tests.support.rewards.vowels", lambda completions, colour: [0.0] * len(completions))
    with pytest.raises(ValueError, match="colour"):
        small_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_finished_run_has_nothing_to_continue(finished, caplog, monkeypatch):
    caplog.set_level("INFO")
    before = contents(finished)
    monkeypatch.setattr("grpo_lightning.data.PromptData.load", lambda *_: pytest.fail("data was loaded"))
    for steps in ("steps=2", "steps=1"):
        arguments = [*SMALL, "validation.every=2", f"run_dir={finished}", "checkpoint=last", steps]
        again = Run(composed(*arguments), build(*arguments), overrides=[], directory_given=True)
        assert again.execute() == json.loads((finished / "summary.json").read_text())["metrics"]["val/pass@1"]
        assert caplog.text.count(f"{finished} has made its 2 steps: steps=N continues it") == 1
        caplog.clear()
    assert contents(finished) == before


def test_a_run_that_was_killed_after_its_last_step_is_exported_later(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "export")
    (tmp_path / "summary.json").unlink()
    small_run(tmp_path, "steps=2", "validation.every=2", "checkpoint=last")
    assert (tmp_path / "export" / "config.json").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_seconds_and_steps_add_up_over_restarts(tmp_path, monkeypatch):
    def summary():
        return json.loads((tmp_path / "summary.json").read_text())

    small_run(tmp_path, "steps=1")
    last = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert 0 < content["run"]["seconds"] <= summary()["seconds"]
    content["run"]["seconds"] = 500.0
    torch.save(content, last)
    small_run(tmp_path, "steps=2", "checkpoint=last")
    assert 500 < summary()["seconds"] < 600
    assert 500 < torch.load(last, weights_only=True)["run"]["seconds"] < 600
    (tmp_path / "summary.json").write_text(json.dumps(summary() | {"seconds": 900.0}))
    monkeypatch.setattr("lightning.Trainer.fit", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small_run(tmp_path, "steps=3", "checkpoint=last")
    assert summary()["steps"] == 2
    assert 900 < summary()["seconds"] < 1000
    old = torch.load(last, weights_only=True)
    del old["run"]["seconds"]  # as version 0.1 wrote it
    torch.save(old, last)
    (tmp_path / "summary.json").unlink()
    monkeypatch.undo()
    small_run(tmp_path, "steps=3", "checkpoint=last")
    assert summary()["seconds"] < 100


@pytest.mark.slow
def test_an_optimizer_step_reads_the_seed_of_the_run(tmp_path):
    one, same, other = (
        small_run(tmp_path / name, f"seed={seed}", "policy.seed=0", "optimizer.lr=0.01")
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    states = [torch.cat([p.flatten() for p in module.policy.parameters()]) for module in (one, same, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert one.metrics["reward/total"] == same.metrics["reward/total"] != other.metrics["reward/total"]


def test_between_versions_only_values_that_both_have_are_compared():
    then = {"rollout": {"_target_": "old.collector", "group_size": 8, "gone": 1}, "seed": 0}
    now = {"rollout": {"_target_": "new.Collector", "group_size": 4, "added": 2}, "seed": 0}
    assert config_diff(then, now, same_version=False) == [("rollout.group_size", 8, 4)]
    assert [key for key, _, _ in config_diff(then, now)] == [
        "rollout._target_",
        "rollout.added",
        "rollout.gone",
        "rollout.group_size",
    ]
