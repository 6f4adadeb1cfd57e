"""Recorded rollouts scored, compared and weighed again: what was logged comes out, and other settings by hand."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import grpo_lightning as grpo
from grpo_lightning import start as starting
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.recording import files
from grpo_lightning.replay.__main__ import main, replay
from tests.support.composed import ROOT
from tests.support.processes import finish, start
from tests.support.provocations import provocation
from tests.support.running import SMALL

COMMON = (
    *(word for word in SMALL if not word.startswith(("reward", "trusted"))),
    *("reward=[keyword,format]", "reward.keyword.function.words=[a,e,x,y,A,E]", "reward.format.weight=0.3"),
    *("steps=3", "callbacks=rollouts", "logger=none", "optimizer.lr=0.01", "validation.every=3"),
)
EXACT = {
    "dr_grpo in several micro-batches": ("algorithm=dr_grpo", "module.microbatch_tokens=70"),
    "a penalty and numbers that vary": (
        *("rollout.kl_penalty=0.1", "rollout.top_entropy=0.5"),
        "loss.kl_coef={_target_: grpo_lightning.varying.Proportional, start: 0.1, metric: policy/entropy, target: 3.0, "
        "rate: 0.1}",
    ),
    "a correction": ("correction=token_truncation", "correction.cap=1.0"),
    "every reward by itself": (
        "advantage=gdpo",
        "reward.format.weight={_target_: grpo_lightning.varying.Linear, start: 1.0, end: 0.0, steps: 3}",
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


def test_what_was_logged_comes_out_bit_for_bit(first, capsys):
    main([str(first)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "mean of 3 rollouts, steps 1 to 3"
    assert printed.splitlines()[-1] == "all 51 values without a mark are what was logged, bit for bit"
    assert max(map(len, printed.splitlines())) <= 80
    assert "*" not in printed
    found, _ = metrics(first)
    assert {name for name in found if name.startswith("loss/")} == {"loss/total", "loss/policy", "loss/kl"}
    assert found["loss/kl"][0] > 0
    assert all(then == now for then, now in found.values())
    header = files.header(first / "rollouts" / files.file_name(2))
    assert found["loss/total"][0] == header["updated"]["loss/total"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_so_it_does_with_other_settings(name, tmp_path):
    place = recorded(tmp_path, *EXACT[name])
    if "micro-batches" in name:
        headers = map(files.header, files.steps(place / "rollouts").values())
        assert any(len(header["microbatches"][0]) > 1 for header in headers)
    assert replay(place, []).splitlines()[-1].endswith("are what was logged, bit for bit")


@pytest.mark.slow
def test_what_cannot_come_out_is_marked_with_its_reason(tmp_path):
    place = recorded(tmp_path / "two", "module.ppo_epochs=2", "module.minibatch_size=4")
    printed = replay(place, [])
    assert "loss/total *" in printed
    assert "\n* at ratio 1; logged is the mean of 4 optimizer steps\n" in printed
    assert printed.endswith("bit for bit")
    place = recorded(tmp_path / "dapo", "algorithm=dapo", "rollout.outcome=keyword", "rollout.threshold=0.3")
    printed = replay(place, [])
    assert "of the completions trained on; logged is that of all that were sampled" in printed
    assert printed.endswith("bit for bit")


def test_another_algorithm_and_other_rewards_worked_by_hand(first):
    given = [
        "algorithm=dr_grpo",
        "reward=[keyword,length]",
        "reward.length.function.target=3",
        "rollout.max_new_tokens=12",
    ]
    found, told = metrics(first, *given)
    assert told["computed_anew"] == ["length"]
    _, rows = files.read(first / "rollouts" / files.file_name(2))
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
    _, rows = files.read(first / "rollouts" / files.file_name(2))
    total = sum(row["rewards"]["keyword"] + 2 * row["rewards"]["format"] for row in rows) / 8
    assert found["reward/total"][1] == pytest.approx(total)


def test_programs_get_every_rollout_by_itself(first):
    lines = list(csv.DictReader(io.StringIO(replay(first, ["algorithm=dr_grpo"], steps="2:3", form="csv"))))
    assert {line["step"] for line in lines} == {"2", "3"}
    by_json, _ = metrics(first, "algorithm=dr_grpo", step=3)
    by_csv = {one["metric"]: (one["recorded"], one["replayed"]) for one in lines if one["step"] == "3"}
    assert by_csv.keys() == by_json.keys()
    for name, pair in by_csv.items():
        assert tuple(float(value) if value else None for value in pair) == by_json[name], name


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
        "reward.custom.function._target_=os.system: allowed are parts of this package",
    ),
    "a file that is damaged": (["--steps", "2"], "damaged", "000002.jsonl.gz is damaged"),
    "a name that settings give a meaning": ([], "${x}", "${x}: allowed is a directory without ${ in its name"),
    "settings that are a link": ([], "linked", "overrides.yaml is by a link a file elsewhere; allowed is a run's own"),
    "rollouts that are a link": ([], "led", "led/rollouts is by a link a place elsewhere; allowed are a run's own"),
    "a rollout that is a link": ([], "part", "000002.jsonl.gz is by a link a place elsewhere; allowed are a run's own"),
    "settings that are not there": ([], "bare", "bare has no .hydra/overrides.yaml, which says how its run was set"),
}


@provocation("rollouts are replayed that are not there, damaged or set wrongly", "one sentence, no traceback")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_said_in_a_sentence(name, first, tmp_path, monkeypatch, capsys):
    words, place, told = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for copy in ("damaged", "bare", "${x}"):
        (tmp_path / copy / "rollouts").mkdir(parents=True)
        for path in (first / "rollouts").iterdir():
            whole = path.read_bytes()
            (tmp_path / copy / "rollouts" / path.name).write_bytes(whole[:-30] if copy == "damaged" else whole)
    (tmp_path / "damaged" / ".hydra").mkdir()
    (tmp_path / "damaged" / ".hydra" / "overrides.yaml").write_bytes((first / ".hydra" / "overrides.yaml").read_bytes())
    for copy, part, mine in (("linked", ".hydra/overrides.yaml", "rollouts"), ("led", "rollouts", ".hydra")):
        (tmp_path / copy).mkdir()
        shutil.copytree(first / mine, tmp_path / copy / mine)
        (tmp_path / copy / part).parent.mkdir(exist_ok=True)
        (tmp_path / copy / part).symlink_to(first / part)
    shutil.copytree(first, tmp_path / "part")
    (tmp_path / "part" / "rollouts" / "000002.jsonl.gz").unlink()
    (tmp_path / "part" / "rollouts" / "000002.jsonl.gz").symlink_to(first / "rollouts" / "000002.jsonl.gz")
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
    header, rows = files.read(first / "rollouts" / files.file_name(1))
    files.write(place / files.file_name(1), [header | {"reference": False}, *rows])
    with pytest.raises(ValueError, match="loss.kl_coef=0.04: allowed is 0: no log-probabilities of a reference were"):
        replay(tmp_path, [])
    assert "loss/total" in replay(tmp_path, ["loss.kl_coef=0"])


@pytest.mark.slow
def test_several_processes_record_once_and_what_they_logged_comes_out(tmp_path):
    own = [word for word in COMMON if not word.startswith("trainer")]
    finish(start(2, tmp_path, "ddp", {"two": [*own, "algorithm=grpo"]}))
    place = tmp_path / "two"
    header = files.header(place / "rollouts" / files.file_name(2))
    assert sorted(row for own in header["microbatches"] for batch in own for row in batch) == list(range(8))
    assert [bool(own) for own in header["microbatches"]] == [True, True]
    (place / ".hydra").mkdir()
    (place / ".hydra" / "overrides.yaml").write_text(json.dumps(own))
    assert replay(place, []).splitlines()[-1] == "all 51 values without a mark are what was logged, bit for bit"


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


@provocation(
    "a replay with a reward in a file of the user's, beside which a folder of the same name, or one called like a "
    "library that is not installed, was unpacked",
    "the file is found in the working directory, also by `python -P -m`, and the folder is not taken for it",
)
@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-P"], []], ids=["-P", "plain"])
def test_a_file_of_the_working_directory_is_found(flags, tmp_path):
    grpo.compose(*COMMON, "steps=1", run_dir=tmp_path / "run").fit()
    (tmp_path / "run" / ".hydra").mkdir(exist_ok=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text(json.dumps([*COMMON]))
    (tmp_path / "replayed_mine.py").write_text("def score(completions, **_):\n    return [0.25 for _ in completions]\n")
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("open('HIT', 'w')\n")
    words = ["reward=[custom]", "reward.custom.function._target_=replayed_mine.score", "reward.custom.timeout=20"]

    def replayed(*more):
        return subprocess.run(
            [sys.executable, *flags, "-m", "grpo_lightning.replay", "run", *words, *more],
            cwd=tmp_path,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
        )

    done = replayed("trusted_settings=true")
    assert done.returncode == 0, done.stderr
    assert re.search(r"reward/custom +- +0\.25\b", done.stdout)
    if flags:
        assert not (tmp_path / "HIT").exists()
        return
    done = replayed()
    assert done.returncode == 1
    assert "_target_=replayed_mine.score: this code may be given what settings of run say; if you know" in done.stderr
    (tmp_path / "replayed_mine").mkdir()
    (tmp_path / "replayed_mine" / "__init__.py").write_text("open('HIT', 'w')\n\n\ndef score(completions):\n    pass\n")
    done = replayed("trusted_settings=true")
    assert done.returncode == 1
    assert "replayed_mine.py have the same name; allowed is one of them" in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation("a stranger's run directory is replayed whose overrides trust or name code", "refused by its key")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["reward.keyword.function.words=['\\${oc.create:{_target_: os.getcwd}}']"],
            "stands in the run's settings; allowed",
        ),
        (["reward.model.function.trust_remote_code=true"], "trust_remote_code=true stands in the run's settings"),
        (["trusted=[numpy]", "reward.format.function._target_=numpy.load"], "numpy.load stands in the run's settings"),
    ],
)
def test_what_a_run_has_trusted_is_not_trusted(words, told, tmp_path):
    own = ["reward=[format,keyword,model]", "reward.keyword.function.words=[a]", "reward.model.function.path=x", *words]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(own))

    def scored():
        config, build = recalled(tmp_path, [], ["reward"])
        build("reward", config["reward"])

    with pytest.raises(ValueError, match=re.escape(told)):
        scored()


@provocation(
    "a stranger's run directory is replayed whose overrides name a file that has come with it",
    "refused by its key, unless the command says `trusted_settings=true`",
)
@pytest.mark.slow
def test_files_that_come_with_a_run_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "shared"
    (run / ".hydra").mkdir(parents=True)
    own = ["reward=[custom]", "reward.custom.function._target_=shared.evil.score"]
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(own))
    (run / "evil.py").write_text("open('HIT', 'w')\n\n\ndef score(completions):\n    return [1.0]\n")

    def scored(*words):
        config, build = recalled(run, words, ["reward"])
        build("reward", config["reward"])

    others = ("task_name=shared.evil", "tags=[unshared.evil]")
    for words in ((), ("loss.kl_coef=0.1",), ("reward.custom.weight=2",), *((word,) for word in others)):
        with pytest.raises(
            ValueError, match=r"shared\.evil\.score stands in the run's settings; allowed there are choices"
        ):
            scored(*words)
    assert not (tmp_path / "HIT").exists()
    named = "reward.custom.function._target_=shared.evil.score"  # a word of the user's
    (tmp_path / "mine.py").write_text((run / "evil.py").read_text())
    for word in (named, "reward.custom.function._target_=mine.score"):
        with pytest.raises(ValueError, match=r"this code may be given what settings of .*/shared say; if you know"):
            scored(word)
    assert not (tmp_path / "HIT").exists()
    scored("trusted_settings=true")
    (tmp_path / "HIT").unlink()
    scored("reward.custom.function._target_=mine.score", "trusted_settings=true")
    assert (tmp_path / "HIT").exists()


def _built(run, words):
    config, build = recalled(run, words, ["reward"])
    return build("reward", config["reward"])


@provocation(
    "a stranger's run directory is replayed with a function of the user's own file, of which the run's overrides name "
    "another member, such as a kind of `subprocess.Popen`, or give one a `directory` elsewhere or arguments by place",
    "refused by its key",
)
@pytest.mark.slow
def test_a_run_has_files_of_the_users_do_what_brought_settings_may(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "START", tmp_path)
    run = tmp_path / "theirs" / "run"
    (run / ".hydra").mkdir(parents=True)
    (tmp_path / "replayed_file.py").write_text(
        "import subprocess\n\n\nclass Tool(subprocess.Popen):\n    pass\n\n\nclass Logged:\n"
        "    def __init__(self, directory='scored'):\n        pass\n\n    def __call__(self, completions):\n"
        "        return [1.0]\n\n\ndef score(completions):\n    return [1.0]\n"
    )
    reward = "{_target_: grpo_lightning.reward.Weighted, weight: 1.0, function: {_target_: replayed_file.%s%s}}"
    mine = [f"+reward.own={reward % ('score', ', _partial_: true')}"]
    for name, more in (
        ("Tool", ", args: [touch, HIT]"),
        ("Logged", ", directory: ../elsewhere"),
        ("Logged", ", _args_: [../elsewhere]"),
        ("Logged", ""),
        ("score", ", _partial_: true"),
    ):
        (run / ".hydra" / "overrides.yaml").write_text(json.dumps([f"+reward.mine={reward % (name, more)}"]))
        with pytest.raises(
            ValueError, match=rf"replayed_file\.{name}.* stands in the run's settings; allowed there are"
        ):
            _built(run, mine)
    _built(run, [*mine, "trusted_settings=true"])
    assert not (tmp_path / "HIT").exists()
