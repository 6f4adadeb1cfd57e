"""Settings that a command brings along by --config-dir or hydra.searchpath, with files of Python beside them."""

import os
import sys

import pytest

import grpo_lightning as grpo
from grpo_lightning.composition import CONF
from grpo_lightning.composition.hydra_settings import problems
from grpo_lightning.settings import ConfigError, brought, trust
from tests.support.provocations import provocation
from tests.test_attacks import begun

TINY = ("steps=1", "data.prompts_per_step=4", "rollout.group_size=4", "data.validation_size=4", "logger=[]")
SCORE = "open('HIT', 'a').close()\n\n\ndef score(completions):\n    return [float(len(text)) for text in completions]\n"
REWARD = (
    "reward:\n  custom:\n    _target_: grpo_lightning.reward.Weighted\n    weight: 1.0\n"
    "    function: {_target_: NAME.score, _partial_: true}\n"
)
THEIRS = f"# @package _global_\n{REWARD}".replace("NAME", "bundle.evil")
OWN = f"defaults: [train, _self_]\n{REWARD}".replace("NAME", "bundle.evil")
FOUND = f"hydra.searchpath=[file://{CONF}]"
HYDRA = "# @package _global_\nhydra: {callbacks: {x: {_target_: bundle.evil.score, completions: [a]}}}\n"
EXPERIMENT = "bundle/experiment/theirs.yaml"
CASES = {
    "a directory": (("--config-dir", "bundle", "experiment=theirs"), EXPERIMENT, THEIRS),
    "a search path": (("hydra.searchpath=[file://bundle]", "experiment=theirs"), EXPERIMENT, THEIRS),
    "a file": (("--config-dir", "bundle", "--config-name", "own"), "bundle/own.yaml", OWN),
    "a path": (("--config-path", "HERE/bundle", "--config-name", "own", FOUND), "bundle/own.yaml", OWN),
    "beside it": (("--config-dir", "bundle/conf", "experiment=theirs"), "bundle/conf/experiment/theirs.yaml", THEIRS),
    "another folder": (("--config-dir", "conf", "experiment=theirs"), "conf/experiment/theirs.yaml", THEIRS),
    "a file elsewhere": (("experiment=BESIDE/bundle/experiment/theirs",), EXPERIMENT, THEIRS),
    "Hydra's own": (("--config-dir", "bundle", "experiment=theirs"), EXPERIMENT, HYDRA),
}


@provocation(
    "`--config-dir bundle experiment=theirs`, or `experiment=../../bundle/experiment/theirs`: settings that name a file "
    "of Python of the folder they came in, or of another folder; the same for Hydra's own (`hydra.callbacks`)",
    "refused by its key, nothing ran; `trusted=[bundle]` allows it, and files in the directory of the start itself "
    "need no word",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_settings_brings_no_code(case, tmp_path):
    words, file, lines = CASES[case]
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "evil.py").write_text(SCORE)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(lines)
    beside = os.path.relpath(tmp_path, CONF / "experiment")
    words = [word.replace("HERE", str(tmp_path)).replace("BESIDE", beside) for word in words]
    done = begun(tmp_path, *words, *TINY)
    assert done.returncode == 1
    told = "theirs.yaml: hydra.callbacks.x._target_=bundle.evil.score stands in a file; allowed there are hydra.mode"
    assert (told if lines == HYDRA else "allowed is trusted=[bundle] on the command line") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "HIT").exists()
    if lines == HYDRA:
        return
    done = begun(tmp_path, *words, *TINY, "trusted=[bundle]")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "HIT").exists()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of the start with settings in a folder, a file, a folder and a package of Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in ("brought_file.py", "brought_folder/part.py", "brought_package/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(SCORE.partition("\n")[2])
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    yield tmp_path
    brought.forget_places()
    for name in [name for name in sys.modules if name.startswith("brought_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["brought_file", "brought_folder.part", "brought_package"])
def test_files_in_the_directory_itself_need_no_word(name, here):
    lines = REWARD.replace("NAME", name)
    (here / "conf" / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{lines}")
    words = (f"hydra.searchpath=[file://{here}/conf]", "experiment=theirs", *TINY)
    top = name.partition(".")[0]
    if name != "brought_file":
        with pytest.raises(ConfigError) as caught:
            grpo.compose(*words, run_dir=here / "run")
        assert caught.value.problems == (
            f"reward.custom.function._target_={name}.score: {top} is a folder, and may have come with the settings in "
            f"{here}/conf; if you know it, allowed is trusted=[{top}] on the command line",
        )
        assert top not in sys.modules
        words = (*words, f"trusted=[{top}]")
    assert "custom" in grpo.compose(*words, run_dir=here / "run").config["reward"]


def test_a_command_without_such_settings_needs_no_word(here):
    reward = ("reward=custom", "reward.custom.function._target_=brought_folder.part.score")
    assert "custom" in grpo.compose(*reward, *TINY, run_dir=here / "run").config["reward"]
    assert brought.said_places() == []


def test_what_is_said_of_another_mistake_stays(here):
    brought.say_places(["conf"])
    assert trust.problems({"x": {"_target_": "os.system"}}) == [f"x._target_=os.system: allowed are {trust.ALLOWED}"]


@provocation(
    "Hydra's settings as a whole in another place: `hydra: {job_logging: '${x}'}`, `launcher`, `sweeper`, `callbacks`",
    "refused by its key",
)
@pytest.mark.parametrize("part", ["job_logging", "hydra_logging", "launcher", "sweeper", "callbacks"])
def test_parts_of_hydra_stand_where_they_are_read(part):
    assert problems({part: "${x}"}) == [
        f"hydra.{part}=${{x}}: allowed are now:, oc.env:NAME and plain texts of hydra. in ${{…}}"
    ]
    if part.endswith("_logging"):
        assert len(problems({part: {"handlers": "${x}"}})) == 1
