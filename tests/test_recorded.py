"""Recorded rollouts of real runs: trained on again bitwise, replayed as logged and by hand, refused in a sentence."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from lightning import Callback

import grpo_lightning as grpo
from grpo_lightning import recording
from grpo_lightning.replay import main, replay, replay_table
from grpo_lightning.reward.format import tag_count
from tests.support.processes import finish, start
from tests.support.running import SMALL

COMMON = (
    *(word for word in SMALL if not word.startswith("reward")),
    *("reward=[keyword,format]", "reward.keyword.function.words=[a,e,x,y,A,E]", "reward.format.weight=0.3"),
    *("steps=4", "callbacks=rollouts", "logger=none", "optimizer.lr=0.01", "validation.every=4"),
)
SETTINGS = {
    "two epochs of minibatches": ("module.ppo_epochs=2", "module.minibatch_size=4", "schedule=linear"),
    "groups carried over": ("algorithm=dapo", "data.prompts_per_step=3", "rollout.threshold=0.3"),
    "a penalty, truncated rows, few tokens, a correction and scheduled numbers": (
        *("rollout.kl_penalty=0.1", "rollout.mask_truncated=true", "rollout.top_entropy=0.5"),
        *("advantage=gdpo", "module.microbatch_tokens=70", "correction=token_truncation", "correction.cap=1.0"),
        "loss.kl_coef={_target_: grpo_lightning.schedule.Proportional, start: 0.1, metric: policy/entropy, "
        "target: 3.0, rate: 0.1}",
        "reward.format.weight={_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.0, steps: 4}",
        "rollout.temperature={_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.7, steps: 4}",
    ),
}
EQUAL = r"(\d+) of \1 values without ~ equal those logged, up to rounding$"


def trained(place, *overrides):
    run = grpo.compose(*COMMON, *overrides, run_dir=place)
    run.fit()
    return run.module


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
    return place, trained(place)


def test_training_on_recorded_rollouts_is_bitwise_the_recorded_run(first, tmp_path):
    place, module = first
    copy = trained(tmp_path, *again(place))
    assert torch.equal(weights(copy), weights(module))
    assert measured(copy) == measured(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_so_it_is_with_other_settings_and_what_was_logged_is_replayed(name, tmp_path):
    one = trained(tmp_path / "one", *SETTINGS[name])
    files = recording.recorded_steps(tmp_path / "one" / "rollouts")
    fresh = all(recording.read(path)[0]["fresh"] for path in files.values())
    assert fresh == (name != "groups carried over")
    text = replay_table(replay(tmp_path / "one"))
    assert re.search(EQUAL, text), text
    assert ("logged is the mean of 4 optimizer steps" in text) == (name == "two epochs of minibatches")
    assert ("logged is that of all that were sampled" in text) == (name == "groups carried over")
    other = trained(tmp_path / "other", *again(tmp_path / "one", *SETTINGS[name]))
    assert torch.equal(weights(one), weights(other))
    assert measured(one) == measured(other)
    for step, path in files.items():
        assert recording.read(path)[1] == recording.read(tmp_path / "other" / "rollouts" / path.name)[1], step


class Break(Callback):
    """Ends the run in step 4, once the rollout of step 3 was recorded; the first time that it comes there."""

    def on_train_batch_start(self, trainer, module, *_):
        mark = Path(trainer.default_root_dir) / "broken"
        if module.completed_steps == 3 and not mark.exists():
            mark.touch()
            raise RuntimeError("broken")


@pytest.mark.slow
def test_a_killed_run_leaves_the_same_files_when_it_is_continued(first, tmp_path):
    whole, module = first
    broken = ("callbacks.checkpoint.every=2", "+callbacks.break._target_=tests.test_recorded.Break")
    with pytest.raises(RuntimeError, match="broken"):
        trained(tmp_path, *broken)
    place = tmp_path / "rollouts"
    assert list(recording.recorded_steps(place)) == [1, 2, 3]  # the checkpoint is of step 2
    (place / recording.file_name(3)).write_bytes(b"of a step that is made again")
    (place / recording.file_name(9)).write_bytes(b"of a step that is not made again")
    (place / f".{recording.file_name(3)}.4711").write_bytes(b"half")
    trained(tmp_path, broken[0], "checkpoint=last")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        path.name: path.read_bytes() for path in (whole / "rollouts").iterdir()
    }
    with pytest.raises(RuntimeError, match="broken"):
        trained(tmp_path / "again", *broken, *again(tmp_path))
    resumed = trained(tmp_path / "again", broken[0], *again(tmp_path), "checkpoint=last")
    assert torch.equal(weights(resumed), weights(module))


@pytest.mark.slow
def test_rewards_are_computed_again_where_asked(first, tmp_path):
    place, module = first
    same = trained(tmp_path / "same", *again(place, "rollout.rescore=true"))
    assert torch.equal(weights(same), weights(module))
    assert measured(same) == measured(module)
    other = again(place, "rollout.rescore=true", "reward=[keyword,format,length]", "reward.length.function.target=3")
    trained(tmp_path / "other", *other)
    _, rows = recording.read(tmp_path / "other" / "rollouts" / recording.file_name(1))
    # 1 up to three characters, 0 from six on
    expected = [min(1, max(0, 2 - len(row["completion"]) / 3)) for row in rows]
    assert [row["rewards"]["length"] for row in rows] == pytest.approx(expected)
    assert any(row["rewards"]["length"] not in (0, 1) for row in rows)


def test_few_rollouts_are_recorded_unless_asked_and_a_full_disk_ends_no_run(first, tmp_path, caplog, monkeypatch):
    trained(tmp_path / "few", "callbacks=default", "callbacks.rollouts.every=2", "steps=5")
    assert list(recording.recorded_steps(tmp_path / "few" / "rollouts")) == [1, 2, 4]

    def full(path, lines):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "write", full)
    assert torch.equal(weights(trained(tmp_path)), weights(first[1]))
    assert caplog.text.count("was not recorded") == 1


REFUSED = (
    ("rollout.path=none", "rollout.path=none: none is not there"),
    ("rollout.path=empty", "has no rollout of step 1; there are none"),
    ("rollout.path=gaps", "has no rollout of step 3; there are 3 from 1 to 4"),
    ("steps=6", "has no rollout of step 5; there are 4 from 1 to 4"),
    ("rollout.temperature=0.9", "rollout.temperature=0.9"),
    ("reward.format.weight=0.2", "reward.format.weight=0.2"),
    ("reward=[keyword,format,length]", "reward=[keyword,format,length]"),
)


def test_what_cannot_be_trained_on_is_refused(first, tmp_path, monkeypatch):
    place, _ = first
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(place / "rollouts", tmp_path / "gaps")
    (tmp_path / "gaps" / recording.file_name(3)).unlink()
    for number, (override, message) in enumerate(REFUSED):
        with pytest.raises(ValueError, match=re.escape(message)):
            trained(f"run_{number}", *again(place, override), override)


def metrics(place, *overrides, step=2):
    [found] = replay(place, overrides, steps=range(step, step + 1))
    return {name: tuple(one.values()) for name, one in found.metrics.items()}, found.computed_again


def test_what_was_logged_is_replayed(first, capsys):
    place, _ = first
    main([str(place)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 rollouts, steps 1 to 4"
    assert re.fullmatch(EQUAL, lines[-1])[1] == "68"
    assert max(map(len, lines)) <= 80
    found, _ = metrics(place)
    assert {name for name in found if name.startswith("loss/")} == {"loss/total", "loss/policy", "loss/kl"}
    assert found["loss/kl"][0] > 0
    assert all(now == pytest.approx(then, rel=1e-5, abs=1e-6) for then, now in found.values())
    assert all(then == now for name, (then, now) in found.items() if not name.startswith("loss/"))
    header, _ = recording.read(place / "rollouts" / recording.file_name(2))
    assert found["loss/total"][0] == header["updated"]["loss/total"]
    main([str(place), "algorithm=dr_grpo", "--steps", "2:3", "--format", "json"])
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["steps"]] == [2, 3]


def test_another_algorithm_and_other_rewards_are_replayed_by_hand(first):
    place, _ = first
    given = ["algorithm=dr_grpo", "reward=[keyword,length]", "reward.length.function.target=3"]
    found, called = metrics(place, *given, "rollout.max_new_tokens=12")
    assert called == ["length"]
    _, rows = recording.read(place / "rollouts" / recording.file_name(2))
    length = [min(1.0, max(0.0, 2 - len(row["completion"]) / 3)) for row in rows]
    total = [row["rewards"]["keyword"] + 0.1 * one for row, one in zip(rows, length)]
    assert found["reward/length"] == (None, pytest.approx(sum(length) / 8))
    assert found["reward/total"][1] == pytest.approx(sum(total) / 8)
    assert found["reward/keyword"][0] == found["reward/keyword"][1]
    means = [sum(total[:4]) / 4] * 4 + [sum(total[4:]) / 4] * 4
    advantages = [value - mean for value, mean in zip(total, means)]
    spread = (sum(a * a for a in advantages) / 7) ** 0.5
    assert found["advantage/std"][1] == pytest.approx(spread, rel=1e-4)
    # Dr. GRPO: every token weighs 1 / (8 completions x 12 tokens), the ratio is 1, and there is no KL term
    loss = -sum(a * len(row["ids"]) for a, row in zip(advantages, rows)) / (8 * 12)
    assert found["loss/policy"][1] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert found["loss/total"][1] == found["loss/policy"][1]
    assert found["loss/kl"][0] > 0
    assert found["loss/kl"][1] is None


def test_tags_that_the_prompt_has_opened_count_as_written(tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[-1].content }}:<think>")
    settings = [word for word in COMMON if not word.startswith("policy")]
    template = f"policy.chat_template={tmp_path}/template.jinja"
    grpo.compose(*settings, "policy=tiny", template, "steps=2", run_dir=tmp_path).fit()
    found, called = metrics(tmp_path, "reward=[tag_count]")
    _, rows = recording.read(tmp_path / "rollouts" / recording.file_name(2))
    assert called == ["tag_count"]
    assert (
        found["reward/tag_count"][1] == sum(tag_count(["<think>" + row["completion"]])[0] for row in rows) / 8 >= 0.25
    )


NOT_REPLAYED = (
    ("empty", [], "empty has no such recorded rollouts; there are none (callbacks=rollouts records them)"),
    ("", ["--steps", "7:9"], "has no such recorded rollouts; there are 4 from 1 to 4"),
    ("", ["advantage.eps=-1"], "advantage.eps=-1"),
    ("", ["reward=[custom]", "reward.custom.function._target_=os.system"], "reward.custom.function._target_=os.system"),
    ("no_reference", [], "loss.kl_coef=0.04 needs log-probabilities of a reference"),
    ("bare", [], "bare has no .hydra/overrides.yaml"),
)


def test_what_cannot_be_replayed_is_said_in_a_sentence(first, tmp_path, monkeypatch, capsys):
    place, _ = first
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(place / ".hydra", tmp_path / "no_reference" / ".hydra")
    for copy in ("no_reference", "bare"):
        shutil.copytree(place / "rollouts", tmp_path / copy / "rollouts")
    for path in (tmp_path / "no_reference" / "rollouts").iterdir():
        header, rows = recording.read(path)
        recording.write(path, [header | {"reference": False}, *rows])
    for directory, words, message in NOT_REPLAYED:
        with pytest.raises(SystemExit) as end:
            main([directory or str(place), *words])
        printed = capsys.readouterr()
        assert (end.value.code, printed.out) == (1, "")
        assert message in printed.err
        assert "Traceback" not in printed.err
    assert "loss/total" in replay(tmp_path / "no_reference", ["loss.kl_coef=0"])[0].metrics


@pytest.mark.slow
def test_several_processes_record_once(tmp_path):
    own = [word for word in COMMON if not word.startswith("trainer")]
    finish(start(2, tmp_path, "ddp", {"two": [*own, "algorithm=grpo"]}))
    place = tmp_path / "two"
    _, rows = recording.read(place / "rollouts" / recording.file_name(2))
    assert all("logprobs" in row for row in rows)
    (place / ".hydra").mkdir()
    (place / ".hydra" / "overrides.yaml").write_text(json.dumps(own))
    assert re.search(EQUAL, replay_table(replay(place)))
