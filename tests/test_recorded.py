"""Training on recorded rollouts: bitwise the run that recorded them, or a sentence that says why not."""

import shutil

import pytest
import torch
from lightning import Callback

from grpo_lightning import recording
from grpo_lightning.config import ConfigError
from tests.support.running import small_run

COMMON = ("steps=4", "callbacks=rollouts", "logger=none", "optimizer.lr=0.01", "validation.every=4")
RUNS = {
    "two epochs of minibatches": ("module.ppo_epochs=2", "module.minibatch_size=4", "schedule=linear"),
    "groups carried over": ("algorithm=dapo", "reward=[custom]", "data.prompts_per_step=3"),
    "a penalty, truncated rows and few tokens": (
        *("rollout.kl_penalty=0.1", "rollout.mask_truncated=true", "rollout.top_entropy=0.5"),
        "loss.kl_coef={_target_: grpo_lightning.schedule.Proportional, start: 0.1, metric: policy/entropy, "
        "target: 3.0, rate: 0.1}",
    ),
    "scores and weights that vary": (
        *("advantage=gdpo", "algorithm=dr_grpo", "advantage=gdpo"),
        "reward.format.weight={_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.0, steps: 4}",
        "rollout.temperature={_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.7, steps: 4}",
    ),
}


def again(path, *overrides):
    """The settings that train on what the run in ``path`` has recorded."""
    return (*overrides, "rollout=recorded", f"rollout.path={path}")


def weights(module):
    return torch.cat([value.flatten() for value in module.policy.state_dict().values()])


def measured(module):
    return {name: value for name, value in module.metrics.items() if not name.startswith(("time/", "perf/"))}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    place = tmp_path_factory.mktemp("first")
    return place, small_run(place, *COMMON)


def test_the_weights_are_bitwise_those_of_the_recorded_run(first, tmp_path):
    place, module = first
    trained = small_run(tmp_path, *COMMON, *again(place))
    assert torch.equal(weights(trained), weights(module))
    assert measured(trained) == measured(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_so_they_are_with_other_settings(name, tmp_path):
    one = small_run(tmp_path / "one", *COMMON, *RUNS[name])
    headers = [recording.read_header(path) for path in recording.recorded_steps(tmp_path / "one" / "rollouts").values()]
    assert any(not header["fresh"] for header in headers) == (name == "groups carried over")
    other = small_run(tmp_path / "other", *COMMON, *again(tmp_path / "one", *RUNS[name]))
    assert torch.equal(weights(one), weights(other))
    assert measured(one) == measured(other)
    for step, path in recording.recorded_steps(tmp_path / "one" / "rollouts").items():
        then, now = recording.read(path), recording.read(tmp_path / "other" / "rollouts" / path.name)
        assert then[1] == now[1], step


class Break(Callback):
    """Ends the run in step 4, once the rollout of step 3 was recorded."""

    def on_train_batch_start(self, trainer, module, *_):
        if module.completed_steps == 3:
            raise RuntimeError("broken")


@pytest.mark.slow
def test_a_run_that_was_broken_off_and_continued_leaves_the_same_files(first, tmp_path):
    whole, module = first
    broken = (*COMMON, "callbacks.checkpoint.every=2")
    with pytest.raises(RuntimeError, match="broken"):
        small_run(tmp_path, *broken, "+callbacks.break._target_=tests.test_recorded.Break")
    place = tmp_path / "rollouts"
    assert list(recording.recorded_steps(place)) == [1, 2, 3]  # the checkpoint is of step 2
    (place / recording.file_name(3)).write_bytes(b"of a step that is made again")
    (place / recording.file_name(9)).write_bytes(b"of a step that is not made again")
    (place / f".{recording.file_name(3)}.4711").write_bytes(b"half")
    small_run(tmp_path, *broken, "checkpoint=last")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in (whole / "rollouts").iterdir()
    }
    trained = small_run(tmp_path / "again", *COMMON, *again(tmp_path))
    assert torch.equal(weights(trained), weights(module))


@pytest.mark.slow
def test_training_on_recorded_rollouts_goes_on_where_it_was_broken_off(first, tmp_path):
    place, module = first
    broken = (*COMMON, "callbacks.checkpoint.every=2", *again(place))
    with pytest.raises(RuntimeError, match="broken"):
        small_run(tmp_path, *broken, "+callbacks.break._target_=tests.test_recorded.Break")
    assert torch.equal(weights(small_run(tmp_path, *broken, "checkpoint=last")), weights(module))


