"""Truncated sampling: every token is scored within the set that it was sampled from, wherever it is scored.

The native sampler returns the sets; an engine does not, so they are computed again from the policy's logits.
"""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lightning.advantage import centered
from grpo_lightning.loss import PolicyLoss, clipped, constant, k3
from grpo_lightning.module.update import SelfCheckError, check_rollout
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.shared_prompt import SharedPath
from grpo_lightning.reference import frozen_copy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler.token_sampling import engine_filters, support_of_tokens
from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.lm_head import unshared_logprobs
from grpo_lightning.types import Prompts, Rollout, Sampling, SamplingSupport
from tests.support import stand_in
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import finish, main, start
from tests.support.sampling import FREE, NUCLEUS, PROMPTS, generate, opened
from tests.vllm.support import engine, sync_weights, tiny

CLIPPED = functools.partial(clipped, epsilon_low=0.2, epsilon_high=0.2)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", chat=False)


@pytest.fixture
def policy(checkpoint):
    found = opened(checkpoint, end_ids=None)
    with torch.no_grad():  # with random weights all tokens are about as likely; with these some are not
        found.model.get_output_embeddings().weight.mul_(6.0)
    return found


@pytest.fixture
def vllm(monkeypatch):
    stand_in.install(monkeypatch)
    return engine()


def rollout(policy, *, group_size=4, noise=0.2):
    """What the policy samples, with noise on what is compared with it."""
    rows = generate(policy, PROMPTS, group_size=group_size, sampling=Sampling(**NUCLEUS), seed=1)
    generator = torch.Generator().manual_seed(0)
    old, ref, advantages = noise * torch.randn(3, *rows.mask.shape, generator=generator) * rows.mask
    parts = (rows.logprobs + old, rows.logprobs + ref, advantages)
    return Rollout(rows.ids, rows.attention_mask, rows.mask, *parts, support=rows.support)


def gradients(policy, value):
    policy.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def tokens(rows):
    """[C] those in the mask, row by row."""
    return rows.ids[:, -rows.mask.shape[1] :][rows.mask].tolist()


def in_mask(support, mask):
    """The sets of the tokens in the mask, row by row."""
    return [one for one, counts in zip(support.flat.lists(), mask.flatten().tolist()) if counts]


# --- the sets --------------------------------------------------------------------------------------------------------

# row 0: {5, 7}, {2}, no token; row 1: the whole vocabulary, {0, 3, 9}, {4}
SUPPORT = SamplingSupport(int32([2, 1, 0], [0, 3, 1]), int32(5, 7, 2, 0, 3, 9, 4))


def test_sets_by_hand():
    turned = SUPPORT[torch.tensor([1, 0, 1])]
    assert turned.sizes.tolist() == [[0, 3, 1], [2, 1, 0], [0, 3, 1]]
    assert turned.ids.tolist() == [0, 3, 9, 4, 5, 7, 2, 0, 3, 9, 4]
    assert SUPPORT[torch.tensor([], dtype=torch.long)].sizes.shape == (0, 3)
    chosen = SUPPORT.select(torch.tensor([4, 3, 0]))
    assert (chosen.sizes.tolist(), chosen.ids.tolist()) == ([3, 0, 2], [0, 3, 9, 5, 7])
    assert SUPPORT.flat.lists() == [[5, 7], [2], [], [], [0, 3, 9], [4]]
    short = SUPPORT.narrow(2)
    assert (short.sizes.tolist(), short.ids.tolist()) == ([[2, 1], [0, 3]], [5, 7, 2, 0, 3, 9])
    spread = SUPPORT.select(torch.tensor([4, 0])).scatter(torch.tensor([3, 1]), (2, 2))
    assert (spread.sizes.tolist(), spread.ids.tolist()) == ([[0, 2], [0, 3]], [5, 7, 0, 3, 9])
    assert [part.lists() for part in SUPPORT.flat.split(4)] == [[[5, 7], [2], [], []], [[0, 3, 9], [4]]]
    everything = SamplingSupport.full_vocabulary(torch.ones(1, 1, dtype=torch.bool))
    joined = SamplingSupport.concatenate([short, SUPPORT, everything])
    assert joined.sizes.tolist() == [[2, 1, 0], [0, 3, 0], [2, 1, 0], [0, 3, 1], [0, 0, 0]]
    assert joined.ids.tolist() == [5, 7, 2, 0, 3, 9, 5, 7, 2, 0, 3, 9, 4]
    sets = SUPPORT.select(torch.tensor([4, 3, 5]))
    inside = [[0, 3, 9], list(range(10)), [4]]
    assert [(~row).nonzero().flatten().tolist() for row in sets.outside(10)] == inside


