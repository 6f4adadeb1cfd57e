"""What a reward may return, and how it may end: the same in this process and in workers."""

import subprocess
import sys

import pytest

from grpo_lightning.reward import RewardError, RewardSpec, Scoring, score
from tests.support import rewards
from tests.support.composed import ROOT
from tests.support.workers import limited

WHERE = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


def scored(function, timeout, texts=("ab", "abcd")):
    weighted = RewardSpec(function, 1.0, timeout=timeout, max_failed=0.0)
    return score({"mine": weighted}, ["p"] * len(texts), texts, {})["mine"]


@WHERE
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "array", "generator"])
def test_numbers_are_taken_however_they_are_packed(kind, timeout):
    assert scored(getattr(rewards, f"as_{kind}"), timeout) == [0.5, 1.0]  # 2/4 and 4/4


@WHERE
def test_steps_are_taken_however_they_are_packed(timeout):
    texts = ("ab", "abcd")
    weighted = RewardSpec(rewards.as_steps, 1.0, timeout=timeout, max_failed=0.0)
    scores = Scoring({"mine": weighted}, ["p", "p"], {}).finish(texts, None)
    assert scores.values["mine"] == [((1, 0.25), (2, 0.5)), ((1, 0.25), (4, 0.5))]


@pytest.mark.slow
@WHERE
def test_a_tensor_of_another_shape_is_refused(timeout):
    with pytest.raises(RewardError, match="reward 'mine'"):
        scored(rewards.as_one_tensor, timeout)


@WHERE
def test_a_reward_cannot_end_the_program(timeout):
    with pytest.raises(RewardError) as error:
        scored(rewards.exits, timeout)
    assert "reward 'mine'" in str(error.value)
    assert r"SystemExit: \x1b[2Jno more rewards" in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.slow
def test_the_trainer_needs_no_torch_to_read_scores():
    code = """if __name__ == "__main__":
        import sys
        from grpo_lightning.reward import RewardSpec, score
        from tests.support import rewards
        weighted = RewardSpec(rewards.as_tensor, 1.0, timeout=60.0, max_failed=0.0)
        print(score({"mine": weighted}, ["p"], ["abcd"], {}), "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "{'mine': [1.0]} False\n", done.stderr
