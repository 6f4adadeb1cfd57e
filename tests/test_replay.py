"""Recorded rollouts scored, compared and weighed again: what was logged comes out, and other settings by hand."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import grpo_lightning as grpo
from grpo_lightning import recording
from grpo_lightning.replay.__main__ import main, replay
from tests.support.composed import ROOT
from tests.support.processes import finish, start
from tests.support.running import SMALL

COMMON = (
    *(word for word in SMALL if not word.startswith("reward")),
    *("reward=[keyword,format]", "reward.keyword.function.words=[a,e,x,y,A,E]", "reward.format.weight=0.3"),
    *("steps=3", "callbacks=rollouts", "logger=none", "optimizer.lr=0.01", "validation.every=3"),
)
EXACT = {
    "dr_grpo in several micro-batches": ("algorithm=dr_grpo", "module.microbatch_tokens=70"),
    "a penalty and numbers that vary": (
        *("rollout.kl_penalty=0.1", "rollout.top_entropy=0.5"),
        "loss.kl_coef={_target_: grpo_lightning.schedule.Proportional, start: 0.1, metric: policy/entropy, "
        "target: 3.0, rate: 0.1}",
    ),
    "a correction": ("correction=token_truncation", "correction.cap=1.0"),
    "every reward by itself": (
        "advantage=gdpo",
        "reward.format.weight={_target_: grpo_lightning.schedule.Linear, start: 1.0, end: 0.0, steps: 3}",
    ),
}


def recorded(place, *overrides):
    grpo.compose(*COMMON, *overrides, run_dir=place).fit()
    return place


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("first"))


def metrics(place, *overrides, step=2):
    [found] = json.loads(replay(place, overrides, steps=str(step), form="json"))["steps"]
    return {name: (one["recorded"], one["replayed"]) for name, one in found["metrics"].items()}, found


def test_what_was_logged_comes_out(first, capsys):
    main([str(first)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "mean of 3 rollouts, steps 1 to 3"
    assert printed.splitlines()[-1] == "all 51 values without a mark are what was logged, but for rounding"
    assert max(map(len, printed.splitlines())) <= 80
    assert "*" not in printed
    found, _ = metrics(first)
    assert {name for name in found if name.startswith("loss/")} == {"loss/total", "loss/policy", "loss/kl"}
    assert found["loss/kl"][0] > 0
    assert all(now == pytest.approx(then, rel=1e-5, abs=1e-6) for then, now in found.values())
    assert all(then == now for name, (then, now) in found.items() if not name.startswith("loss/"))
    header = recording.read_header(first / "rollouts" / recording.file_name(2))
    assert found["loss/total"][0] == header["updated"]["loss/total"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_so_it_does_with_other_settings(name, tmp_path):
    place = recorded(tmp_path, *EXACT[name])
    assert replay(place, []).splitlines()[-1].endswith("are what was logged, but for rounding")


@pytest.mark.slow
def test_what_cannot_come_out_is_marked_with_its_reason(tmp_path):
    place = recorded(tmp_path / "two", "module.ppo_epochs=2", "module.minibatch_size=4")
    printed = replay(place, [])
    assert "loss/total *" in printed
    assert "\n* at ratio 1; logged is the mean of 4 optimizer steps\n" in printed
    assert printed.endswith("but for rounding")
    place = recorded(tmp_path / "dapo", "algorithm=dapo", "rollout.outcome=keyword", "rollout.threshold=0.3")
    printed = replay(place, [])
    assert "of the completions trained on; logged is that of all that were sampled" in printed
    assert printed.endswith("but for rounding")


def test_another_algorithm_and_other_rewards_worked_by_hand(first):
    given = [
        "algorithm=dr_grpo",
        "reward=[keyword,length]",
        "reward.length.function.target=3",
        "rollout.max_new_tokens=12",
    ]
    found, told = metrics(first, *given)
    assert told["computed_anew"] == ["length"]
    _, rows = recording.read(first / "rollouts" / recording.file_name(2))
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


def test_a_weight_alone_calls_no_reward(first):
    found, told = metrics(first, "reward.format.weight=2.0", "loss.kl_coef=0.08")
    assert told["computed_anew"] == []
    then, now = found["loss/kl"]
    assert now == pytest.approx(2 * then, rel=1e-6)
    _, rows = recording.read(first / "rollouts" / recording.file_name(2))
    total = sum(row["rewards"]["keyword"] + 2 * row["rewards"]["format"] for row in rows) / 8
    assert found["reward/total"][1] == pytest.approx(total)


def test_programs_get_every_rollout_by_itself(first):
    steps = json.loads(replay(first, ["algorithm=dr_grpo"], steps="2:3", form="json"))["steps"]
    assert [one["step"] for one in steps] == [2, 3]
    assert steps[0]["metrics"].keys() == steps[1]["metrics"].keys()


REFUSED = {
    "no directory": ([], "none", "none is not there"),
    "no rollouts": ([], "empty", "empty has no recorded rollouts; a run with callbacks=rollouts records them"),
    "steps that were not recorded": (["--steps", "7:9"], "", "--steps 7:9: recorded are 1 to 3"),
    "steps that are no numbers": (
        ["--steps", "a:b"],
        "",
        "--steps a:b: allowed is FIRST:LAST, such as 10:50, or one step",
    ),
    "a value that is not allowed": (["advantage.eps=-1"], "", "advantage.eps=-1: allowed is a number >= 0"),
    "a reward that there is not": (["reward=[nope]"], "", "reward=[…,nope]: allowed is one of accuracy"),
    "code of elsewhere": (
        ["reward=[custom]", "reward.custom.function._target_=os.system"],
        "",
        "reward.custom.function._target_=os.system",
    ),
    "a file that is damaged": (["--steps", "2"], "damaged", "000002.jsonl.gz is damaged"),
    "settings that are not there": ([], "bare", "bare has no .hydra/overrides.yaml, which says how its run was set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_said_in_a_sentence(name, first, tmp_path, monkeypatch, capsys):
    words, place, told = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for copy in ("damaged", "bare"):
        (tmp_path / copy / "rollouts").mkdir(parents=True)
        for path in (first / "rollouts").iterdir():
            whole = path.read_bytes()
            (tmp_path / copy / "rollouts" / path.name).write_bytes(whole[:-30] if copy == "damaged" else whole)
    (tmp_path / "damaged" / ".hydra").mkdir()
    (tmp_path / "damaged" / ".hydra" / "overrides.yaml").write_bytes((first / ".hydra" / "overrides.yaml").read_bytes())
    with pytest.raises(SystemExit) as ended:
        main([place or str(first), *words])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_kl_term_needs_a_recorded_reference(first, tmp_path):
    place = tmp_path / "rollouts"
    place.mkdir()
    shutil.copytree(first / ".hydra", tmp_path / ".hydra")
    header, rows = recording.read(first / "rollouts" / recording.file_name(1))
    recording.write(place / recording.file_name(1), [header | {"reference": False}, *rows])
    with pytest.raises(ValueError, match="loss.kl_coef=0.04: allowed is 0: no log-probabilities of a reference were"):
        replay(tmp_path, [])
    assert "loss/total" in replay(tmp_path, ["loss.kl_coef=0"])


@pytest.mark.slow
def test_several_processes_record_once_and_what_they_logged_comes_out(tmp_path):
    own = [word for word in COMMON if not word.startswith("trainer")]
    finish(start(2, tmp_path, "ddp", {"two": [*own, "algorithm=grpo"]}))
    place = tmp_path / "two"
    _, rows = recording.read(place / "rollouts" / recording.file_name(2))
    assert all("logprobs" in row for row in rows)
    (place / ".hydra").mkdir()
    (place / ".hydra" / "overrides.yaml").write_text(json.dumps(own))
    assert replay(place, []).splitlines()[-1] == "all 51 values without a mark are what was logged, but for rounding"


def test_the_command_answers_at_once_where_there_is_nothing_to_replay(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "grpo_lightning.replay", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert " torch\n" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("has no recorded rollouts; a run with callbacks=rollouts records them")


@pytest.mark.slow
def test_a_reward_in_a_file_of_the_working_directory_is_found(first, tmp_path):
    (tmp_path / "replayed_mine.py").write_text("def score(completions, **_):\n    return [0.25 for _ in completions]\n")
    words = ["reward=[custom]", "reward.custom.function._target_=replayed_mine.score", "reward.custom.timeout=20"]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lightning.replay", str(first), *words],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"reward/custom +- +0\.25\b", done.stdout)
