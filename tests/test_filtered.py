"""Truncated sampling with an engine, which does not tell its sets: they are made again from the policy's logits."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.clock import Clock
from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.module import grpo
from grpo_lightning.module.selfcheck import SelfCheckError, check_rollout
from grpo_lightning.policy.generic import GenericPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.rollout.collector import with_support
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.sampler.support import engine_filters, support_of_tokens
from grpo_lightning.transformer import lm_head
from grpo_lightning.types import Prompts, Rollout, Sampling
from tests.support import stand_in
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import finish, main, start
from tests.support.running import small_run
from tests.support.sampling import generate
from tests.test_truncated import FREE, NUCLEUS, collector, gradients, sharpened
from tests.vllm.support import PROMPTS, disturb, engine, gap, ready, tiny

FILTERS = [
    pytest.param({"top_k": 7}, marks=pytest.mark.slow),
    pytest.param({"min_p": 0.05}, marks=pytest.mark.slow),
    {"top_p": 0.3},
    {"top_k": 2000, "top_p": 0.9},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", chat=False)


@pytest.fixture
def policy(checkpoint):
    return sharpened(load(str(checkpoint), dtype="float32", attn_implementation="sdpa", trust_remote_code=False))


@pytest.fixture
def vllm(monkeypatch):
    stand_in.install(monkeypatch)
    return engine()


def oracle(policy, rows, sampling):
    """The sets of every token in the mask, row by row: one forward pass for each row, and vLLM's filters by hand."""
    asked, found = replace(sampling, top_k=min(sampling.top_k or 1024, 1024)), []
    for row in range(len(rows)):
        ids, count = rows.ids[row][rows.attention_mask[row]], int(rows.mask[row].sum())
        with torch.no_grad():
            own = policy.model(ids.unsqueeze(0)).logits[0, len(ids) - count - 1 : -1]
        for one in own:
            left = stand_in.filtered(one / sampling.temperature, asked)
            found.append(left.isfinite().nonzero().flatten().tolist())
    return found


def tokens(rows):
    """[C] those in the mask, row by row."""
    return rows.ids[:, -rows.mask.shape[1] :][rows.mask].tolist()


def in_mask(support, mask):
    """The sets of the tokens in the mask, row by row."""
    return [one for one, counts in zip(support.flat.lists(), mask.flatten().tolist()) if counts]


# --- by hand ---------------------------------------------------------------------------------------------------------

PROBABILITIES = [0.15, 0.5, 0.05, 0.2, 0.1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
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
    ],
    ids=str,
)
def test_sets_and_what_is_added_to_them_by_hand(changes, expected):
    given = torch.tensor([PROBABILITIES] * 5).log() + torch.tensor([[0.0], [7.0], [-3.0], [100.0], [2.0]])
    found = support_of_tokens(given, torch.arange(5), Sampling(**FREE | changes))
    assert found.support.lists() == [sorted({*expected, token}) for token in range(5)]
    assert found.outside.tolist() == [token not in expected for token in range(5)]


def test_tokens_that_the_model_rules_out_are_in_no_set():
    given = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf]])
    assert support_of_tokens(given, torch.tensor([2, 1]), Sampling(**FREE | {"top_k": 3})).support.lists() == [
        [0, 2],
        [1],
    ]


