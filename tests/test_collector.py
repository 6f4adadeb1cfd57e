"""Which groups, completions and tokens a rollout trains on, worked by hand on fixed samples."""

import math
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.advantage import centered, none, process
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector, max_variance, mixed
from grpo_lightning.rollout.collector import advantage_metrics
from grpo_lightning.rollout.scoring import _token_scores
from grpo_lightning.types import Prompts, Sampled, Scored
from tests.support import hostile
from tests.support.sampling import context as make_context
from tests.test_rollout import Fixed

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 4, "stop": []}


class Scripted(Fixed):
    """Answers the k-th completion of a prompt with its k-th word; a token is a character, log-probability -1 each."""

    def sample(self, prompts, *, group_size, sampling, seed, first_prompt=0, poll=None, on_finished=None):
        self.calls.append((tuple(prompts), seed))
        texts = [word for prompt in prompts for word in prompt.split()[:group_size]]
        assert len(texts) == len(prompts) * group_size
        length = max(map(len, texts))
        mask = torch.tensor([[t < len(text) for t in range(length)] for text in texts])
        return Sampled(
            ids=torch.tensor([[0, *(ord(text[t]) if t < len(text) else 0 for t in range(length))] for text in texts]),
            attention_mask=torch.cat([torch.ones(len(texts), 1, dtype=torch.bool), mask], 1),
            mask=mask,
            logprobs=-1.0 * mask,
            entropy=torch.tensor([[float(t + 1) for t in range(length)]]).expand(len(texts), -1) * mask,
            texts=tuple(texts),
            finished=tuple(not text.endswith("~") for text in texts),
        )

    def logprobs_and_entropy(self, rows, *, temperature, entropy=False, loss_gradient=None):
        return -1.5 * rows.mask, torch.zeros(rows.mask.shape) if entropy else None


def starts_with_r(completions):
    return [float(text.startswith("r")) for text in completions]


def lengths(completions):
    return [float(len(text)) for text in completions]


def collect(prompts, policy=None, *, rewards=None, reference=None, carried=None, group_size=2, **settings):
    rewards = rewards or {"right": RewardSpec(starts_with_r, 1.0)}
    settings = {"advantage": centered, "outcome": "right", "threshold": 1.0} | SAMPLING | settings
    collector = Collector(reward=rewards, group_size=group_size, **settings)
    policy = policy or Scripted()
    asked = Prompts(tuple(prompts), {"number": tuple(range(len(prompts)))})
    context = make_context(seed=7)
    return collector.collect(policy, reference, asked, context=context, carried=carried)


DYNAMIC = {"group_filter": mixed, "max_tries": 3}
DEAD, ALSO_DEAD, LIVE, LIVELY, LIVEST = "w x", "r rr", "r w", "w rrr", "ra wa"


