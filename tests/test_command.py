"""The commands that continue a run, as they are told to users."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo_lightning.checkpoint.resume import resume_command


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The command line is begun by ``python train.py``."""
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.mark.parametrize("place", ["/a/b", "/a b/lr=0.1", "/it's", "/t(1),[2]{3}:4", '/q"q', "/a;b", "/$(touch x)"])
def test_a_directory_of_any_name_comes_through_shell_and_hydra(place):
    line = resume_command(["steps=3", "data.path='x y'"], Path(place), checkpoint=f"{place}/best.ckpt")
    program, script, *words = shlex.split(line)
    assert (program, script) == ("python", "train.py")
    assert words[:2] == ["steps=3", "data.path='x y'"]
    directory, checkpoint = OverridesParser.create().parse_overrides(words[2:])
    assert (directory.key_or_group, directory.value()) == ("hydra.run.dir", place)
    assert (checkpoint.key_or_group, checkpoint.value()) == ("checkpoint", f"{place}/best.ckpt")


def test_what_named_the_old_run_is_left_out_and_steps_are_replaced():
    given = ["+checkpoint=x", "steps=3", "checkpoint=last", "hydra.run.dir=q", "run_dir=r", "a.checkpoint=2"]
    end = "a.checkpoint=2 hydra.run.dir=/d checkpoint=last"
    assert resume_command(given, Path("/d")) == f"python train.py steps=3 {end}"
    assert resume_command(given, Path("/d"), steps=6) == f"python train.py {end.replace('hydra', 'steps=6 hydra')}"


def test_secrets_are_masked():
    line = resume_command(["logger.wandb.api_key=abcdefgh", "a=1"], Path("/d"))
    assert line == "python train.py logger.wandb.api_key=REDACTED a=1 hydra.run.dir=/d checkpoint=last"


def test_the_command_says_where_settings_are_found(monkeypatch):
    options = ["--config-dir", "my conf", "-cn=own", "hydra.searchpath=[file://conf]"]
    monkeypatch.setattr("sys.argv", ["/bin/grpo-lightning", *options, "steps=3", "-m"])
    words = shlex.split(resume_command(["steps=3"], Path("/d")))
    assert words == ["grpo-lightning", *options, "steps=3", "hydra.run.dir=/d", "checkpoint=last"]