def test_sets_take_4_bytes_a_token_and_have_at_most_1024():
    class Flat(nn.Module):
        """All of 3,000 tokens equally likely."""

        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(3000))

        def forward(self, ids):
            return self.logits.expand(*ids.shape, 3000)

    policy = GenericPolicy(Flat())
    rows = generate(policy, [[1], [2]], group_size=3, sampling=Sampling(**FREE | {"top_p": 0.9}), seed=0)
    assert rows.support.sizes.tolist() == [[1024] * 12] * 6  # of a nucleus of 2,700
    bytes_of = [value.numel() * value.element_size() for value in (rows.support.sizes, rows.support.ids)]
    assert bytes_of == [4 * 6 * 12, 4 * 6 * 12 * 1024]
    assert_close(rows.logprobs, torch.full((6, 12), -6.931472))  # -log 1024
    assert_close(rows.entropy, torch.full((6, 12), 6.931472))
    assert_close(policy.logprobs(rows, temperature=1.0), rows.logprobs)


# --- the gradient, by enumeration ------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """The next token depends on the last one only; in float64."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(1.3 * torch.randn(5, 5, dtype=torch.float64, generator=generator))

    def forward(self, ids):
        return self.table[ids]


WORTH = torch.tensor([[0.3, -1.0, 0.7, 0.2, 0.9], [1.1, 0.4, -0.3, 0.8, -0.6]], dtype=torch.float64)
"""What each token is worth at the first and at the second place; what a completion is worth is their product."""


