"""The command that a message offers is one that the shell and Hydra read as it was meant."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo_lightning.checkpoint.command import continue_command


@pytest.mark.parametrize("place", ["/a/b", "/a b/lr=0.1", "/it's", "/é\\'y", "/x\\", "/t(1),[2]{3}:4", '/q"q', "/a;b"])
def test_a_directory_of_any_name_comes_through_shell_and_hydra(place):
    line = continue_command(["steps=3", "data.path='x y'"], Path(place), checkpoint=f"{place}/best.ckpt")
    program, script, *words = shlex.split(line)
    assert (program, script) == ("python", "train.py")
    assert words[:2] == ["steps=3", "data.path='x y'"]
    directory, checkpoint = OverridesParser.create().parse_overrides(words[2:])
    assert (directory.key_or_group, directory.value()) == ("hydra.run.dir", place)
    assert (checkpoint.key_or_group, checkpoint.value()) == ("checkpoint", f"{place}/best.ckpt")


def test_what_named_the_old_run_is_left_out():
    given = ["+checkpoint=x", "steps=3", "checkpoint=last", "hydra.run.dir=q", "run_dir=r", "a.checkpoint=2"]
    assert continue_command(given, Path("/d")) == (
        "python train.py steps=3 a.checkpoint=2 hydra.run.dir=/d checkpoint=last"
    )


def test_the_installed_command_is_offered_to_those_who_used_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/grpo-lightning", "steps=3"])
    assert continue_command(["steps=3"], Path("/d")).startswith("grpo-lightning steps=3 hydra.run.dir=/d")
