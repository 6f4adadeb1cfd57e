"""Which checkpoint a run starts from, what it returns to a sweep, and what it says of changed settings."""

import json
import sys

import pytest
import torch

from grpo_lightning.checkpoint.io import module_state
from grpo_lightning.checkpoint.resume import chosen, differences
from grpo_lightning.run import sweep_value
from tests.support.composed import composed
from tests.support.running import small_run


def config(**changed):
    return {"checkpoint": None, "mode": "fit", "sweep_metric": "val/pass@1", "trainer": {}} | changed


def test_no_checkpoint_starts_anew_but_not_over_an_old_run(tmp_path):
    assert chosen(config(), tmp_path, directory_given=True) is None
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    with pytest.raises(ValueError, match=r"already holds a run: checkpoint=last continues it"):
        chosen(config(), tmp_path, directory_given=True)
    assert chosen(config(mode="validate"), tmp_path, directory_given=True) is None


def test_last_is_the_run_directorys_own(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"name the run to continue with hydra.run.dir="):
        chosen(config(checkpoint="last"), tmp_path, directory_given=False)
    assert chosen(config(checkpoint="last"), tmp_path, directory_given=True) is None
    assert "starting from the beginning" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint=last: there is no .*last.ckpt"):
        chosen(config(checkpoint="last", mode="export"), tmp_path, directory_given=True)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    assert chosen(config(checkpoint="last"), tmp_path, directory_given=True) == last


def test_a_refused_start_loses_nothing_of_the_run_that_is_there(tmp_path):
    small_run(tmp_path / "a")
    small_run(tmp_path / "b")
    before = {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()}
    for overrides in ((), (f"checkpoint={tmp_path}/a/checkpoints/best.ckpt",)):
        with pytest.raises(ValueError, match="already holds"):
            small_run(tmp_path / "b", *overrides)
    assert {path: path.read_bytes() for path in (tmp_path / "b").rglob("*") if path.is_file()} == before


def test_a_named_checkpoint_is_a_local_file(tmp_path):
    (tmp_path / "some.ckpt").touch()
    assert (
        chosen(config(checkpoint=str(tmp_path / "some.ckpt")), tmp_path, directory_given=True) == tmp_path / "some.ckpt"
    )
    with pytest.raises(ValueError, match=r"checkpoint=absent.ckpt: no such file"):
        chosen(config(checkpoint="absent.ckpt"), tmp_path, directory_given=True)
    with pytest.raises(ValueError, match=r"checkpoint=https://x/y.ckpt: allowed is a local file"):
        chosen(config(checkpoint="https://x/y.ckpt"), tmp_path, directory_given=True)


@pytest.mark.parametrize(
    "metrics, expected",
    [({"val/pass@1": 0.5}, 0.5), ({}, -sys.float_info.max), ({"val/pass@1": float("nan")}, -sys.float_info.max)],
)
def test_a_sweep_always_gets_a_finite_number(metrics, expected):
    assert sweep_value(metrics, config()) == expected


def test_changed_settings_are_named():
    then, now = composed(), composed("optimizer.lr=0.5", "steps=7", "run_dir=/elsewhere", "+loss.extra=1")
    changed = {key: (one, other) for key, one, other in differences(then, now)}
    assert changed["optimizer.lr"] == (then["optimizer"]["lr"], 0.5)
    assert changed["loss.extra"] == (None, 1)
    assert not {key for key in changed if key.startswith(("steps", "run_dir", "callbacks"))}
    assert differences(then, composed()) == []


def test_a_broken_setting_stops_before_anything_is_loaded_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.data.PromptData.load", lambda *_: pytest.fail("data was loaded"))
    with pytest.raises(ValueError, match="rollout.group_size=1"):
        small_run(tmp_path / "new", "rollout.group_size=1")
    assert not (tmp_path / "new").exists()


def test_a_reward_without_its_column_stops_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.policy.scratch.character_llama", lambda **_: pytest.fail("weights were made"))
    monkeypatch.setattr("tests.support.rewards.vowels", lambda completions, colour: [0.0] * len(completions))
    with pytest.raises(ValueError, match="colour"):
        small_run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_an_optimizer_step_reads_the_seed_of_the_run(tmp_path):
    one, same, other = (
        small_run(tmp_path / name, f"seed={seed}", "policy.seed=0", "optimizer.lr=0.01")
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    states = [torch.cat([p.flatten() for p in module.policy.parameters()]) for module in (one, same, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert one.metrics["reward/total"] == same.metrics["reward/total"] != other.metrics["reward/total"]


def test_sampling_from_another_distribution_is_said(tmp_path, caplog):
    small_run(tmp_path / "free", "steps=1")
    assert "another distribution" not in caplog.text
    small_run(tmp_path / "cut", "rollout.top_p=0.9")
    assert "rollout.top_p=0.9, top_k=0, min_p=0.0 sample another distribution" in caplog.text


def test_a_checkpoint_of_version_0_1_says_the_same_in_other_words():
    old = {
        "grpo": {
            "adapted": {
                "rollout.judge.rewards.format.weight": 2.0,
                "rollout.sampling.temperature": 0.5,
                "loss.kl_coef": 1,
            },
            "surplus": {"right": [True]},
        }
    }
    assert module_state(old) == {
        "varying": {"reward.format.weight": 2.0, "rollout.temperature": 0.5, "loss.kl_coef": 1},
        "carried": {"right": [True]},
    }
    new = {"grpo": {"varying": {"loss.kl_coef": 1}, "carried": None}}
    assert module_state(new) == new["grpo"]
    assert module_state({}) == {"varying": {}, "carried": None}  # supervised training leaves nothing


def test_between_versions_only_values_that_both_have_are_compared():
    then = {"rollout": {"_target_": "old.collector", "group_size": 8, "gone": 1}, "seed": 0}
    now = {"rollout": {"_target_": "new.Collector", "group_size": 4, "added": 2}, "seed": 0}
    assert differences(then, now, same_version=False) == [("rollout.group_size", 8, 4)]
    assert [key for key, _, _ in differences(then, now)] == [
        "rollout._target_",
        "rollout.added",
        "rollout.gone",
        "rollout.group_size",
    ]