def test_the_expected_gradient_is_that_of_the_truncated_policy():
    policy, temperature = GenericPolicy(Bigram()), 0.8
    table = policy.model.table
    probabilities = (table / temperature).softmax(-1).detach()
    inside = torch.zeros(5, 5, dtype=torch.bool)
    for state, row in enumerate(probabilities):
        order = row.argsort(descending=True)
        count = int((row[order].cumsum(0) - row[order] < 0.8).sum())
        inside[state, order[:count]] = True
    assert 5 < int(inside.sum()) < 20
    sets = [row.nonzero().flatten().tolist() for row in inside]

    def chance(start, first, second):
        inner = (table / temperature).masked_fill(~inside, -1e300).softmax(-1)
        return inner[start, first] * inner[first, second]

    # exactly: the mean worth of completions of the prompt 4 under the truncated policy
    every = [(first, second) for first in sets[4] for second in sets[first]]
    worth = {pair: WORTH[0, pair[0]] * WORTH[1, pair[1]] for pair in every}
    assert sum(chance(4, *pair).item() for pair in every) == pytest.approx(1.0, abs=1e-12)
    (exact,) = torch.autograd.grad(sum(chance(4, *pair) * worth[pair] for pair in every), table)
    ids = torch.tensor([[4, *pair] for pair in every])
    real = torch.ones(len(every), 3, dtype=torch.bool)
    own = [[sets[4], sets[first]] for first, _ in every]
    rows = Rollout(
        ids=ids,
        attention_mask=real,
        mask=real[:, 1:],
        old_logprobs=torch.zeros(len(every), 2, dtype=torch.float64),
        ref_logprobs=torch.zeros(len(every), 2, dtype=torch.float64),
        advantages=torch.stack([worth[pair] for pair in every]).unsqueeze(-1).expand(-1, 2),
        support=SamplingSupport(
            int32(*[[len(one) for one in row] for row in own]),
            int32(*[token for row in own for one in row for token in one]),
        ),
    )
    logprobs, entropy = policy.logprobs_and_entropy(rows, temperature=temperature, entropy=True)
    chances = torch.stack([chance(4, *pair) for pair in every])
    assert_close(logprobs.sum(-1), chances.log(), rtol=0, atol=1e-12)
    loss = PolicyLoss(CLIPPED, k3, functools.partial(constant, length=1), 0.0, 0.0)
    rows = replace(rows, old_logprobs=logprobs.detach())
    weights = chances.detach().unsqueeze(-1).expand(-1, 2)  # how often each comes, in place of sampling it
    found, _ = loss(logprobs, entropy, rows, weights)
    (gradient,) = torch.autograd.grad(found, table, retain_graph=True)
    assert_close(-gradient, exact, rtol=0, atol=1e-10)
    assert exact.abs().max() > 0.05
    assert gradient[~inside].count_nonzero() == 0
    # and of the entropy
    inner = (table / temperature).masked_fill(~inside, -1e300).softmax(-1)
    expected = -(inner * inner.clamp(min=1e-300).log()).sum(-1)
    assert_close(entropy, torch.stack([expected[ids[:, 0]], expected[ids[:, 1]]], -1), rtol=0, atol=1e-12)
    (one,) = torch.autograd.grad(entropy[:, 0].mean() + entropy[0, 1], table)
    (other,) = torch.autograd.grad(expected[4] + expected[every[0][0]], table)
    assert_close(one, other, rtol=0, atol=1e-10)
    # The whole softmax trains another policy.
    whole = policy.logprobs(rows.without_support, temperature=temperature)
    (untruncated,) = torch.autograd.grad(loss(whole, None, rows.without_support, weights)[0], table)
    assert (untruncated + exact).abs().max() > 0.01


# --- what was sampled is what is scored ------------------------------------------------------------------------------


def warped(logits, sampling):
    """transformers' own filters, in the order of its ``generate``."""
    filters = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    filters += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    filters += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    filters += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList(filters)(None, logits)


def row_logits(policy, rows):
    """For each row its completion's token ids, and the logits of each by one forward pass of the row alone."""
    for row in range(len(rows)):
        ids, count = rows.ids[row][rows.attention_mask[row]], int(rows.mask[row].sum())
        with torch.no_grad():
            yield ids[len(ids) - count :], policy.model(ids.unsqueeze(0)).logits[0, len(ids) - count - 1 : -1]


def test_sets_are_those_of_transformers_and_logprobs_those_of_the_policy(policy):
    for options in (
        {"top_k": 7},
        {"min_p": 0.05, "temperature": 1.7},
        {"top_k": 2000, "top_p": 0.3},
        {"top_p": 0.9, "temperature": 0.6},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
        {"top_k": 1},
    ):
        sampling = Sampling(**FREE | options)
        sampled = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
        logprobs, entropy = policy.logprobs_and_entropy(sampled, temperature=sampling.temperature, entropy=True)
        assert_close(logprobs, sampled.logprobs, rtol=0, atol=1e-5)
        assert_close(entropy, sampled.entropy, rtol=0, atol=1e-5)
        sets = iter(in_mask(sampled.support, sampled.mask))
        for row, (ids, logits) in enumerate(row_logits(policy, sampled)):
            for place, (token, one) in enumerate(zip(ids, warped(logits, sampling))):
                own = next(sets)
                assert int(token) in own
                assert own == one.isfinite().nonzero().flatten().tolist(), options
                assert_close(sampled.logprobs[row, place], one.log_softmax(-1)[token], rtol=0, atol=1e-5)
        if options == {"top_k": 1}:
            assert sampled.logprobs.count_nonzero() == sampled.entropy.count_nonzero() == 0
    for options in (FREE, NUCLEUS | {"temperature": 0.0}):
        assert generate(policy, PROMPTS, group_size=1, sampling=Sampling(**options), seed=2).support is None


