"""Truncated sampling: every token is scored out of the set that it was drawn from, wherever it is scored."""

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

from grpo_lightning import recording
from grpo_lightning.advantage import centered
from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.loss import PolicyLoss, clipped, constant, k3
from grpo_lightning.module.selfcheck import SelfCheckError, check_rollout
from grpo_lightning.module.update import accumulate
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.policy.shared_prompt import SharedPath
from grpo_lightning.reference import frozen_copy
from grpo_lightning.reward import RewardSpec
from grpo_lightning.rollout import Collector
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.transformer.logprobs import separate
from grpo_lightning.types import Prompts, Rollout, Sampling, SamplingSupport
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import finish, start
from tests.support.running import small_run
from tests.support.sampling import generate

PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food in the world"]
FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 12}
NUCLEUS = FREE | {"temperature": 0.6, "top_p": 0.95}
CLIPPED = functools.partial(clipped, epsilon_low=0.2, epsilon_high=0.2)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def sharpened(policy, factor=6.0):
    """With random weights all tokens are about as likely; with these some are not."""
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(factor)
    return policy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", chat=False)


@pytest.fixture
def policy(checkpoint):
    return sharpened(load(str(checkpoint), dtype="float32", attn_implementation="sdpa", trust_remote_code=False))


def rollout(policy, *, group_size=4, seed=1, options=NUCLEUS, noise=0.2):
    """What the policy samples, with noise on what is compared with it."""
    sampled = generate(policy, PROMPTS, group_size=group_size, sampling=Sampling(**options), seed=seed)
    generator = torch.Generator().manual_seed(0)
    old, ref, advantages = noise * torch.randn(3, *sampled.mask.shape, generator=generator) * sampled.mask
    return Rollout(
        sampled.ids,
        sampled.attention_mask,
        sampled.mask,
        sampled.logprobs + old,
        sampled.logprobs + ref,
        advantages,
        support=sampled.support,
    )


# --- the sets --------------------------------------------------------------------------------------------------------

# row 0: {5, 7}, {2}, no token; row 1: the whole vocabulary, {0, 3, 9}, {4}
KEPT = SamplingSupport(int32([2, 1, 0], [0, 3, 1]), int32(5, 7, 2, 0, 3, 9, 4))


def test_rows_of_sets_by_hand():
    turned = KEPT[torch.tensor([1, 0, 1])]
    assert turned.sizes.tolist() == [[0, 3, 1], [2, 1, 0], [0, 3, 1]]
    assert turned.ids.tolist() == [0, 3, 9, 4, 5, 7, 2, 0, 3, 9, 4]
    assert KEPT[torch.tensor([], dtype=torch.long)].sizes.shape == (0, 3)
    chosen = KEPT.of(torch.tensor([4, 3, 0]))
    assert (chosen.sizes.tolist(), chosen.ids.tolist()) == ([3, 0, 2], [0, 3, 9, 5, 7])
    assert KEPT.flat.lists() == [[5, 7], [2], [], [], [0, 3, 9], [4]]
    short = KEPT.narrow(2)
    assert (short.sizes.tolist(), short.ids.tolist()) == ([[2, 1], [0, 3]], [5, 7, 2, 0, 3, 9])
    assert [part.lists() for part in KEPT.each([2, 3])] == [[[5, 7], [2]], [[], [0, 3, 9], [4]]]
    assert [part.lists() for part in KEPT.flat.split(4)] == [[[5, 7], [2], [], []], [[0, 3, 9], [4]]]
    joined = SamplingSupport.concatenate([short, KEPT, SamplingSupport.everything(torch.ones(1, 1, dtype=torch.bool))])
    assert joined.sizes.tolist() == [[2, 1, 0], [0, 3, 0], [2, 1, 0], [0, 3, 1], [0, 0, 0]]
    assert joined.ids.tolist() == [5, 7, 2, 0, 3, 9, 5, 7, 2, 0, 3, 9, 4]


def test_what_is_outside_by_hand():
    sets = KEPT.of(torch.tensor([4, 3, 5]))
    inside = [[0, 3, 9], list(range(10)), [4]]
    assert [(~row).nonzero().flatten().tolist() for row in sets.outside(10)] == inside
    logits = torch.arange(30.0).view(3, 10)
    found = sets.restrict_(logits.clone())
    for row, tokens in enumerate(inside):
        assert found[row].isfinite().nonzero().flatten().tolist() == tokens
        assert torch.equal(found[row, tokens], logits[row, tokens])