def test_prompts_whose_outcomes_are_equal_are_replaced_by_those_of_the_next_try():
    policy = Scripted()
    found = collect([DEAD, LIVE, ALSO_DEAD, LIVELY, LIVEST, LIVE], policy, **DYNAMIC)
    assert policy.calls == [((DEAD, LIVE), 7), ((ALSO_DEAD, LIVELY), 8)]  # the third try is not needed
    assert found.scored.prompts.texts == (LIVE, LIVELY)
    assert found.scored.prompts.columns == {"number": (1, 3)}
    assert found.scored.sampled.texts == ("r", "w", "w", "rrr")
    assert found.rollout.advantages[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert found.carried is None
    assert found.is_fresh
    assert found.metrics["group/tries"] == 2
    assert found.metrics["group/kept"] == 0.5
    assert found.metrics["reward/right"] == 0.5  # of all eight completions, not of the four trained on
    assert found.num_tokens == 1 + 1 + 1 + 1 + 1 + 2 + 1 + 3
    with pytest.raises(ValueError, match="2 prompts: rollout.max_tries=3"):
        collect([DEAD, LIVE], **DYNAMIC)


def test_groups_beyond_those_wanted_are_carried_over_and_come_first():
    first = collect([DEAD, LIVE, LIVELY, LIVEST, DEAD, DEAD], **DYNAMIC)
    assert first.scored.prompts.texts == (LIVE, LIVELY)
    assert first.carried.prompts.texts == (LIVEST,)
    policy = Scripted()
    second = collect([DEAD, LIVE, LIVELY, LIVELY, DEAD, DEAD], policy, carried=first.carried, **DYNAMIC)
    assert len(policy.calls) == 1
    assert second.scored.prompts.texts == (LIVEST, LIVE)
    assert not second.is_fresh
    assert second.metrics["group/carried"] == 0.5
    assert second.carried is None
    # what was sampled before keeps the log-probabilities of the policy that sampled it, and its own length
    assert second.rollout.old_logprobs.sum(-1).tolist() == [-2.0, -2.0, -1.0, -1.0]
    assert second.rollout.mask.sum(-1).tolist() == [2, 2, 1, 1]


RIGHT, LENGTH = {"right": RewardSpec(starts_with_r, 1.0)}, {"length": RewardSpec(lengths, 0.0)}


@pytest.mark.parametrize(
    "before, after, group_size",
    [(RIGHT, RIGHT, 4), (RIGHT, RIGHT | LENGTH, 2), (RIGHT | LENGTH, RIGHT, 2)],
    ids=["larger groups", "one reward more", "one reward less"],
)
def test_groups_that_were_judged_otherwise_are_not_carried_over(before, after, group_size, caplog):
    carried = collect([DEAD, LIVE, LIVELY, LIVEST, DEAD, DEAD], rewards=before, **DYNAMIC).carried
    asked = [f"{LIVE} w w", f"{LIVELY} w r"] * 3
    found = collect(asked, carried=carried, rewards=after, group_size=group_size, **DYNAMIC)
    assert found.scored.prompts.texts == tuple(asked[:2])
    assert found.scored.group_size == group_size
    assert found.scored.rewards.keys() == {*after, "total"}
    assert found.is_fresh
    assert found.carried is None
    assert found.metrics["group/carried"] == 0.0
    assert "1 groups of the last rollout have another size or rewards: left out" in caplog.text


def test_when_the_tries_are_spent_the_rest_is_filled_up_and_said(caplog):
    found = collect([DEAD, ALSO_DEAD, DEAD, LIVE, ALSO_DEAD, DEAD], **DYNAMIC)
    assert found.scored.prompts.texts == (LIVE, DEAD)
    assert found.rollout.advantages[2:].count_nonzero() == 0
    assert found.metrics["group/tries"] == 3
    assert found.metrics["group/kept"] == pytest.approx(1 / 6)
    assert "1 of 2 groups passed rollout.group_filter after 3 tries" in caplog.text
    first = collect([LIVE, DEAD, ALSO_DEAD, DEAD, DEAD, DEAD], **DYNAMIC)
    assert first.scored.prompts.texts == (LIVE, DEAD)  # none twice
    nothing = collect([DEAD] * 6, **DYNAMIC)
    assert nothing.scored.prompts.texts == (DEAD, DEAD)
    assert nothing.rollout.advantages.count_nonzero() == 0


def test_the_filter_sees_the_outcome_and_not_the_shaped_total():
    rewards = {
        "right": RewardSpec(starts_with_r, 1.0),
        "length": RewardSpec(lambda completions: list(map(len, completions)), 0.1),
    }
    found = collect([ALSO_DEAD, LIVE, LIVELY, DEAD, DEAD, DEAD], rewards=rewards, **DYNAMIC)
    assert ALSO_DEAD not in found.scored.prompts.texts  # its total varies, its outcome does not


def test_groups_carried_over_survive_a_checkpoint(tmp_path):
    carried = collect([DEAD, LIVE, LIVELY, LIVEST, DEAD, DEAD], **DYNAMIC).carried
    torch.save(carried.state(), tmp_path / "state")
    back = Scored.from_state(torch.load(tmp_path / "state", weights_only=True))
    named = replace(back, prompts=replace(back.prompts, origins=("row 4",)))
    assert Scored.concatenate([named, named]).prompts.origins == ("row 4",) * 2
    assert Scored.concatenate([named, back]).prompts.origins == ()  # not all are known
    assert Scored.from_state(named.state()).prompts.origins == ("row 4",)
    expected = collect([DEAD, LIVE, LIVELY, LIVELY, DEAD, DEAD], carried=carried, **DYNAMIC)
    found = collect([DEAD, LIVE, LIVELY, LIVELY, DEAD, DEAD], carried=back, **DYNAMIC)
    for name, value in vars(expected.rollout).items():
        assert value is None or torch.equal(getattr(found.rollout, name), value), name
    assert found.scored.prompts.texts == expected.scored.prompts.texts


def test_down_sampling_keeps_the_extremes_and_their_own_mean():
    rewards = {"right": RewardSpec(lambda completions: [len(text) / 2 for text in completions], 1.0)}
    found = collect(
        ["aa a aaaa aaa", "b bbbb bb bb"], group_size=4, rewards=rewards, downsample=partial(max_variance, size=2)
    )
    assert found.scored.sampled.texts == ("a", "aaaa", "b", "bbbb")
    assert found.rollout.advantages[:, 0].tolist() == [-0.75, 0.75, -0.75, 0.75]
    assert found.metrics["reward/right"] == pytest.approx((1 + 0.5 + 2 + 1.5 + 0.5 + 2 + 1 + 1) / 8)


def test_a_penalty_for_the_distance_to_the_reference_comes_before_the_advantage():
    # k1 = -1 - -1.5 = .5 per token: "r" has .5 and "rrr" 1.5; at .2 the rewards are .9 and .7, mean .8
    found = collect(["r rrr"], reference=Scripted(), kl_penalty=0.2)
    assert_close(found.rollout.advantages[:, 0], torch.tensor([0.1, -0.1]))
    assert found.metrics["reward/right"] == 1.0
    assert_close(found.rollout.ref_logprobs, -1.5 * found.rollout.mask)
    # k3 = exp(-.5) + .5 - 1
    assert found.metrics["policy/kl_divergence"].item() == pytest.approx(math.exp(-0.5) - 0.5)
    assert "policy/kl_divergence" not in collect(["r rrr"]).metrics


def test_a_teacher_gives_an_advantage_to_every_token():
    # log teacher - log policy = -1.5 - -1 at each; at .2 it is -.1, beside the rewards' own 1/2 and -1/2
    found = collect(["r www"], reference=Scripted(), teacher_coef=0.2)
    assert_close(found.rollout.advantages, torch.tensor([[0.4, 0.0, 0.0], [-0.6, -0.6, -0.6]]))
    alone = collect(["r www"], reference=Scripted(), teacher_coef=1.0, advantage=none)
    assert_close(alone.rollout.advantages, -0.5 * alone.rollout.mask)


def test_truncated_completions_leave_the_loss_and_stay_in_the_mean():
    found = collect(["r w~ w"], group_size=3, mask_truncated=True)
    assert found.rollout.mask.tolist() == [[True, False], [False, False], [True, False]]
    # mean 1/3 over all three
    assert_close(found.rollout.advantages[:, 0], torch.tensor([2 / 3, 0.0, -1 / 3]))
    assert found.metrics["completion/truncated_fraction"] == pytest.approx(1 / 3)
    assert collect(["r w~ w"], group_size=3).rollout.mask.sum() == 4


def test_only_the_tokens_of_highest_entropy_have_an_advantage():
    # entropies 1 2 3 and 1 2: of five tokens the 40 % highest are 3, 2 and, equal to it, 2
    found = collect(["rab wa"], top_entropy=0.4)
    assert found.rollout.advantages.tolist() == [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0]]
    assert found.rollout.mask.tolist() == [[True] * 3, [True, True, False]]  # the others still count
    assert found.metrics["policy/entropy"] == pytest.approx(9 / 5)