def test_the_shared_and_the_plain_path_agree(policy):
    whole = rollout(policy, group_size=5)
    sizes = whole.support.sizes * (torch.arange(len(whole)) % 3 > 0).unsqueeze(-1)
    some = SamplingSupport(sizes, whole.support.select(sizes.flatten().nonzero().flatten()).ids)
    for bonus, support in ((0.0, whole.support), (0.0, some), (0.01, some)):
        rows = replace(whole, support=support)
        loss = PolicyLoss(CLIPPED, k3, functools.partial(constant, length=12), 0.04, bonus)
        weights = loss.weights(rows.mask)
        known = loss.gradient_by_logprobs(rows, weights, on_policy=False)
        assert (known is None) == bool(bonus)
        wanted = {"temperature": 0.6, "entropy": bool(bonus)}
        found = []
        for logprobs, entropy in (
            SharedPath.from_model(policy.model).logprobs_and_entropy(rows, **wanted, loss_gradient=known),
            unshared_logprobs(policy.model, rows, **wanted),
            GenericPolicy(policy.model).logprobs_and_entropy(rows, **wanted),
        ):
            slopes = gradients(policy, loss(logprobs, entropy, rows, weights)[0])
            found.append((logprobs.detach(), slopes, entropy.detach() if bonus else torch.zeros(1)))
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                assert_close(one, two, rtol=0, atol=1e-5 * max(1.0, float(one.abs().max())))
        assert found[0][1].abs().max() > 1e-2


# --- rollouts --------------------------------------------------------------------------------------------------------


def collect(policy, reference=None, *, options=NUCLEUS, **context):
    collector = Collector(
        **options | {"stop": [], "advantage": centered, "outcome": None, "threshold": 1.0, "group_size": 4},
        reward={"long": RewardSpec(lambda completions: [float(len(text)) for text in completions], 1.0)},
    )
    prompts = Prompts(tuple(PROMPTS), {})
    return collector.collect(policy, reference, prompts, context=StepContext(seed=1, microbatch_tokens=99, **context))


def test_the_reference_is_not_truncated(policy):
    reference = frozen_copy(policy)
    found = collect(policy, reference)
    rows = found.rollout
    assert_close(rows.ref_logprobs, policy.logprobs(rows.without_support, temperature=0.6), rtol=0, atol=1e-5)
    # The two differ by the logarithm of the probability of the set, which is at least .95.
    difference = (rows.old_logprobs - rows.ref_logprobs)[rows.mask]
    assert -1e-5 < difference.min() < difference.max() < 0.0513  # -log .95
    assert difference.max() > 0.02
    check_rollout(policy, reference, rows, Sampling(**NUCLEUS), 99)
    with pytest.raises(SelfCheckError, match="differ from the sampler's"):
        check_rollout(policy, reference, rows.without_support, Sampling(**NUCLEUS), 99)
    sizes = rows.support.sizes[rows.mask].float()
    assert found.metrics["completion/set_size_mean"] == pytest.approx(float(sizes.mean()))
    assert found.metrics["completion/set_full_fraction"] == 0
    free = collect(policy, reference, options=NUCLEUS | {"top_p": 1.0})
    assert not any(name.startswith("completion/set") for name in free.metrics)


# --- an engine's sets, by hand ---------------------------------------------------------------------------------------


def test_what_an_engine_is_asked_for():
    for options, top_p, top_k, min_p in (
        (FREE, 1.0, 0, 0.0),
        (FREE | {"top_p": 0.9}, 0.9, 1024, 0.0),
        (FREE | {"min_p": 0.1}, 1.0, 1024, 0.1),
        (FREE | {"top_k": 2000}, 1.0, 1024, 0.0),
        (FREE | {"top_k": 7}, 1.0, 7, 0.0),
        (NUCLEUS | {"temperature": 0.0}, 1.0, 0, 0.0),
    ):
        assert engine_filters(Sampling(**options)) == {"top_p": top_p, "top_k": top_k, "min_p": min_p}