def test_wrong_sets_are_refused():
    with pytest.raises(ValueError, match=r"ids: expected \[3\], got \[2\]"):
        SamplingSupport(int32([2, 1]), int32(5, 7))
    with pytest.raises(ValueError, match="sizes: expected int32, got torch.int64"):
        SamplingSupport(torch.tensor([[1]]), int32(5))
    rows = Rollout(*[torch.zeros(2, 4)] * 2, torch.ones(2, 3, dtype=torch.bool), *[torch.zeros(2, 3)] * 3)
    with pytest.raises(ValueError, match=r"support: expected \(2, 3\), got \(2, 2\)"):
        replace(rows, support=KEPT.narrow(2))
    assert replace(rows, support=KEPT)[torch.tensor([1])].support.ids.tolist() == [0, 3, 9, 4]
    assert replace(rows, support=KEPT).without_support.support is None


def test_sets_take_4_bytes_for_each_of_their_tokens_and_never_more_than_1024(tmp_path):
    class Flat(nn.Module):
        """All of 3,000 tokens equally likely."""

        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(3000))

        def forward(self, ids):
            return self.logits.expand(*ids.shape, 3000)

    policy = GenericPolicy(Flat())
    sampled = generate(policy, [[1], [2]], group_size=3, sampling=Sampling(**FREE | {"top_p": 0.9}), seed=0)
    assert sampled.support.sizes.tolist() == [[1024] * 12] * 6  # of a nucleus of 2,700
    bytes_of = [value.numel() * value.element_size() for value in (sampled.support.sizes, sampled.support.ids)]
    assert bytes_of == [4 * 6 * 12, 4 * 6 * 12 * 1024]
    assert_close(sampled.logprobs, torch.full((6, 12), -6.931472))  # -log 1024
    assert_close(sampled.entropy, torch.full((6, 12), 6.931472))
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs)
    few = generate(policy, [[1], [2]], group_size=3, sampling=Sampling(**FREE | {"top_k": 5}), seed=0)
    assert len(few.support.ids) == 5 * 6 * 12


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
    assert float(sum(chance(4, *pair) for pair in every)) == pytest.approx(1.0, abs=1e-12)
    value = sum(chance(4, *pair) * worth[pair] for pair in every)
    (exact,) = torch.autograd.grad(value, table)
    ids = torch.tensor([[4, *pair] for pair in every])
    real = torch.ones(len(every), 3, dtype=torch.bool)
    tokens = [[sets[4], sets[first]] for first, _ in every]
    rows = Rollout(
        ids=ids,
        attention_mask=real,
        mask=real[:, 1:],
        old_logprobs=torch.zeros(len(every), 2, dtype=torch.float64),
        ref_logprobs=torch.zeros(len(every), 2, dtype=torch.float64),
        advantages=torch.stack([worth[pair] for pair in every]).unsqueeze(-1).expand(-1, 2),
        support=SamplingSupport(
            int32(*[[len(one) for one in row] for row in tokens]),
            int32(*[token for row in tokens for one in row for token in one]),
        ),
    )
    logprobs, entropy = policy.logprobs_and_entropy(rows, temperature=temperature, entropy=True)
    chances = torch.stack([chance(4, *pair) for pair in every])
    assert_close(logprobs.sum(-1), chances.log(), rtol=0, atol=1e-12)
    loss = PolicyLoss(CLIPPED, k3, functools.partial(constant, length=1), 0.0, 0.0)
    rows = replace(rows, old_logprobs=logprobs.detach())
    weights = chances.detach().unsqueeze(-1).expand(-1, 2)  # how often each comes, in place of drawing it
    found, _ = loss(logprobs, entropy, rows, weights)
    (gradient,) = torch.autograd.grad(found, table, retain_graph=True)
    assert_close(-gradient, exact, rtol=0, atol=1e-10)
    assert exact.abs().max() > 0.05
    assert gradient[~inside].count_nonzero() == 0
    # and of the entropy
    own = (table / temperature).masked_fill(~inside, -1e300).softmax(-1)
    expected = -(own * own.clamp(min=1e-300).log()).sum(-1)
    assert_close(entropy, torch.stack([expected[ids[:, 0]], expected[ids[:, 1]]], -1), rtol=0, atol=1e-12)
    (one,) = torch.autograd.grad(entropy[:, 0].mean() + entropy[0, 1], table)
    (other,) = torch.autograd.grad(expected[4] + expected[every[0][0]], table)
    assert_close(one, other, rtol=0, atol=1e-10)
    # The whole softmax trains another policy.
    whole = policy.logprobs(rows.without_support, temperature=temperature)
    (without_support,) = torch.autograd.grad(loss(whole, None, rows.without_support, weights)[0], table)
    assert (without_support + exact).abs().max() > 0.01