def words(completions):
    """(end, score) of every character: 1 for a capital."""
    return [[(end, float(text[end - 1].isupper())) for end in range(1, len(text) + 1)] or None for text in completions]


def test_scores_of_steps_reach_the_tokens_where_they_end():
    rewards = {"right": RewardSpec(starts_with_r, 3.0), "steps": RewardSpec(words, 2.0)}
    found = collect(["rB wc"], rewards=rewards, advantage=partial(process, eps=0.0))
    # weighted: r 0, B 2, and 3 for the whole at the last token -> (0, 5); w 0, c 0 -> (0, 0)
    assert found.scored.steps.tolist() == [[0.0, 5.0], [0.0, 0.0]]
    # mean 1.25, deviations -1.25, 3.75, -1.25, -1.25: squares sum 18.75, sample std 2.5: -.5, 1.5, -.5, -.5
    assert_close(found.rollout.advantages, torch.tensor([[1.0, 1.5], [-1.0, -0.5]]))
    # as one number it is the mean of the steps: .5 and 0
    assert found.scored.rewards["steps"].tolist() == [0.5, 0.0]
    assert found.scored.rewards["total"].tolist() == [3 + 2 * 0.5, 0.0]


def test_a_score_stands_at_the_end_of_its_step_its_turn_or_the_last_turn():
    turns, ids = [(0, 2), (4, 7)], [7, 8, 9]
    for value, turn_scores, expected in (
        (None, None, []),
        (1.5, None, [(6, 1.5)]),
        (((1, 0.5), (3, 1.0)), None, [(4, 0.5), (6, 1.0)]),  # steps of the last turn, a token is a character
        (3.0, [(0, 1.0), (1, 2.0)], [(1, 1.0), (6, 2.0)]),
        (2.5, [(0, 1.0), (1, 2.0)], [(6, 2.5)]),  # clipped
    ):
        assert _token_scores(value, ids, turns, lambda ids, end: end - 1, turn_scores) == expected


