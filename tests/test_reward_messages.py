"""Rewards that read chat messages, as TRL's own do for conversational data; and TRL's own."""

import pytest

from grpo_lightning.config import check_config
from grpo_lightning.reward import RewardError, RewardSpec, check_columns, score
from tests.support import rewards
from tests.support.composed import build, composed
from tests.support.workers import limited

PLAIN = "How many?"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
WHERE = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


def scored(function, prompts, completions, *, columns=None, ids=None, **settings):
    weighted = RewardSpec(function, 1.0, **{"messages": True, "max_failed": 0.0, **settings})
    return score({"mine": weighted}, prompts, completions, columns or {}, ids)["mine"]


# --- what a function is called with


def test_texts_become_messages_and_messages_stay():
    seen = {}

    def looks(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    scored(looks, [PLAIN, CHAT], ["two", ""], columns={"chat": [CHAT, "text"]}, ids=[[1], [2]])
    assert seen == {
        "prompts": [[{"role": "user", "content": PLAIN}], CHAT],
        "completions": [[{"role": "assistant", "content": "two"}], [{"role": "assistant", "content": ""}]],
        "completion_ids": [[1], [2]],
        "chat": [CHAT, "text"],  # a column stays whatever it is
    }


def test_a_reward_cannot_change_what_the_next_one_sees():
    def rude(prompts, completions):
        for prompt, completion in zip(prompts, completions):
            prompt[0]["content"] = completion[0]["content"] = "gone"
            prompt.append(completion.pop())
        return [0.0] * len(completions)

    chat = [dict(message) for message in CHAT]
    both = {"rude": RewardSpec(rude, 1.0, messages=True), "next": RewardSpec(rewards.of_messages, 1.0, messages=True)}
    assert score(both, [chat, chat], ["a", "b"], {})["next"] == [3.0, 3.0]
    assert chat == CHAT


# --- what it returns


def test_steps_end_at_characters_of_the_text():
    def halves(completions):
        texts = [completion[0]["content"] for completion in completions]
        return [[(len(text) // 2, 0.0), (len(text), 1.0)] for text in texts]

    assert scored(halves, [PLAIN], ["x" * 40]) == [0.5]
    with pytest.raises(
        RewardError, match=r"ends from 1 to 40, or None, got \[\[41, 1.0\]\] for row 0, completion 'xxx"
    ):
        scored(lambda completions: [[[41, 1.0]]], [PLAIN], ["x" * 40])


# --- settings


def test_the_setting_reaches_the_reward():
    overrides = ["reward=custom", "reward.custom.function._target_=tests.support.rewards.letters"]
    check_config(composed(*overrides, "reward.custom.messages=true"))
    chosen = build(*overrides, "reward.custom.messages=true")("reward")
    assert score(chosen, [PLAIN], ["two"], {}) == {"custom": [3.0]}
    assert build(*overrides)("reward")["custom"].messages is False
    one = [
        "reward=custom_per_completion",
        "reward.custom.function.function._target_=tests.support.rewards.of_one_answer",
    ]
    chosen = build(*one, "reward.custom.messages=true")("reward")
    assert score(chosen, [CHAT], ["2"], {"answer": ["2"]}) == {"custom": [21.0]}


# --- coroutines


# --- TRL's own


@WHERE
def test_trl_accuracy(timeout):
    accuracy = pytest.importorskip("trl.rewards").accuracy_reward
    texts = [r"It is \boxed{\frac{1}{3}}", r"It is \boxed{\frac{1}{2}}", r"\boxed{1}"]
    solutions = [r"\frac{1}{3}", r"\frac{1}{3}", ""]
    found = scored(accuracy, [CHAT, PLAIN, CHAT], texts, columns={"solution": solutions}, timeout=timeout)
    assert found == [1.0, 0.0, None]
    with pytest.raises(RewardError, match="reward 'mine': parameter 'solution' is no column of the data"):
        check_columns({"mine": RewardSpec(accuracy, 1.0, messages=True)}, ["answer"])


@WHERE
@pytest.mark.parametrize("messages", [True, False])
def test_trl_soft_overlong(timeout, messages):
    overlong = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(100, 20)
    ids = [[1] * 80, [1] * 90, [1] * 101]
    found = scored(overlong, [PLAIN, CHAT, CHAT], ["a", "b", "c"], ids=ids, timeout=timeout, messages=messages)
    assert found == [0.0, -0.5, -1.0]