# --- what was sampled is what is scored ------------------------------------------------------------------------------


def warped(logits, sampling):
    """transformers' own filters, in the order of its ``generate``."""
    filters = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    filters += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    filters += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    filters += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList(filters)(None, logits)


CHOICES = [
    pytest.param({"top_k": 7}, marks=pytest.mark.slow),
    pytest.param({"min_p": 0.05, "temperature": 1.7}, marks=pytest.mark.slow),
    pytest.param({"top_k": 2000, "top_p": 0.3}, marks=pytest.mark.slow),
    {"top_p": 0.9, "temperature": 0.6},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
    {"top_k": 1},
]


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_sets_are_those_of_transformers_and_logprobs_those_of_the_policy(policy, options):
    sampling = Sampling(**FREE | options)
    sampled = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
    logprobs, entropy = policy.logprobs_and_entropy(sampled, temperature=sampling.temperature, entropy=True)
    assert_close(logprobs, sampled.logprobs, rtol=0, atol=1e-5)
    assert_close(entropy, sampled.entropy, rtol=0, atol=1e-5)
    length, sets = sampled.mask.shape[1], sampled.support.flat.lists()
    with torch.no_grad():
        for row in range(len(sampled)):
            real = sampled.attention_mask[row]
            ids, count = sampled.ids[row][real], int(sampled.mask[row].sum())
            logits = policy.model(ids.unsqueeze(0)).logits[0, len(ids) - count - 1 : -1]
            for place, one in enumerate(warped(logits, sampling)):
                support = sets[row * length + place]
                assert int(ids[len(ids) - count + place]) in support
                assert support == one.isfinite().nonzero().flatten().tolist()
                expected = one.log_softmax(-1)[ids[len(ids) - count + place]]
                assert_close(sampled.logprobs[row, place], expected, rtol=0, atol=1e-5)
    if options == {"top_k": 1}:
        assert sampled.logprobs.count_nonzero() == sampled.entropy.count_nonzero() == 0


def test_greedy_and_free_sampling_make_no_sets(policy):
    assert generate(policy, PROMPTS, group_size=2, sampling=Sampling(**FREE), seed=2).support is None
    greedy = Sampling(**NUCLEUS | {"temperature": 0.0})
    assert generate(policy, PROMPTS, group_size=1, sampling=greedy, seed=2).support is None


def gradients(policy, value):
    policy.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize(("bonus", "mixed"), [(0.0, False), (0.0, True), (0.01, True)])
def test_the_shared_and_the_plain_path_agree(policy, bonus, mixed):
    rows = rollout(policy, group_size=5)
    if mixed:
        sizes = rows.support.sizes * (torch.arange(len(rows)) % 3 > 0).unsqueeze(-1)
        chosen = sizes.flatten().nonzero().flatten()
        rows = replace(rows, support=SamplingSupport(sizes, rows.support.of(chosen).ids))
    loss = PolicyLoss(CLIPPED, k3, functools.partial(constant, length=12), 0.04, bonus)
    weights = loss.weights(rows.mask)
    known = loss.gradient(rows, weights, on_policy=False)
    assert (known is None) == bool(bonus)
    found = []
    for logprobs, entropy in (
        SharedPath.of(policy.model).logprobs_and_entropy(
            rows, temperature=0.6, entropy=bool(bonus), loss_gradient=known
        ),
        separate(policy.model, rows, temperature=0.6, entropy=bool(bonus)),
        GenericPolicy(policy.model).logprobs_and_entropy(rows, temperature=0.6, entropy=bool(bonus)),
    ):
        value = loss(logprobs, entropy, rows, weights)[0]
        slopes = gradients(policy, value)
        found.append((logprobs.detach(), slopes, entropy.detach() if bonus else torch.zeros(1)))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_close(one, two, rtol=0, atol=1e-5 * max(1.0, float(one.abs().max())))
    assert found[0][1].abs().max() > 1e-2


