"""Tokens sampled from logits: by hand, by chi-square, and whatever else is sampled beside them."""

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.sampler import token_sampling as module
from grpo_lightning.sampler.token_sampling import inverse_cdf, likeliest_tokens, sample_tokens, uniforms
from grpo_lightning.types import Sampling


def sampling_of(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_new_tokens=1)


def truncated(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """The logits [b, V], -inf where a token cannot be sampled."""
    shifted = logits - logits.amax(-1, keepdim=True)
    ids, values, inside = likeliest_tokens(shifted, shifted.exp().sum(-1), top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(values, shifted.gather(-1, ids))
    assert (ids.diff() > 0).all()
    return logits.masked_fill(~torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, inside), -torch.inf)


def test_truncation_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.14, 0.06]]).log()
    shuffle = torch.tensor([2, 0, 3, 1])
    for options, count in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 1),  # .5 reaches it alone
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.95}, 4),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.3}, 2),  # .3 * .5 = .15: .5 and .3 stay, .14 goes
        ({"top_k": 3, "top_p": 0.9}, 3),  # of .5 .3 .14 renormalized: .532 .319 .149
        ({"top_k": 3, "top_p": 0.84}, 2),  # before the third .851, of all four .8
        ({"top_k": 99}, 4),
        ({}, 4),
    ):
        expected = [number < count for number in range(4)]
        assert truncated(logits, **options).isfinite().tolist() == [expected], options
        assert truncated(logits[:, shuffle], **options).isfinite().tolist() == [[expected[i] for i in shuffle]], options
    # of equally likely tokens the first stay; probabilities .1018 and .2764: 2 * .2764 + 2 * .1018 = .756
    equal = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    for top_p, left in ((0.7, [0, 1, 2, 3]), (0.6, [0, 1, 3]), (0.2, [1])):
        assert truncated(equal, top_p=top_p)[0].isfinite().nonzero().flatten().tolist() == left
    assert truncated(torch.zeros(1, 300), top_p=0.9)[0].isfinite().tolist() == [True] * 270 + [False] * 30
    # what the model rules out is in no set
    ruled_out = torch.tensor([[-1e4, 0.0, -1e4, -2.0]])
    assert truncated(ruled_out, top_k=3)[0].isfinite().tolist() == [False, True, False, True]


@pytest.mark.parametrize("block", [None, 2, 8])  # both ways to search for a token
def test_frequencies_logprobs_and_entropy_are_those_of_the_distribution(block, monkeypatch):
    in_blocks(block, monkeypatch)
    torch.manual_seed(0)
    logits = torch.randn(1, 8) * 2
    rows = 20_000
    for sampling in (
        sampling_of(),
        sampling_of(temperature=0.5),
        sampling_of(top_p=0.8),
        sampling_of(temperature=2.0, top_k=3),
        sampling_of(min_p=0.2),
        sampling_of(temperature=1.5, top_p=0.9, top_k=6, min_p=0.05),
    ):
        tokens, logprobs, entropy, _, sets = sample_tokens(logits.expand(rows, 8), sampling, torch.rand(rows))
        scaled = logits / sampling.temperature
        scaled = truncated(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        probabilities = scaled.softmax(-1)[0]
        counts = tokens.bincount(minlength=8)
        live = probabilities > 0
        assert counts[~live].sum() == 0
        expected = rows * probabilities[live]
        assert ((counts[live] - expected).square() / expected).sum() < 29.9  # chi-square: .9999 quantile at 7 degrees
        if sampling.truncated:
            assert sets.dtype == torch.int32
            assert sets[0][sets[0] >= 0].tolist() == live.nonzero().flatten().tolist()
            assert (sets == sets[0]).all()
        else:
            assert sets is None
        assert_close(logprobs, scaled.log_softmax(-1)[0][tokens])
        assert_close(entropy, torch.distributions.Categorical(logits=scaled).entropy().expand(rows))


def in_blocks(size, monkeypatch):
    if size:
        monkeypatch.setattr(module, "_SMALL", 0)
        monkeypatch.setattr(module, "BLOCK", size)


@pytest.mark.parametrize("block", [None, 2, 8])
def test_inverse_cdf(block, monkeypatch):
    in_blocks(block, monkeypatch)
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(7, 6)  # borders at 0, .5, .75 and 1
    goals = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.99, 1 - 2**-24])
    assert inverse_cdf(weights, goals).tolist() == [1, 1, 3, 3, 4, 4, 4]
    torch.manual_seed(0)
    weights = torch.rand(2000, 37)
    weights[:, 30:] = 0.0
    assert inverse_cdf(weights, torch.full((2000,), 1 - 2**-24)).max() == 29  # rounding does not pass the last token
    weights = torch.rand(4000, 29) * (torch.rand(4000, 29) < 0.2) * 10.0 ** torch.randint(-6, 6, (4000, 29))
    weights = weights[weights.sum(-1) > 0]
    goals = torch.rand(len(weights)).where(torch.rand(len(weights)) < 0.5, 0.0)
    assert len(weights) > 3000
    assert weights.gather(-1, inverse_cdf(weights, goals).unsqueeze(-1)).min() > 0  # no token of weight 0