def test_an_engines_sets_by_hand():
    probabilities = [0.15, 0.5, 0.05, 0.2, 0.1]
    for changes, expected in (
        ({"top_p": 0.8}, [0, 1, 3]),  # .5 + .2 is less than .8, with .15 it is not
        ({"top_p": 0.7}, [1, 3]),  # .5 + .2 is .7
        ({"top_k": 2}, [1, 3]),
        ({"min_p": 0.25}, [0, 1, 3]),  # .125 at least
        ({"min_p": 0.25, "top_k": 2}, [1, 3]),
        ({"top_k": 3, "top_p": 0.6}, [1, 3]),  # .6 of .85 is .51, which .5 is not
        ({"top_k": 3, "top_p": 0.58}, [1]),  # .58 of .85 is .493
        # min_p leaves .5, .2 and .15; .58 of these is .493. The other way round .5 of 1 would not reach .58.
        ({"min_p": 0.25, "top_p": 0.58}, [1]),
        ({"min_p": 0.25, "top_p": 0.6}, [1, 3]),
        ({"min_p": 1e-9, "top_k": 5, "top_p": 1.0}, [0, 1, 2, 3, 4]),
    ):
        given = torch.tensor([probabilities] * 5).log() + torch.tensor([[0.0], [7.0], [-3.0], [100.0], [2.0]])
        found = support_of_tokens(given, torch.arange(5), Sampling(**FREE | changes))
        assert found.support.lists() == [sorted({*expected, token}) for token in range(5)], changes
        assert found.outside.tolist() == [token not in expected for token in range(5)]
    ruled_out = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf]])
    found = support_of_tokens(ruled_out, torch.tensor([2, 1]), Sampling(**FREE | {"top_k": 3}))
    assert found.support.lists() == [[0, 2], [1]]
    # A large set is that of the 1,024 likeliest and the sampled one.
    given = torch.linspace(0, 1, 3000).unsqueeze(0)
    found = support_of_tokens(given.clone(), torch.tensor([5]), Sampling(**FREE | {"top_p": 0.99999}))
    assert found.support.lists() == [[5, *range(3000 - 1024, 3000)]]
    half = support_of_tokens(given, torch.tensor([2999]), Sampling(**FREE | {"top_p": 0.5}))
    # of the 1,024 likeliest, whose probabilities go with exp(i / 2999): half of their sum
    weights = (torch.arange(1976, 3000).double() / 2999).exp()
    assert int(half.support.sizes) == int((weights.flip(0).cumsum(0) < 0.5 * weights.sum()).sum()) + 1


# --- an engine's sets, on every path ---------------------------------------------------------------------------------


def engine_sets(policy, rows, sampling):
    """The sets of every token in the mask, row by row: one forward pass for each row, and vLLM's filters by hand."""
    asked = replace(sampling, top_k=min(sampling.top_k or 1024, 1024))
    lefts = [stand_in.filtered(one / sampling.temperature, asked) for _, own in row_logits(policy, rows) for one in own]
    return [left.isfinite().nonzero().flatten().tolist() for left in lefts]


def test_sets_are_those_of_the_native_sampler_on_every_path(policy, monkeypatch):
    monkeypatch.setattr(lm_head, "CHUNK", 5 * policy.model.config.vocab_size + 3)  # chunks of five tokens
    for filters in (
        {"top_k": 7},
        {"min_p": 0.05},
        {"top_p": 0.3},
        {"top_k": 2000, "top_p": 0.9},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ):
        sampling = Sampling(**FREE | filters | {"temperature": 0.6})
        rows = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
        policy.share_prompts = True
        found = [policy.support(rows, sampling), GenericPolicy(policy.model).support(rows, sampling)]
        policy.share_prompts = False
        found.append(policy.support(rows, sampling))
        by_hand, in_another_order = engine_sets(policy, rows, sampling), {"min_p", "top_p"} <= filters.keys()
        for one in found:
            assert not one.outside.any() or in_another_order
            expected = [sorted({*own, token}) for own, token in zip(by_hand, tokens(rows))]
            assert in_mask(one.support, rows.mask) == expected, filters
            assert one.support.sizes[~rows.mask].count_nonzero() == 0
            if not in_another_order:
                assert torch.equal(one.support.sizes, rows.support.sizes)
                assert torch.equal(one.support.ids, rows.support.ids)


