"""More groups in flight than are trained on: what stops early, goes on later, and is trained on once."""

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from grpo_lightning.advantage import centered
from grpo_lightning.batch import Prompts, Sampled
from grpo_lightning.data.prompt_data import PromptData
from grpo_lightning.distributed.ranks import ALONE
from grpo_lightning.policy.hf import HFPolicy, load
from grpo_lightning.policy.plain import PlainPolicy
from grpo_lightning.reward import Weighted
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.step_context import StepContext
from grpo_lightning.rollout.unfinished import Unfinished, restored
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import finish, start
from tests.support.running import small_run
from tests.test_rollout import Fixed
from tests.test_settings import problems

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}


def lengths_and_answers(completions, answer):
    return [len(text) + 100.0 * number for text, number in zip(completions, answer, strict=True)]


def collect(policy, asked, *, seed=1, carried=None, over_sample=2.0, group_size=2, max_new_tokens=8, **settings):
    """One rollout; ``asked`` are prompts, or prompts with their answers."""
    if not isinstance(asked, Prompts):
        asked = Prompts(tuple(asked), {"answer": tuple(range(len(asked)))})
    collector = Collector(
        **SAMPLING | {"advantage": centered, "outcome": None, "threshold": 1.0} | settings,
        reward={"long": Weighted(lengths_and_answers, 1.0)},
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        over_sample=over_sample,
    )
    return collector.collect(
        policy, None, asked, microbatch_tokens=999, context=StepContext(seed=seed), carried=carried
    )


# --- by hand ---------------------------------------------------------------------------------------------------------


class Typist(Fixed):
    """Writes the k-th completion of a prompt as its k-th word, a character at a time, all at the same pace.

    The log-probability of a character is minus the seed with which it was drawn, its entropy a tenth of that. A word in
    capitals never ends of itself.
    """

    def flops(self, rows):
        return float(rows.mask.sum())

    def sample(
        self,
        prompts,
        *,
        group_size,
        sampling,
        seed,
        first_prompt=0,
        poll=None,
        on_finished=None,
        ranks=ALONE,
        begun=None,
        enough=None,
    ):
        words = [word for prompt in prompts for word in prompt.split()[:group_size]]
        self.calls.append((tuple(prompts), {row: len(known.ids) for row, known in (begun or {}).items()}))
        drawn = [
            list(zip(begun[row].ids, begun[row].logprobs, begun[row].entropies, strict=True))
            if begun and row in begun
            else []
            for row in range(len(words))
        ]

        def is_over(row):
            return len(drawn[row]) == min(len(words[row]), sampling.max_new_tokens)

        while True:
            for row, word in enumerate(words):
                if not is_over(row):
                    drawn[row].append((ord(word[len(drawn[row])]), -float(seed), seed / 10))
            over = [is_over(row) for row in range(len(words))]
            if all(over) or (enough and enough(over)):
                break
        length = max(map(len, drawn))
        mask = torch.tensor([[t < len(row) for t in range(length)] for row in drawn])
        ids, logprobs, entropy = (
            torch.tensor([[row[t][part] if t < len(row) else 0 for t in range(length)] for row in drawn])
            for part in range(3)
        )
        return Sampled(
            ids=torch.cat([torch.ones(len(words), 1, dtype=torch.long), ids], 1),
            attention_mask=torch.cat([torch.ones(len(words), 1, dtype=torch.bool), mask], 1),
            mask=mask,
            logprobs=logprobs,
            entropy=entropy,
            texts=tuple("".join(chr(one[0]) for one in row) for row in drawn),
            finished=tuple(
                is_over(row) and len(drawn[row]) == len(words[row]) and words[row].islower()
                for row in range(len(words))
            ),
        )


def answered(*texts, first=0):
    return Prompts(tuple(texts), {"answer": tuple(range(first, first + len(texts)))})