def test_micro_batches_change_no_gradient(policy):
    rows = rollout(policy, group_size=4, noise=0.05)
    loss = PolicyLoss(CLIPPED, k3, functools.partial(constant, length=12), 0.04, 0.0)
    found = []
    for tokens, share in ((10_000, True), (60, True), (60, False)):
        policy.share_prompts = share
        policy.zero_grad()
        update = accumulate(
            policy,
            loss,
            rows,
            temperature=0.6,
            microbatch_tokens=tokens,
            skip_dead=False,
            on_policy_step=False,
            is_first=False,
            ranks=SINGLE_PROCESS,
            backward=lambda value, last: value.backward(),
        )
        found.append((torch.cat([p.grad.flatten() for p in policy.parameters()]), update))
    assert len(found[0][1].microbatches) < len(found[1][1].microbatches)
    for gradient, _ in found[1:]:
        assert_close(gradient, found[0][0], rtol=0, atol=1e-5 * float(found[0][0].abs().max()))


# --- rollouts --------------------------------------------------------------------------------------------------------


def collector(**settings):
    return Collector(
        **NUCLEUS | {"stop": [], "advantage": centered, "outcome": None, "threshold": 1.0, "group_size": 4} | settings,
        reward={"long": RewardSpec(lambda completions: [float(len(text)) for text in completions], 1.0)},
    )


def test_the_reference_is_not_truncated(policy):
    reference = frozen_copy(policy)
    found = collector().collect(
        policy, reference, Prompts(tuple(PROMPTS), {}), microbatch_tokens=99, context=StepContext(seed=1)
    )
    rows = found.rollout
    assert_close(rows.ref_logprobs, policy.logprobs(rows.without_support, temperature=0.6), rtol=0, atol=1e-5)
    # The two differ by the logarithm of the probability of the set, which is at least .95.
    gap = (rows.old_logprobs - rows.ref_logprobs)[rows.mask]
    assert -1e-5 < gap.min() < gap.max() < 0.0513  # -log .95
    assert gap.max() > 0.02
    check_rollout(policy, reference, rows, Sampling(**NUCLEUS), 99)
    with pytest.raises(SelfCheckError, match="differ from the sampler's"):
        check_rollout(policy, reference, rows.without_support, Sampling(**NUCLEUS), 99)
    sizes = rows.support.sizes[rows.mask].float()
    assert found.metrics["completion/set_size_mean"] == pytest.approx(float(sizes.mean()))
    assert found.metrics["completion/set_full_fraction"] == 0
    free = collector(top_p=1.0).collect(
        policy, reference, Prompts(tuple(PROMPTS), {}), microbatch_tokens=99, context=StepContext(seed=1)
    )
    assert not any(name.startswith("completion/set") for name in free.metrics)


# --- whole runs ------------------------------------------------------------------------------------------------------


RUN = (
    *("logger=none", "optimizer.lr=0.02", "validation.every=4", "rollout.top_p=0.8", "rollout.temperature=0.7"),
    *("steps=4", "data.prompts_per_step=4", "loss.kl_coef=0.05"),
)


def weights(module):
    return torch.cat([value.flatten() for value in module.policy.state_dict().values()])


@pytest.mark.slow
def test_recorded_sets_train_the_same_weights(tmp_path):
    one = small_run(tmp_path / "one", *RUN, "callbacks=rollouts")
    other = small_run(
        tmp_path / "other", *RUN, "callbacks=rollouts", "rollout=recorded", f"rollout.path={tmp_path / 'one'}"
    )
    assert torch.equal(weights(one), weights(other))
    assert one.metrics["completion/set_size_mean"] == other.metrics["completion/set_size_mean"] > 1
    for step, path in recording.recorded_steps(tmp_path / "one" / "rollouts").items():
        rows = recording.read(path)[1]
        assert recording.read(tmp_path / "other" / "rollouts" / path.name)[1] == rows, step
        assert all(token in one for row in rows for token, one in zip(row["ids"], row["kept"], strict=True))


@pytest.mark.slow
def test_two_processes_hand_the_sets_to_each_other(tmp_path):
    common = [
        *("rollout.top_p=0.8", "data.prompts_per_step=3", "rollout.group_size=4", "steps=2", "schedule=constant"),
        *("validation.every=2", "data.validation_size=4", "validation.samples_per_prompt=1", "validation.ks=[1]"),
        *("optimizer.lr=0.001",),
    ]
    finish(start(2, tmp_path, "fsdp", {"two": common}))
    lines = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["metrics"]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert line["metrics"]["completion/set_size_mean"] > 1
