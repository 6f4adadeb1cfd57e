"""What the README and docs/ tell people to type composes."""

import re
import shlex

import pytest

from grpo_lightning.config import check_config
from tests.support.composed import ROOT, composed, with_directories

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(r"(?:train\.py|train\.slurm|grpo-lightning)(?: |$)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(text):
    """Every command line that starts a run, in blocks and between backticks, without what is said about it."""
    blocks = [block for language, block in FENCE.findall(text) if language != "python"]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    lines += re.findall(r"`((?:python train\.py|grpo-lightning) [^`]+)`", FENCE.sub("", text))
    return {line.strip() for line in lines if PROGRAM.search(line)}


def arguments(command):
    """The overrides, without Hydra's own settings, and of several values for a key the first."""
    after = PROGRAM.split(re.sub(r"\s#.*", "", command))[-1]
    words = shlex.split(re.split(r"  +", after)[0])
    words = [
        re.sub(r"glob\([^)]*\)", "grpo", word).replace("experiment=mine", "experiment=annealed")
        for word in words
        if "=" in word and not word.startswith(("-", "hydra."))
    ]
    words = [re.sub(r"=(?:tag\(log, )?interval\(([^,]+),.*", r"=\1", word) for word in words]
    return [re.sub(r"=([^\[{,\"]+),.*", r"=\1", word) for word in words]


COMMANDS = sorted(set().union(*(commands(page.read_text(encoding="utf-8")) for page in PAGES)))


@pytest.mark.slow
def test_every_command_composes(tmp_path, monkeypatch):
    assert len(COMMANDS) > 25
    (tmp_path / "my_rewards.py").write_text("def short(completions, **columns):\n    return [1.0] * len(completions)\n")
    game = "def guess(turns, number):\n    return 0.0\n\n\ndef guess_played(number):\n    yield\n"
    (tmp_path / "my_game.py").write_text(game)
    (tmp_path / "my_data.py").write_text("def questions(size):\n    return ['a'] * size\n")
    (tmp_path / "my_judge.py").write_text("async def tidy(completion):\n    return 1.0\n")
    (tmp_path / "my_tools.py").write_text("def weather(city: str) -> dict:\n    return {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("grpo_lightning.config.rules.find_spec", lambda name: name)  # as if it were installed
    wrong = {}
    for words in sorted({tuple(arguments(command)) for command in COMMANDS}):
        try:
            check_config(with_directories(composed(*words), tmp_path))
        except Exception as error:  # of all of them at once
            wrong[words] = repr(error)
    assert wrong == {}