def test_scores_enter_clipped_and_are_logged_as_they_are():
    rewards = {"right": RewardSpec(starts_with_r, 1.0), "length": RewardSpec(lengths, 10.0, clip=[0.0, 2.0])}
    found = collect(["rrrr ww"], rewards=rewards)
    assert found.scored.rewards["length"].tolist() == [4.0, 2.0]
    assert found.scored.scores.tolist() == [[1.0, 2.0], [0.0, 2.0]]
    assert found.scored.rewards["total"].tolist() == [21.0, 20.0]
    assert found.scored.right.tolist() == [True, False]


def test_rewards_with_a_timeout_start_while_others_are_still_sampled(tmp_path):
    class Slow(Scripted):
        def sample(self, prompts, *, on_finished=None, **arguments):
            on_finished(0, "r", [1])
            deadline = time.monotonic() + 60
            while not (tmp_path / "r").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [path.name for path in tmp_path.iterdir()] == ["r"]
            return super().sample(prompts, **arguments)

    rewards = {"right": RewardSpec(partial(hostile.leaves_a_mark, directory=str(tmp_path)), 1.0, timeout=20.0)}
    found = collect(["r wa"], Slow(), rewards=rewards)
    assert found.scored.rewards["right"].tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "wa"]
    assert found.metrics["failure/right"] == 0.0


def test_a_mean_advantage_that_is_rounding_is_zero_and_any_other_stays():
    noise = advantage_metrics(torch.tensor([1.0, -1.0 + 2**-22]))  # mean 2^-23 = 1.2e-7, deviation sqrt(2)
    assert noise["advantage/mean"].item() == 0.0
    assert noise["advantage/std"].item() == pytest.approx(2**0.5)
    small = advantage_metrics(torch.tensor([1.0, -1.0 + 2**-18]))  # mean 2^-19 = 1.9e-6
    assert small["advantage/mean"].item() == 2**-19
    assert advantage_metrics(torch.tensor([3e-9, 3e-9]))["advantage/mean"].item() == pytest.approx(3e-9)