def test_two_steps_by_hand():
    policy = Typist()
    one = collect(policy, answered("a bb", "aaaa b", "c d", "eeee ffff"), seed=3)
    # "c d" is over after one character, "a bb" after two: that is enough, and the older comes first
    assert policy.calls == [(("a bb", "aaaa b", "c d", "eeee ffff"), {})]
    assert one.scored.sampled.texts == ("a", "bb", "c", "d")
    assert one.scored.rewards["long"].tolist() == [1, 2, 201, 201]  # the answers are 0 and 2
    assert one.rollout.advantages[:, 0].tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert one.is_fresh
    assert one.metrics["completion/carried_fraction"] == 0
    assert one.num_tokens == (1 + 2) + (2 + 1) + (1 + 1) + (2 + 2)
    left = one.carried
    assert left.prompts == Prompts(("aaaa b", "eeee ffff"), {"answer": (1, 3)})
    assert left.sampled.texts == ("aa", "b", "ee", "ff")
    assert left.sampled.finished == (False, True, False, False)

    two = collect(policy, answered("x y", "zzz z", "not asked", "nor this", first=4), seed=5, carried=left)
    # "x y" is over first, the two old ones together two characters later: they are the oldest
    assert policy.calls[1] == (("aaaa b", "eeee ffff", "x y", "zzz z"), {0: 2, 1: 1, 2: 2, 3: 2})
    assert two.scored.prompts == Prompts(("aaaa b", "eeee ffff"), {"answer": (1, 3)})
    assert two.scored.rewards["long"].tolist() == [104, 101, 304, 304]
    assert two.rollout.old_logprobs.tolist() == [[-3, -3, -5, -5], [-3, 0, 0, 0], [-3, -3, -5, -5], [-3, -3, -5, -5]]
    assert_close(two.scored.sampled.entropy[0], torch.tensor([0.3, 0.3, 0.5, 0.5]))
    assert not two.is_fresh
    assert two.metrics["completion/carried_fraction"] == pytest.approx((2 + 1 + 2 + 2) / (4 + 1 + 4 + 4))
    assert two.num_tokens == 2 + 2 + 2 + (1 + 1) + (2 + 1)
    assert two.carried.prompts == Prompts(("x y", "zzz z"), {"answer": (4, 5)})
    assert two.carried.sampled.texts == ("x", "y", "zz", "z")

    three = collect(policy, answered("ppp qq", "r s", "no", "no", first=6), seed=7, carried=two.carried)
    # "x y" was over before, "zzz z" and "r s" are after one character: the youngest waits, over as it is
    assert three.scored.sampled.texts == ("x", "y", "zzz", "z")
    assert three.rollout.old_logprobs.tolist() == [[-5, 0, 0], [-5, 0, 0], [-5, -5, -7], [-5, 0, 0]]
    assert three.carried.sampled.texts == ("p", "q", "r", "s")
    assert three.flops == 3 + 1 + 1 + 1 + 1  # of all completions that were not over before: "x", "y" and the second "z"
    assert three.carried.sampled.finished == (False, False, True, True)
    assert three.carried.over(8) == [False, True]


def test_a_completion_at_its_longest_is_over_and_not_finished():
    found = collect(Typist(), ["AAAAAAA b", "aaaaaaa b", "cc d", "eeeeee ffff"], max_new_tokens=2)
    assert found.scored.sampled.texts == ("AA", "b", "aa", "b")
    assert found.scored.sampled.finished == (False, True, False, True)
    assert found.carried.over(2) == [True, True]
    again = collect(Typist(), ["g h"] * 4, carried=found.carried, max_new_tokens=2)
    assert again.scored.sampled.texts == ("cc", "d", "ee", "ff")
    assert again.metrics["completion/carried_fraction"] == 1


def test_completions_that_are_carried_under_a_lower_limit_are_cut():
    first = collect(Typist(), ["a b", "aaaaaa bbb", "cccc dddd", "ee ffff"], max_new_tokens=8)
    assert first.carried.sampled.texts == ("aaaa", "bbb", "ee", "ffff")
    assert first.carried.sampled.finished == (False, True, True, True)
    assert first.carried.cut(3).sampled.finished == (False, True, True, False)
    assert first.carried.cut(4) is first.carried
    second = collect(Typist(), ["x y"] * 4, carried=first.carried, max_new_tokens=3)
    assert second.scored.sampled.texts == ("aaa", "bbb", "ee", "fff")
    assert second.scored.sampled.finished == (False, True, True, False)
    assert second.rollout.mask.shape == (4, 3)


@pytest.mark.parametrize(
    ("change", "columns"),
    [({"group_size": 3}, "answer"), ({}, "solution"), ({"over_sample": 1.0}, "answer")],
    ids=["group size", "columns", "off"],
)
def test_groups_that_do_not_fit_any_more_are_left_out_with_a_warning(change, columns, caplog):
    first = collect(Typist(), ["a b c", "aaaa b c", "c d e", "eeee f g"])
    asked = Prompts(("r s t", "u v w", "x y z", "j k l"), {columns: (1, 2, 3, 4), "answer": (1, 2, 3, 4)})
    second = collect(Typist(), asked, carried=first.carried, **change)
    assert second.scored.prompts.texts[:2] == ("r s t", "u v w")
    assert second.is_fresh
    assert "2 groups of the last rollout have another size or other" in caplog.text


