"""In a small game the replies are learned from: without them nothing beats guessing blindly."""

import json

import pytest

from grpo_lightning.run import Run
from tests.support.composed import build, composed

GAME = (
    "data.train.highest=7",
    "data.train.guesses=3",
    "data.validation_size=70",
    "validation.samples_per_prompt=4",
    "validation.ks=[1]",
    "trainer=cpu",
    "logger=[]",
)
PLAYED = (
    *GAME,
    "environment.function.highest=7",
    "environment.max_turns=3",
    "data.train.size=7",
    "validation.every=25",
)
BLIND = 3 / 7
"""Three different guesses win three of seven games, whatever they are; halving what is left wins all."""


def run(directory, *overrides):
    """The figures of a run in this process."""
    given = [*overrides, f"run_dir={directory}"]
    Run(composed(*given), build(*given), overrides=list(overrides), directory_given=True).execute()
    return json.loads((directory / "summary.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The shipped policy after a short supervised stage."""
    directory = tmp_path_factory.mktemp("taught")
    run(directory, "experiment=guess_taught", *GAME, "steps=60", "data.prompts_per_step=32", "validation.every=60")
    return directory / "export"


def learned(taught, directory, *overrides):
    """The figures of GRPO in the game."""
    settings = (*PLAYED, f"policy.path={taught}", "data.prompts_per_step=7", "steps=25")
    return run(directory, "experiment=guess", *settings, *overrides)


@pytest.mark.slow
def test_a_game_is_learned_from_its_replies(taught, tmp_path):
    metrics = learned(taught, tmp_path)
    assert metrics["val/pass@1"] > BLIND + 0.2
    assert metrics["episode/failed"] == 0
    assert metrics["completion/truncated_fraction"] == 0
    assert 1 < metrics["episode/turns"] < 3 == metrics["episode/turns_max"]


@pytest.mark.slow
def test_without_replies_that_say_something_nothing_is_learned(taught, tmp_path):
    # of 280 games; 0.1 are more than three standard deviations
    assert learned(taught, tmp_path, "environment.function.random_replies=1")["val/pass@1"] < BLIND + 0.1