def test_what_an_engine_is_asked_for():
    assert engine_filters(Sampling(**FREE)) == {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert engine_filters(Sampling(**FREE | {"top_p": 0.9})) == {"top_p": 0.9, "top_k": 1024, "min_p": 0.0}
    assert engine_filters(Sampling(**FREE | {"min_p": 0.1})) == {"top_p": 1.0, "top_k": 1024, "min_p": 0.1}
    assert engine_filters(Sampling(**FREE | {"top_k": 2000})) == {"top_p": 1.0, "top_k": 1024, "min_p": 0.0}
    assert engine_filters(Sampling(**FREE | {"top_k": 7})) == {"top_p": 1.0, "top_k": 7, "min_p": 0.0}
    assert engine_filters(Sampling(**NUCLEUS | {"temperature": 0.0})) == {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def test_a_large_set_is_that_of_the_1024_likeliest_and_the_drawn_one():
    given = torch.linspace(0, 1, 3000).unsqueeze(0)
    found = support_of_tokens(given.clone(), torch.tensor([5]), Sampling(**FREE | {"top_p": 0.99999}))
    assert found.support.lists() == [[5, *range(3000 - 1024, 3000)]]
    half = support_of_tokens(given, torch.tensor([2999]), Sampling(**FREE | {"top_p": 0.5}))
    # of the 1,024 likeliest, whose probabilities go with exp(i / 2999): half of their sum
    weights = (torch.arange(1976, 3000).double() / 2999).exp()
    above = weights.flip(0).cumsum(0)
    assert int(half.support.sizes) == int((above < 0.5 * weights.sum()).sum()) + 1


# --- the own sampler as the oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sets_are_those_of_the_own_sampler_on_every_path(policy, monkeypatch, filters):
    monkeypatch.setattr(lm_head, "CHUNK", 5 * policy.model.config.vocab_size + 3)  # chunks of five tokens
    sampling = Sampling(**FREE | filters | {"temperature": 0.6})
    rows = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
    policy.share_prompts = True
    found = {"shared": policy.support(rows, sampling), "plain": GenericPolicy(policy.model).support(rows, sampling)}
    policy.share_prompts = False
    found["own path"] = policy.support(rows, sampling)
    by_hand, in_another_order = oracle(policy, rows, sampling), {"min_p", "top_p"} <= filters.keys()
    for path, one in found.items():
        assert not one.outside.any() or in_another_order, path
        drawn = tokens(rows)
        assert in_mask(one.support, rows.mask) == [sorted({*own, token}) for own, token in zip(by_hand, drawn)], path
        assert one.support.sizes[~rows.mask].count_nonzero() == 0
        if not in_another_order:
            assert torch.equal(one.support.sizes, rows.support.sizes), path
            assert torch.equal(one.support.ids, rows.support.ids), path


def test_the_order_of_the_rows_does_not_matter(policy):
    sampling = Sampling(**NUCLEUS)
    rows = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
    mixed = torch.tensor([3, 0, 5, 1, 2, 4])  # groups apart
    found, expected = policy.support(rows[mixed], sampling).support, rows.support[mixed]
    assert torch.equal(found.sizes, expected.sizes)
    assert torch.equal(found.ids, expected.ids)


def test_rows_without_tokens_have_no_sets(policy):
    sampling = Sampling(**NUCLEUS)
    rows = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=2)
    expected = policy.support(rows, sampling)
    mask = rows.mask.clone()
    mask[2] = False
    mask[0, 1:3] = False  # as replies are
    for share in (True, False):
        policy.share_prompts = share
        found = policy.support(replace(rows, mask=mask), sampling)
        assert found.support.sizes.tolist() == (expected.support.sizes * mask).tolist()
        assert in_mask(found.support, mask) == in_mask(expected.support, mask)
        nothing = policy.support(replace(rows, mask=torch.zeros_like(mask)), sampling)
        assert len(nothing.support.ids) == 0
        assert nothing.support.sizes.shape == nothing.outside.shape == mask.shape


# --- a fake engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", FILTERS[-1:], ids=str)
def test_an_engines_sets_are_found_again(vllm, policy_of_engine, filters):
    sampling = Sampling(**FREE | filters | {"temperature": 0.8})
    rows, sets_of_engine = drawn(vllm, policy_of_engine, sampling)
    assert rows.support is None
    found = policy_of_engine.support(rows, sampling)
    assert in_mask(found.support, rows.mask) == sets_of_engine
    assert not found.outside.any()
    assert gap(policy_of_engine, replace(rows, support=found.support), 0.8) < 1e-4


@pytest.fixture
def policy_of_engine():
    return tiny()


def drawn(vllm, policy, sampling, group_size=3):
    """What the stand-in draws, and from which sets it did."""
    with ready(vllm, policy):
        stand_in.LLM.last.llm_engine.sets.clear()
        rows = vllm.generate(policy, PROMPTS, group_size=group_size, sampling=sampling, seed=3)
    own = stand_in.LLM.last.llm_engine.sets
    return rows, [one for number in range(len(rows)) for one in own[str(number)]]


@pytest.mark.slow
def test_what_other_weights_have_drawn_is_counted_and_added(vllm, policy_of_engine):
    policy = policy_of_engine
    sampling = Sampling(**FREE | {"top_p": 0.7, "temperature": 1.2, "max_new_tokens": 20})
    with ready(vllm, policy):
        rows = vllm.generate(policy, PROMPTS, group_size=6, sampling=sampling, seed=3)
        disturb(policy)
        clock = Clock()
        found, told = with_support(
            policy,
            rows,
            sampling,
            microbatch_tokens=60,
            context=StepContext(seed=1, clock=clock, ranks=SINGLE_PROCESS, sampler=vllm),
        )
    assert not rows.mask.all()
    sets_now = oracle(policy, rows, sampling)
    outside = [token not in own for own, token in zip(sets_now, tokens(rows))]
    assert 5 < sum(outside) < len(outside) / 2
    assert told == {"sampler/support_miss_rate": sum(outside) / len(outside)}
    expected = [sorted({*own, token}) for own, token in zip(sets_now, tokens(rows))]
    assert in_mask(found.support, rows.mask) == expected
    assert clock.read()["score"] > 0
    # Every token has a probability, and a gradient that is finite.
    logprobs = policy.logprobs(found, temperature=1.2)
    assert logprobs.min() > -20
    assert gradients(policy, logprobs.sum()).isfinite().all()


def test_a_rollout_of_an_engine_is_scored_as_it_was_drawn(vllm, policy_of_engine):
    policy = policy_of_engine
    with ready(vllm, policy):
        found = collector().collect(
            policy, None, Prompts(tuple(PROMPTS), {}), microbatch_tokens=99, context=StepContext(seed=1, sampler=vllm)
        )
    rows = found.rollout
    assert found.metrics["sampler/support_miss_rate"] == 0
    assert found.metrics["completion/set_size_mean"] > 1
    assert_close(policy.logprobs(rows, temperature=0.6), rows.old_logprobs, rtol=0, atol=1e-4)
    assert found.flops == 2 * policy.flops(found.scored.sampled)
    # An engine tells no entropy; in its place is -log p, of the probability in the set.
    mean = -float(rows.old_logprobs[rows.mask].mean())
    assert found.metrics["policy/entropy"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_runs_with_an_engine_and_truncated_sampling(monkeypatch, tmp_path):
    stand_in.install(monkeypatch)
    told = []
    monkeypatch.setattr(
        grpo, "check_rollout", lambda *given, **more: (told.append(more), check_rollout(*given, **more))
    )
    module = small_run(
        tmp_path,
        *("sampler=vllm", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=0.8", "rollout.min_p=0.01"),
        *("validation.top_k=5", "validation.every=1", "steps=1", "module.self_check=true"),
    )
    assert module.metrics["sampler/support_miss_rate"] == 0
    assert module.metrics["policy/mismatch_max"] < 1e-4
    assert module.metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert 1 < module.metrics["completion/set_size_mean"] <= 20
    assert told == [{"coarse": False, "filtered": True}]


# --- the self-check --------------------------------------------------------------------------------------------------


def test_the_self_check_forgives_what_lies_on_a_bound_and_no_more(policy):
    sampling = Sampling(**NUCLEUS)
    rows = generate(policy, PROMPTS, group_size=20, sampling=sampling, seed=1)
    zeros = torch.zeros_like(rows.logprobs)
    count = int(rows.mask.sum())
    assert count > 300

    def checked(wrong, **more):
        numbers = rows.mask.flatten().nonzero().flatten()[:wrong]
        old = rows.logprobs.flatten().index_add(0, numbers, torch.full((wrong,), 0.02)).view_as(rows.logprobs)
        rollout = Rollout(rows.ids, rows.attention_mask, rows.mask, old, zeros, zeros, support=rows.support)
        check_rollout(policy, None, rollout, sampling, 10**6, **more)

    checked(0)
    checked(count // 100, filtered=True)
    for wrong, more in ((1, {}), (count // 100 + 1, {"filtered": True}), (count, {"filtered": True})):
        with pytest.raises(SelfCheckError, match="differ from the sampler's"):
            checked(wrong, **more)


# --- several processes -----------------------------------------------------------------------------------------------


STAGED = [
    *("sampler._target_=tests.support.stand_in.Staged", "+sampler.seed=0", "rollout.top_p=0.8", "logger=none"),
    *("rollout.temperature=0.9", "data.prompts_per_step=3", "rollout.group_size=4", "rollout.max_new_tokens=8"),
    *("steps=1", "validation.every=1", "data.validation_size=4", "validation.samples_per_prompt=1"),
    *("validation.ks=[1]", "module.self_check=false", "correction=token_truncation", "module.microbatch_tokens=60"),
]


def metrics_of(directory, name):
    return json.loads((directory / f"{name}.jsonl").read_text().splitlines()[0])["metrics"]


@pytest.mark.slow
def test_several_processes_make_the_sets_together(monkeypatch, tmp_path):
    stand_in.install(monkeypatch)
    words = [*STAGED, "+sampler.disturbed=0.05"]
    main(tmp_path, "cpu", {"one": words})
    finish(start(2, tmp_path, "fsdp", {"two": words}))
    one, two = metrics_of(tmp_path, "one"), metrics_of(tmp_path, "two")
    assert one["sampler/support_miss_rate"] > 0.01
    for name in ("sampler/support_miss_rate", "completion/set_size_mean", "policy/mismatch_mean", "optim/grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name


@pytest.mark.slow
def test_an_engine_that_fails_in_one_process_is_told_to_the_others(tmp_path):
    started = start(2, tmp_path, "fsdp", {"two": [*STAGED, "+sampler.broken=1"]})
    first, second = (process.communicate(timeout=120)[0] for process in started)
    assert "RuntimeError: the engine is out of order" in second
    assert "process 1 of 2: RuntimeError: the engine is out of order" in first
