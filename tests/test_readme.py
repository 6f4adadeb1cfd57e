"""What the README tells people to type exists."""

import re
import shlex

import pytest

from grpo_lightning.config import check
from grpo_lightning.config.rule import RULES
from tests.composed import CONF, ROOT, composed

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {
        re.split(r"  +", line.split("&&")[-1].strip())[0]
        for line in README.splitlines()
        if "python train.py" in line and not line.startswith(("|", "`"))
    }
)


def arguments(command):
    """What follows train.py, without Hydra's own settings, and of several values for a key the first."""
    words = [word for word in shlex.split(command)[2:] if not word.startswith(("-", "hydra."))]
    words = [word.replace("glob(*)", "grpo") for word in words if "=" in word]
    return [re.sub(r"=([^\[{,\"]+),.*", r"=\1", word) for word in words]


def test_there_are_commands():
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_composes(command, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completions, **columns):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    check(composed(*arguments(command)))


def test_every_choice_of_every_part_is_in_the_readme():
    for path in CONF.glob("*/*.yaml"):
        if path.stem not in ("base", "taught", "default") and path.parent.name not in ("sweep", "experiment"):
            assert f"`{path.stem}`" in README or f"={path.stem}" in README, path
    for path in (CONF / "experiment").glob("*.yaml"):
        assert path.stem in README, path


def test_every_setting_with_a_rule_is_in_the_readme():
    for key in RULES:
        assert key.rpartition(".")[2] in README, key