@pytest.mark.parametrize("value", [torch.ones(2), [object()]])
def test_columns_that_no_checkpoint_holds_are_refused_at_the_first_step(value):
    asked = Prompts(("a b", "c d"), {"answer": (1, 2), "other": (None, value)})
    with pytest.raises(ValueError, match=r"rollout\.over_sample: column 'other' of the data has .*: allowed are texts"):
        collect(Typist(), asked)
    collect(Typist(), asked, over_sample=1.0)


def test_what_is_carried_survives_a_checkpoint(tmp_path):
    columns = {"answer": (1, 2, 3, 4), "other": ([1, {"x": (None, 2.5)}], "b", True, {3: "c"})}
    asked = Prompts(("a b", [{"role": "user", "content": "c"}], [4, 5], "ee ff"), columns)
    carried = Unfinished(asked, collect(Typist(), ["aa b", "c ddd", "e f", "g hh"], over_sample=1.0).scored.sampled)
    torch.save(carried.state(), tmp_path / "state")
    back = restored(torch.load(tmp_path / "state", weights_only=True))
    assert back.prompts == asked
    for name, value in vars(carried.sampled).items():
        found = getattr(back.sampled, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    scored = collect(Typist(), ["aa b", "c ddd"], over_sample=1.0).scored
    torch.save(scored.state(), tmp_path / "scored")
    assert restored(torch.load(tmp_path / "scored", weights_only=True)).rewards.keys() == scored.rewards.keys()


# --- real policies ---------------------------------------------------------------------------------------------------

PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food", "a", "bb 7", "half as many"]


def random_llama(directory) -> HFPolicy:
    path = write_checkpoint(directory, "llama", chat=False)
    policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    policy.end_ids = list(range(30))  # of 400 tokens: lengths differ
    return policy


def test_old_tokens_keep_their_logprobs_and_new_ones_are_of_the_new_policy(tmp_path):
    torch.manual_seed(0)
    policy = random_llama(tmp_path)
    pieces, carried, mixed = {}, None, 0
    for seed in range(1, 7):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
        asked = Prompts(tuple(PROMPTS), {"answer": tuple(range(10 * seed, 10 * seed + 6))})
        found = collect(policy, asked, seed=seed, carried=carried, over_sample=1.5, max_new_tokens=30, temperature=0.8)
        assert len(found.scored.prompts) == 4
        assert len(found.rollout) == 8
        carried = found.carried
        groups = [(found.scored.prompts, found.scored.sampled), (carried.prompts, carried.sampled)]
        for prompts, sampled in groups:
            now, entropies = policy.logprobs_and_entropy(sampled, temperature=0.8, entropy=True)
            for row in range(len(sampled)):
                key = prompts.columns["answer"][row // 2], row % 2
                mask = sampled.mask[row]
                ids, logprobs = sampled.ids[row, -len(mask) :][mask].tolist(), sampled.logprobs[row][mask].tolist()
                old_ids, old_logprobs = pieces.get(key, ([], []))
                assert ids[: len(old_ids)] == old_ids
                assert logprobs[: len(old_ids)] == old_logprobs
                new = torch.arange(len(mask)) >= len(old_ids)
                assert_close(sampled.logprobs[row][mask & new], now[row][mask & new], rtol=0, atol=1e-4)
                assert_close(sampled.entropy[row][mask & new], entropies[row][mask & new], rtol=0, atol=1e-4)
                if old_ids and len(ids) > len(old_ids):
                    mixed += 1
                    # The policies differ by more than rounding.
                    assert (sampled.logprobs[row][mask & ~new] - now[row][mask & ~new]).abs().max() > 1e-3
                pieces[key] = ids, logprobs
                # Nothing follows an end, and what has none is at its longest or goes on.
                assert not set(ids[:-1]) & set(policy.end_ids)
                assert sampled.finished[row] == bool(ids and ids[-1] in policy.end_ids)
        assert torch.equal(found.rollout.old_logprobs, found.scored.sampled.logprobs)
    assert mixed > 5


class Constant(nn.Module):
    """Tokens with probabilities like the weights [V], whatever came before."""

    def __init__(self, weights):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(weights).log())

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


class Letters:
    eos_token_id = 0

    def encode(self, text):
        return [1] * len(text)

    def decode(self, ids):
        return "." * len(ids)


MEAN = 10.0
"""Tokens of a completion that ends with each with probability 1/10, whatever came before: geometric."""


def geometric() -> PlainPolicy:
    return PlainPolicy(Constant([1.0, 4.5, 4.5]), Letters())


@pytest.mark.slow
def test_short_groups_come_first_and_over_many_steps_each_is_trained_on_once():
    policy, trained, begun = geometric(), Counter(), Counter()
    lengths, fractions, carried = [], [], None
    for step in range(150):
        asked = Prompts(("p",) * 16, {"answer": tuple(range(16 * step, 16 * step + 16))})
        found = collect(policy, asked, seed=step, carried=carried, max_new_tokens=200)
        begun.update(asked.columns["answer"][: 16 - (len(carried.prompts) if carried else 0)])
        carried = found.carried
        assert len(found.scored.prompts) == 8
        trained.update(found.scored.prompts.columns["answer"])
        lengths.append(found.scored.sampled.mask.sum(-1).float())
        fractions.append(float(found.metrics["completion/carried_fraction"]))
    # Each once: what was begun is trained on or still in flight, and in flight are 8 groups.
    assert set(trained.values()) == set(begun.values()) == {1}
    in_flight = set(carried.prompts.columns["answer"])
    assert len(in_flight) == 8
    assert set(begun) == set(trained) | in_flight
    assert not set(trained) & in_flight
    # The first step: of 16 groups the 8 that end first. Deviations are 9.5 tokens, of the mean of 16 about 2.4.
    firsts = torch.cat(
        [
            collect(policy, ["p"] * 16, seed=1000 + seed, max_new_tokens=200).scored.sampled.mask.sum(-1).float()
            for seed in range(20)
        ]
    )
    assert firsts.mean() < MEAN - 4 * firsts.std() / len(firsts) ** 0.5
    assert firsts.mean() < 0.75 * MEAN
    # All steps: 2400 completions, whose mean has a deviation of 0.2; in flight at the end are 16.
    everything = torch.cat(lengths)
    assert abs(everything.mean() - MEAN) < 0.8
    assert abs(torch.cat(lengths[50:]).mean() - MEAN) < 1.0
    assert fractions[0] == 0
    assert 0.1 < sum(fractions[10:]) / len(fractions[10:]) < 0.9


def test_completions_that_all_end_together_are_those_of_a_plain_rollout(tmp_path):
    policy = random_llama(tmp_path)
    policy.end_ids = []
    plain = collect(policy, PROMPTS[:3], over_sample=1.0, max_new_tokens=5)
    found = collect(policy, PROMPTS, over_sample=2.0, max_new_tokens=5)
    assert found.scored.sampled.texts == plain.scored.sampled.texts
    assert_close(found.rollout.old_logprobs, plain.rollout.old_logprobs, rtol=0, atol=1e-5)
    assert found.scored.rewards["long"].tolist() == plain.scored.rewards["long"].tolist()
    assert plain.carried is None
    assert "completion/carried_fraction" not in plain.metrics


def test_a_budget_for_keys_and_values_loses_nothing(tmp_path):
    policy, carried, known = random_llama(tmp_path), None, {}
    for seed in range(4):
        asked = Prompts(tuple(PROMPTS), {"answer": tuple(range(10 * seed, 10 * seed + 6))})
        # room for about four completions at a time
        found = collect(policy, asked, seed=seed, carried=carried, max_new_tokens=20, kv_cache_gib=6e-5)
        carried = found.carried
        for prompts, sampled in [(found.scored.prompts, found.scored.sampled), (carried.prompts, carried.sampled)]:
            for row in range(len(sampled)):
                key = prompts.columns["answer"][row // 2], row % 2
                ids = sampled.ids[row, -sampled.mask.shape[1] :][sampled.mask[row]].tolist()
                assert ids[: len(known.get(key, []))] == known.get(key, [])
                known[key] = ids
        assert (found.scored.sampled.mask.sum(-1) > 0).all()
    assert any(not ids for ids in known.values())


# --- settings and data -----------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_said_before_anything_loads():
    for overrides, message in (
        (["rollout.over_sample=0.9"], "rollout.over_sample=0.9: allowed is a number >= 1"),
        (
            ["rollout.over_sample={_target_: grpo_lightning.varying.Linear, start: 2, end: 1, steps: 5}"],
            "rollout.over_sample: allowed is one number >= 1: batches have as many prompts in every step",
        ),
        (
            ["rollout=dynamic_sampling", "rollout.over_sample=1.5"],
            "rollout.over_sample=1.5: allowed is 1 with rollout.max_tries=3",
        ),
    ):
        (found,) = problems(*overrides)
        assert message in found


@pytest.mark.parametrize(
    ("prompts", "ratio", "expected"),
    [(20, 1.15, 23), (50, 1.1, 55), (25, 2.2, 55), (3, 4 / 3, 4), (7, 1.5, 11), (1, 1.05, 2), (96, 1.7, 164)],
)
def test_a_batch_holds_what_is_in_flight_and_the_rest_follows_from_it(prompts, ratio, expected):
    data = PromptData(
        train=None,
        validation=None,
        prompts_per_step=prompts,
        over_sample=ratio,
        steps=1,
        validate_every=None,
        validation_size=1,
        validation_batch_size=1,
        max_prompt_length=None,
        seed=0,
        verifier="",
    )
    assert data.prompts_per_batch == expected
    found = collect(Typist(), ["a b"] * data.prompts_per_batch, over_sample=ratio)
    assert len(found.scored.prompts) == prompts
    assert len(found.carried.prompts) == data.prompts_per_batch - prompts


# --- whole runs ------------------------------------------------------------------------------------------------------

RUN = ("rollout.over_sample=1.5", "data.prompts_per_step=4", "logger=none", "optimizer.lr=0.02")


@pytest.mark.slow
def test_a_run_trains_on_as_many_groups_each_step_and_goes_on_exactly(tmp_path, monkeypatch):
    seen = []
    plain = Collector.collect

    def recording(collector, *given, **named):
        found = plain(collector, *given, **named)
        seen.append((found.scored.prompts.texts, found.rollout.old_logprobs, found.is_fresh, dict(found.metrics)))
        return found

    monkeypatch.setattr(Collector, "collect", recording)
    whole = small_run(tmp_path / "whole", *RUN, "steps=5", "validation.every=5")
    unbroken = list(seen)
    assert all(len(texts) == 4 and len(logprobs) == 16 for texts, logprobs, _, _ in unbroken)
    assert [is_fresh for _, _, is_fresh, _ in unbroken] == [
        metrics["completion/carried_fraction"] == 0 for *_, metrics in unbroken
    ]
    assert sum(not is_fresh for _, _, is_fresh, _ in unbroken) >= 3
    assert whole.metrics["policy/ratio_max"] > 1.0001
    seen.clear()
    small_run(tmp_path / "broken", *RUN, "steps=3", "validation.every=5")
    continued = small_run(tmp_path / "broken", *RUN, "steps=5", "validation.every=5", "checkpoint=last")
    assert len(seen) == 5
    for (texts, logprobs, _, metrics), (other_texts, other_logprobs, _, other) in zip(unbroken, seen, strict=True):
        assert texts == other_texts
        assert torch.equal(logprobs, other_logprobs)
        assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
            {name: float(value) for name, value in other.items()}, rel=0, abs=0, nan_ok=True
        )
    for name, weight in whole.policy.named_parameters():
        assert torch.equal(dict(continued.policy.named_parameters())[name], weight)


@pytest.mark.slow
def test_two_processes_stop_each_at_its_share_and_go_on_exactly(tmp_path):
    common = [
        *("rollout.over_sample=1.5", "data.prompts_per_step=5", "rollout.group_size=4", "rollout.temperature=2.2"),
        *("validation.every=4", "data.validation_size=4", "validation.samples_per_prompt=1", "validation.ks=[1]"),
        *("callbacks.checkpoint.every=1", "optimizer.lr=0.001", "schedule=constant", "module.gather_weights=false"),
    ]
    finish(start(2, tmp_path, "fsdp", {"whole": [*common, "steps=4"], "broken": [*common, "steps=2"]}))
    finish(start(2, tmp_path, "fsdp", {"broken": [*common, "steps=4", "checkpoint=last"]}))
    whole, broken = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    )
    assert [len(line["texts"]) for line in whole] == [20] * 4
    assert whole[0]["metrics"]["completion/carried_fraction"] == 0
    assert any(line["metrics"]["completion/carried_fraction"] > 0 for line in whole)
    assert [line["texts"] for line in broken] == [line["texts"] for line in whole]
    one, other = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "broken")
    )
    assert all(torch.equal(one[name], value) for name, value in other.items())