def test_a_large_vocabulary_is_sampled_from_like_a_small_one(monkeypatch):
    torch.manual_seed(0)
    weights, goals = (torch.randn(300, 20_011) * 3).exp(), torch.rand(300)
    assert weights.shape[-1] > module._SMALL
    exact = weights.double().cumsum(-1)
    border = goals.double() * exact[:, -1]
    # Which token it is may differ by rounding only where the border is that near.
    tokens = inverse_cdf(weights, goals)
    above = exact.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    below = above - weights.double().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    slack = 1e-5 * exact[:, -1]
    assert (border < above + slack).all()
    assert (border >= below - slack).all()
    monkeypatch.setattr(module, "_SMALL", 10**9)
    assert (inverse_cdf(weights, goals) == tokens).float().mean() > 0.99


def test_autocast_changes_nothing():
    torch.manual_seed(0)
    for temperature, ruled_out in ((1.0, False), (0.7, True), (0.0, True)):
        logits, uniform = torch.randn(20, 300) * 3, torch.rand(20)
        if ruled_out:
            logits[3:9, 5:200] = -torch.inf
        sampling = sampling_of(temperature=temperature, top_p=0.9, top_k=50, min_p=0.01)
        expected = sample_tokens(logits.clone(), sampling, uniform)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = sample_tokens(logits.clone(), sampling, uniform)
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one, other)
        tokens, logprobs, entropy, *_ = found
        assert temperature or torch.equal(tokens, logits.argmax(-1))
        exact = logits.double() / (temperature or 1.0)
        if temperature:
            exact = truncated(exact, top_p=0.9, top_k=50, min_p=0.01)
        exact = torch.distributions.Categorical(logits=exact.clamp(min=-1e9))
        assert_close(logprobs.double(), exact.log_prob(tokens), rtol=0, atol=1e-5)
        assert_close(entropy.double(), exact.entropy(), rtol=0, atol=1e-5)


def test_logits_that_are_not_finite_are_marked():
    logits = torch.zeros(4, 3)
    logits[1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf
    assert sample_tokens(logits, sampling_of(), torch.zeros(4)).sound.tolist() == [True, False, False, False]


def test_random_numbers_depend_on_their_place_only():
    rows = [(prompt, member) for prompt in range(3) for member in range(4)]
    numbers = uniforms(7, rows, 50)
    assert numbers.shape == (12, 50)
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert numbers.unique().numel() == 600
    assert torch.equal(uniforms(7, rows[5:7], 20), numbers[5:7, :20])
    assert not torch.equal(uniforms(8, rows[:1], 50), numbers[:1])
    assert uniforms(2**64 - 1, [(2**32 - 1, 2**32 - 1)], 3).shape == (1, 3)