# --- a stand-in for an engine ----------------------------------------------------------------------------------------


def test_a_rollout_of_an_engine_is_scored_as_it_was_sampled(vllm):
    policy = tiny()
    with sync_weights(vllm, policy):
        found = collect(policy, sampler=vllm)
    rows, sets = found.rollout, stand_in.LLM.last.llm_engine.sets
    assert in_mask(rows.support, rows.mask) == [own for row in range(len(rows)) for own in sets[str(row)]]
    assert found.metrics["sampler/support_miss_rate"] == 0
    assert found.metrics["completion/set_size_mean"] > 1
    assert_close(policy.logprobs(rows, temperature=0.6), rows.old_logprobs, rtol=0, atol=1e-4)
    assert found.flops == 2 * policy.flops(found.scored.sampled)
    # An engine returns no entropy; in its place is -log p, of the probability in the set.
    mean = -float(rows.old_logprobs[rows.mask].mean())
    assert found.metrics["policy/entropy"] == pytest.approx(mean, abs=1e-6)


def test_the_self_check_forgives_what_lies_on_a_bound_and_no_more(policy):
    sampling = Sampling(**NUCLEUS)
    rows = generate(policy, PROMPTS, group_size=20, sampling=sampling, seed=1)
    zeros, count = torch.zeros_like(rows.logprobs), int(rows.mask.sum())
    assert count > 300

    def checked(wrong, **more):
        numbers = rows.mask.flatten().nonzero().flatten()[:wrong]
        old = rows.logprobs.flatten().index_add(0, numbers, torch.full((wrong,), 0.02)).view_as(rows.logprobs)
        given = Rollout(rows.ids, rows.attention_mask, rows.mask, old, zeros, zeros, support=rows.support)
        check_rollout(policy, None, given, sampling, 10**6, **more)

    checked(0)
    checked(count // 100, filtered=True)
    for wrong, more in ((1, {}), (count // 100 + 1, {"filtered": True}), (count, {"filtered": True})):
        with pytest.raises(SelfCheckError, match="differ from the sampler's"):
            checked(wrong, **more)


# --- whole runs ------------------------------------------------------------------------------------------------------


SEVERAL = (
    *("rollout.top_p=0.8", "data.prompts_per_step=3", "rollout.group_size=4", "validation.ks=[1]"),
    *("data.validation_size=4", "validation.samples_per_prompt=1"),
)
STAGED = [
    *SEVERAL,
    *("sampler._target_=tests.support.stand_in.Staged", "+sampler.seed=0", "logger=none", "rollout.temperature=0.9"),
    *("rollout.max_new_tokens=8", "steps=1", "validation.every=1", "module.self_check=false"),
    *("correction=token_truncation", "module.microbatch_tokens=60"),
]


def metrics_of(directory, name):
    return [json.loads(line)["metrics"] for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_compute_an_engines_sets_together(monkeypatch, tmp_path):
    stand_in.install(monkeypatch)
    words = [*STAGED, "+sampler.disturbed=0.05"]
    main(tmp_path, "cpu", {"one": words})
    finish(start(2, tmp_path, "fsdp", {"two": words}))
    (one,), (two,) = metrics_of(tmp_path, "one"), metrics_of(tmp_path, "two")
    assert one["sampler/support_miss_rate"] > 0.01
    for name in ("sampler/support_miss_rate", "completion/set_size_mean", "policy/mismatch_mean", "optim/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name