@pytest.mark.slow
def test_few_rollouts_are_recorded_unless_asked(tmp_path):
    small_run(tmp_path, "steps=5", "logger=none", "validation.every=5", "callbacks.rollouts.every=2")
    assert list(recording.recorded_steps(tmp_path / "rollouts")) == [1, 2, 4]


@pytest.mark.slow
def test_another_policy_is_trained_with_the_true_ratio(first, tmp_path, caplog):
    place, _ = first
    module = small_run(tmp_path, *COMMON, *again(place, "policy.seed=1"))
    assert "sampled by another policy than the one that is trained" in caplog.text
    assert module.metrics["policy/ratio_max"] > 1.001
    # the same policy, which moves otherwise
    caplog.clear()
    module = small_run(tmp_path / "rate", *COMMON, *again(place, "optimizer.lr=0.02"))
    assert "another policy" not in caplog.text
    assert module.metrics["policy/ratio_max"] > 1.001


@pytest.mark.slow
def test_rewards_are_computed_anew_where_asked(first, tmp_path):
    place, module = first
    same = small_run(tmp_path / "same", *COMMON, *again(place, "rollout.rescore=true"))
    assert torch.equal(weights(same), weights(module))
    assert measured(same) == measured(module)
    other = again(place, "rollout.rescore=true", "reward=[custom,length]", "reward.length.function.target=3")
    small_run(tmp_path / "other", *COMMON, *other)
    _, rows = recording.read(tmp_path / "other" / "rollouts" / recording.file_name(1))
    lengths = [len(row["completion"]) for row in rows]
    # 1 up to three characters, 0 from six on
    assert [row["rewards"]["length"] for row in rows] == pytest.approx([min(1, max(0, 2 - n / 3)) for n in lengths])
    assert any(row["rewards"]["length"] not in (0, 1) for row in rows)


REFUSED = {
    "a path that is not there": ("rollout.path=none", "rollout.path=none: none is not there"),
    "a run without rollouts": ("rollout.path=empty", "there are no recorded rollouts in empty; callbacks=rollouts"),
    "steps that are missing": (
        "rollout.path=gaps",
        "steps=4 needs the rollouts of steps 1 to 4; there are 1 to 2, 4, and not 3 (callbacks.rollouts.every=1",
    ),
    "too many steps": ("steps=6", "needs the rollouts of steps 1 to 6; there are 1 to 4, and not 5 to 6"),
    "a damaged file": ("rollout.path=damaged", "000002.jsonl.gz is damaged"),
    "another number of prompts": (
        "data.prompts_per_step=3",
        "data.prompts_per_step=3 is not what was recorded; allowed is 2",
    ),
    "a flag that is none": ("rollout.rescore=3", "rollout.rescore=3: allowed is true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_on_is_said_before_anything_loads(name, first, tmp_path, monkeypatch):
    place, _ = first
    override, told = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for copy in ("gaps", "damaged"):
        shutil.copytree(place / "rollouts", tmp_path / copy)
    (tmp_path / "gaps" / recording.file_name(3)).unlink()
    path = tmp_path / "damaged" / recording.file_name(2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError) as error:
        small_run(tmp_path / "run", *COMMON, *again(place, override), override)
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_train_on_what_it_writes(first, tmp_path):
    place, _ = first
    shutil.copytree(place / "rollouts", tmp_path / "rollouts")
    with pytest.raises(ConfigError, match="allowed is the directory of another run"):
        small_run(tmp_path, *COMMON, *again(tmp_path))
    assert len(recording.recorded_steps(tmp_path / "rollouts")) == 4


@pytest.mark.parametrize(
    "override, told",
    [
        ("rollout.temperature=0.9", "rollout.temperature=0.9: allowed is 1.0, that of"),
        ("reward.format.weight=0.2", "reward.format.weight=0.2: allowed is 0.1, as in"),
        ("reward=[custom]", r"reward=\[custom\]: allowed is 'reward=\[custom,format\]', as in"),
    ],
    ids=lambda value: value.split("=")[0],
)
def test_what_was_recorded_otherwise_than_set_is_refused(override, told, first, tmp_path):
    place, _ = first
    with pytest.raises(ValueError, match=told):
        small_run(tmp_path, *COMMON, *again(place, override))


def test_a_rollout_that_cannot_be_written_ends_no_run(first, tmp_path, caplog, monkeypatch):
    _, module = first

    def full(path, lines):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "write", full)
    found = small_run(tmp_path, *COMMON)
    assert torch.equal(weights(found), weights(module))
    assert caplog.text.count("was not recorded") == 1
    assert "the rollout of step 1 was not recorded ([Errno 28] No space left on device)" in caplog.text
