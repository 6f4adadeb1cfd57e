"""Rollouts of episodes: what rewards are told, whose scores count where, and what an environment's failures cost."""

import itertools
import json
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning import advantage
from grpo_lightning.environment import Environment, EpisodeError
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.accuracy import of_environment
from grpo_lightning.reward.length import soft_overlong
from grpo_lightning.rollout.collector import Collector
from grpo_lightning.rollout.scoring import Scorer, StepContext
from grpo_lightning.run import Run
from grpo_lightning.types import Prompts, Sampling, spans
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import build, composed
from tests.support.episodes import chatty
from tests.support.sampling import PLAIN, PROMPTS, opened

DATA = Prompts(tuple(PROMPTS), {"number": (3, 4, 5)})
SAMPLING = Sampling(**PLAIN | {"max_new_tokens": 60})


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return opened(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", chat=False))


def scored_turns(turns, number):
    """Each turn gives a tenth, and the end what the column says."""
    reply = chatty(turns)
    return float(number) if reply is None else (reply, 0.1)


def judged(policy, function=scored_turns, *, rewards=None, context=None, **settings):
    rewards = rewards or {"environment": RewardSpec(partial(of_environment), 1.0)}
    environment = Environment(function, **{"max_turns": 9} | settings)
    judge = Scorer(rewards, None, 1.0, environment)
    context = context or StepContext(seed=5)
    return judge.generate_and_score(policy, DATA, group_size=3, sampling=SAMPLING, context=context)


def test_scores_stand_at_the_ends_of_their_turns(policy):
    scored, metrics = judged(policy)
    ended = 0
    for row, turns in enumerate(spans(scored.sampled.mask)):
        ends = [end - 1 for _, end in turns]
        finished = scored.sampled.finished[row]
        ended += finished
        found = {place: value for place, value in enumerate(scored.steps[row].tolist()) if value == value}
        # A cut turn was not told to the environment; one whose reply found no room was.
        last = int(scored.sampled.ids[row, -scored.sampled.mask.shape[1] :][ends[-1]])
        end = float(DATA.columns["number"][row // 3]) if finished else 0.1 if last in policy.end_ids else None
        expected = dict.fromkeys(ends[:-1], 0.1) | ({} if end is None else {ends[-1]: end}) or {ends[-1]: 0.0}
        assert found == pytest.approx(expected)
        assert float(scored.rewards["environment"][row]) == pytest.approx(sum(expected.values()))
    assert 0 < ended < 9
    assert metrics["episode/failed"] == metrics["episode/bad_calls"] == 0


def test_an_episode_that_the_environment_has_not_ended_is_truncated(policy):
    sampled = judged(policy, lambda turns: "again", max_turns=1)[0].sampled
    last = [
        int(row[counts.nonzero()[-1]]) for row, counts in zip(sampled.ids[:, -sampled.mask.shape[1] :], sampled.mask)
    ]
    assert any(token in policy.end_ids for token in last)  # the model has ended its turn, at the limit of turns
    assert sampled.finished == (False,) * 9


def test_rewards_are_told_the_last_turn_and_ask_for_all(policy):
    seen = {}

    def watching(prompts, completions, completion_ids, turns, replies, turn_scores, number):
        seen.update(locals())
        return [float(len(own)) for own in turns]

    scored, _ = judged(policy, rewards={"watching": RewardSpec(watching, 1.0)})
    assert seen["turns"] == [list(own) for own in scored.sampled.turns]
    assert seen["replies"] == [list(own) for own in scored.sampled.replies]
    assert seen["completions"] == [own[-1] for own in scored.sampled.turns]
    assert seen["number"] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert [policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in seen["completion_ids"]] == list(
        scored.sampled.texts
    )
    for turns, replies, scores in zip(seen["turns"], seen["replies"], seen["turn_scores"], strict=True):
        for number, reply in enumerate(replies):
            assert reply == chatty(turns[: number + 1])
            assert scores[number] == (number, 0.1)
    assert scored.rewards["watching"].tolist() == [len(own) for own in seen["turns"]]


def test_the_length_of_an_episode_is_that_of_all_turns_and_replies(policy):
    """Which is what the limit is for; the last turn alone may be short in an episode that was cut."""
    reward = RewardSpec(partial(soft_overlong, max_length=SAMPLING.max_new_tokens, buffer=0.5), 1.0)
    scored, _ = judged(policy, rewards={"overlong": reward})
    lengths = [turns[-1][1] for turns in spans(scored.sampled.mask)]
    assert {turn_count > 1 for turn_count in map(len, scored.sampled.turns)} == {True, False}
    assert min(lengths) < 30 < 55 < max(lengths)
    overlong = [min(0.0, max(-1.0, (30 - length) / 30)) for length in lengths]
    assert scored.rewards["overlong"].tolist() == pytest.approx(overlong)


def failing(turns, number):
    if number == 4 and len(turns) == 2:
        raise OSError("the service is gone")
    return scored_turns(turns, number)


def collected(policy, function, **settings):
    collector = Collector(
        reward={
            "environment": RewardSpec(partial(of_environment), 1.0),
            "other": RewardSpec(lambda completions: [1.0] * len(completions), 0.0),
        },
        advantage=advantage.centered,
        outcome=None,
        threshold=1.0,
        group_size=3,
        **{
            name: getattr(SAMPLING, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop")
        },
        environment=Environment(function, **{"max_turns": 9} | settings),
    )
    return collector.collect(policy, None, DATA, context=StepContext(seed=5))


def test_episodes_in_which_the_environment_fails_are_left_out(policy, caplog):
    whole, failed = collected(policy, scored_turns), collected(policy, failing)
    rows = [row for row in range(3, 6) if len(whole.scored.sampled.turns[row]) > 1]
    assert 0 < len(rows) < 3
    rewards = failed.scored.rewards["total"]
    assert rewards.isnan().nonzero().flatten().tolist() == rows
    assert failed.metrics["episode/failed"] == pytest.approx(len(rows) / 9)
    assert not failed.rollout.advantages[rows].any()
    others = [row for row in range(9) if not 3 <= row < 6]
    length = min(whole.rollout.mask.shape[1], failed.rollout.mask.shape[1])
    assert_close(failed.rollout.advantages[others, :length], whole.rollout.advantages[others, :length])
    scored = collected(policy, failing, failed_score=-1.0)
    assert scored.scored.rewards["environment"][rows].tolist() == [-1.0] * len(rows)
    assert scored.scored.rewards["other"].isnan().nonzero().flatten().tolist() == rows  # no other reward applies
    with pytest.raises(EpisodeError, match=r"failed in \d of 9 episodes .*max_failed=0.05.*first on row \d, exception"):
        collected(policy, failing, max_failed=0.05)


def test_a_reply_that_cannot_be_read_fails_its_episode(policy, monkeypatch):
    def strange(turns, number):
        reply = scored_turns(turns, number)
        return ("strange", 0.1) if number == 4 and isinstance(reply, tuple) else reply

    known = policy.chat.reply
    monkeypatch.setattr(
        policy.chat, "reply", lambda text, **options: [] if text == "strange" else known(text, **options)
    )
    whole, failed = collected(policy, scored_turns), collected(policy, strange)
    rows = [row for row in range(3, 6) if len(whole.scored.sampled.turns[row]) > 1]
    assert 0 < len(rows) < 3
    assert failed.scored.rewards["total"].isnan().nonzero().flatten().tolist() == rows
    own, other = failed.scored.sampled, whole.scored.sampled
    for row in range(9):
        assert own.turns[row] == (other.turns[row][:1] if row in rows else other.turns[row])
        assert own.replies[row] == (() if row in rows else other.replies[row])
    with pytest.raises(EpisodeError, match=r"failed in \d of 9 .* reply: the reply 'strange' has no tokens"):
        collected(policy, strange, max_failed=0.05)


def test_what_is_logged(policy):
    found = collected(policy, scored_turns)
    sampled, metrics = found.scored.sampled, found.metrics
    turns = [len(own) for own in sampled.turns]
    replied = sampled.attention_mask[:, -sampled.mask.shape[1] :].sum() - sampled.mask.sum()
    assert float(metrics["episode/turns"]) == pytest.approx(sum(turns) / 9)
    assert float(metrics["episode/turns_max"]) == max(turns)
    assert float(metrics["episode/reply_tokens"]) == pytest.approx(float(replied) / 9)
    assert found.num_tokens == int(sampled.mask.sum())
    assert float(metrics["completion/length_mean"]) == pytest.approx(float(sampled.mask.sum()) / 9)


# The stop/go game: the policy stops at once, which is worth .4, or goes on, which costs .2 at once and then gives .9.
GO, STOP = ((-0.2, 0), (0.9, 1)), ((0.4, 0),)


def expected_gradient(function, probability: float, size: int = 4) -> float:
    """Of the logit of going on, over all groups, for the gradient estimator of an advantage function."""
    total = 0.0
    for group in itertools.product([False, True], repeat=size):
        steps = torch.full((1, size, 2), torch.nan, dtype=torch.float64)
        for member, goes in enumerate(group):
            for score, place in GO if goes else STOP:
                steps[0, member, place] = score
        advantages = function(steps)[0, :, 0]  # the second turn has nothing to decide
        chance = torch.tensor([probability if goes else 1 - probability for goes in group]).prod()
        slope = torch.tensor([(1.0 if goes else 0.0) - probability for goes in group], dtype=torch.float64)
        total += float(chance * (advantages * slope).mean())
    return total


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.9])
def test_to_go_has_the_gradient_of_the_expected_sum_of_scores(probability):
    exact = probability * (1 - probability) * ((-0.2 + 0.9) - 0.4)
    assert expected_gradient(advantage.to_go, probability) == pytest.approx(exact, abs=1e-8)
    assert exact > 0


# Learning: without the replies nothing beats guessing blindly

GAME = (
    *("data.train.highest=7", "data.train.guesses=3", "data.validation_size=70", "validation.samples_per_prompt=4"),
    *("validation.ks=[1]", "trainer=cpu", "logger=[]"),
)
PLAYED = (
    *(*GAME, "environment.function.highest=7", "environment.max_turns=3", "data.train.size=7", "validation.every=25"),
)
BLIND = 3 / 7
"""Three different guesses win three of seven games, whatever they are; halving what is left wins all."""


def run(directory, *overrides):
    """The figures of a run in this process."""
    given = [*overrides, f"run_dir={directory}"]
    Run(composed(*given), build(*given), overrides=list(overrides), directory_given=True).execute()
    return json.loads((directory / "summary.json").read_text())["metrics"]


@pytest.mark.slow
def test_a_game_is_learned_from_its_replies(tmp_path):
    """By GRPO, after a short supervised stage."""
    taught = ("experiment=guess_taught", "steps=60", "data.prompts_per_step=32", "validation.every=60")
    run(tmp_path / "taught", *taught, *GAME)
    settings = (*PLAYED, f"policy.path={tmp_path / 'taught' / 'export'}", "data.prompts_per_step=7", "steps=25")
    metrics = run(tmp_path / "grpo", "experiment=guess", *settings)
    assert metrics["val/pass@1"] > BLIND + 0.2
    assert metrics["episode/failed"] == 0
    assert metrics["completion/truncated_fraction"] == 0
    assert 1 < metrics["episode/turns"] < 3 == metrics["episode/turns_max"]
