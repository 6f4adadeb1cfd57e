"""Tokens drawn from logits: by hand, by chi-square, and whatever else is drawn beside them."""

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.sampler.native import token_sampling as module
from grpo_lightning.sampler.native.token_sampling import inverse_cdf, likeliest_tokens, sample_tokens, uniforms
from grpo_lightning.transformer.lm_head import token_logprobs
from grpo_lightning.types import Sampling


def truncated(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """The logits [b, V], -inf where a token cannot be drawn."""
    shifted = logits - logits.amax(-1, keepdim=True)
    ids, values, inside = likeliest_tokens(shifted, shifted.exp().sum(-1), top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(values, shifted.gather(-1, ids))
    assert (ids.diff() > 0).all()
    return logits.masked_fill(~torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, inside), -torch.inf)


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"top_k": 2}, [True, True, False, False]),
        ({"top_p": 0.5}, [True, False, False, False]),  # .5 reaches it alone
        ({"top_p": 0.51}, [True, True, False, False]),
        ({"top_p": 0.95}, [True, True, True, True]),
        ({"top_p": 1e-9}, [True, False, False, False]),
        ({"min_p": 0.3}, [True, True, False, False]),  # .15 < .3 x .5 <= .25... : .5, .3 stay, .14 goes
        ({"top_k": 3, "top_p": 0.9}, [True, True, True, False]),  # of .5 .3 .14 renormalized: .532 .319 .149
        ({"top_k": 3, "top_p": 0.84}, [True, True, False, False]),  # before the third .851, of all four .8
        ({"top_k": 99}, [True] * 4),
        ({}, [True] * 4),
    ],
)
def test_truncation_by_hand(options, kept):
    logits = torch.tensor([[0.5, 0.3, 0.14, 0.06]]).log()
    shuffle = torch.tensor([2, 0, 3, 1])
    assert truncated(logits, **options).isfinite().tolist() == [kept]
    assert truncated(logits[:, shuffle], **options).isfinite().tolist() == [[kept[i] for i in shuffle]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=1),
        Sampling(temperature=0.5, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=1),
        Sampling(temperature=1.0, top_p=0.8, top_k=0, min_p=0.0, max_new_tokens=1),
        Sampling(temperature=2.0, top_p=1.0, top_k=3, min_p=0.0, max_new_tokens=1),
        Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.2, max_new_tokens=1),
        Sampling(temperature=1.5, top_p=0.9, top_k=6, min_p=0.05, max_new_tokens=1),
    ],
    ids=["plain", "temperature", "top_p", "top_k", "min_p", "all"],
)
def test_drawn_frequencies_logprobs_and_entropy_are_those_of_the_distribution(sampling, in_blocks):
    torch.manual_seed(0)
    logits = torch.randn(1, 8) * 2
    rows = 20_000
    tokens, logprobs, entropy, _, sets = sample_tokens(logits.expand(rows, 8), sampling, torch.rand(rows))
    scaled = logits / sampling.temperature
    scaled = truncated(scaled, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    kept = scaled.softmax(-1)[0]
    counts = tokens.bincount(minlength=8)
    assert counts[kept == 0].sum() == 0
    live = kept > 0
    chi_square = ((counts[live] - rows * kept[live]).square() / (rows * kept[live])).sum()
    assert chi_square < 29.9  # 0.9999 quantile at 7 degrees of freedom
    if sampling.truncated:
        assert sets.dtype == torch.int32
        assert sets[0][sets[0] >= 0].tolist() == live.nonzero().flatten().tolist()
        assert (sets == sets[0]).all()
    else:
        assert sets is None
    assert_close(logprobs, scaled.log_softmax(-1)[0][tokens])
    assert_close(entropy, torch.distributions.Categorical(logits=scaled).entropy().expand(rows))


def test_of_a_large_set_the_likeliest_stay(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(5, 300) * torch.tensor([0.01, 0.1, 1.0, 3.0, 20.0])[:, None]
    descending, order = logits.double().softmax(-1).sort(descending=True, stable=True)
    rank = torch.arange(300)
    for most in (1, 4, 64, 299, 1024):
        monkeypatch.setattr(module, "MAX_SUPPORT", most)
        kept = (descending.cumsum(-1) - descending < 0.9 - 1e-9) & (rank < most)
        assert most < 299 or kept.sum(-1).unique().numel() == 5
        expected = logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
        assert torch.equal(truncated(logits, top_p=0.9), expected)
        assert torch.equal(truncated(logits, top_k=300, top_p=0.9), expected)
        # e^-1 of the likeliest
        kept = (descending >= descending[:, :1] / 2.718281828459045) & (rank < most)
        expected = logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
        assert torch.equal(truncated(logits, min_p=0.36787944), expected)


def test_of_equally_likely_tokens_the_first_stay():
    logits = torch.tensor(
        [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]
    )  # probabilities .1018 and .2764: 2 * .2764 + 2 * .1018 = .756
    for top_p, kept in ((0.7, [0, 1, 2, 3]), (0.6, [0, 1, 3]), (0.2, [1])):
        assert truncated(logits, top_p=top_p)[0].isfinite().nonzero().flatten().tolist() == kept
    equal = torch.zeros(1, 300)
    assert truncated(equal, top_p=0.9)[0].isfinite().tolist() == [True] * 270 + [False] * 30


def test_what_the_model_rules_out_is_in_no_set():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -2.0]])
    assert truncated(logits.clamp(min=-1e4), top_k=3)[0].isfinite().tolist() == [False, True, False, True]


@pytest.fixture(params=[None, 2, 8], ids=lambda size: "at once" if size is None else f"blocks of {size}")
def in_blocks(request, monkeypatch):
    """Both ways to search for a token."""
    if request.param:
        monkeypatch.setattr(module, "_SMALL", 0)
        monkeypatch.setattr(module, "BLOCK", request.param)


def test_inverse_cdf_by_hand(in_blocks):
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(7, 6)  # borders at 0, .5, .75 and 1
    goals = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.75, 0.99, 1 - 2**-24])
    assert inverse_cdf(weights, goals).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_the_last_token_that_can_be_drawn_is_not_passed_by_rounding(in_blocks):
    torch.manual_seed(0)
    weights = torch.rand(2000, 37)
    weights[:, 30:] = 0.0
    assert inverse_cdf(weights, torch.full((2000,), 1 - 2**-24)).max() == 29


def test_no_token_of_weight_0_is_drawn(in_blocks):
    torch.manual_seed(0)
    weights = torch.rand(4000, 29) * (torch.rand(4000, 29) < 0.2) * 10.0 ** torch.randint(-6, 6, (4000, 29))
    weights = weights[weights.sum(-1) > 0]
    goals = torch.rand(len(weights)).where(torch.rand(len(weights)) < 0.5, 0.0)
    tokens = inverse_cdf(weights, goals)
    assert len(weights) > 3000
    assert weights.gather(-1, tokens.unsqueeze(-1)).min() > 0


def test_a_large_vocabulary_is_drawn_from_like_a_small_one(monkeypatch):
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


def test_a_greedy_draw_takes_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -1.0]])
    tokens, logprobs, entropy, *_ = sample_tokens(
        logits, Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=1), torch.tensor([0.99, 0.99])
    )
    assert tokens.tolist() == [1, 0]
    expected = token_logprobs(logits, tokens, 1.0)
    assert_close((logprobs, entropy), expected)


@pytest.mark.parametrize(("temperature", "ruled_out"), [(1.0, False), (0.7, True), (0.0, True)])
def test_autocast_changes_no_draw(temperature, ruled_out):
    torch.manual_seed(0)
    logits, uniform = torch.randn(20, 300) * 3, torch.rand(20)
    if ruled_out:
        logits[3:9, 5:200] = -torch.inf
    sampling = Sampling(temperature=temperature, top_p=0.9, top_k=50, min_p=0.01, max_new_tokens=1)
    expected = sample_tokens(logits.clone(), sampling, uniform)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sample_tokens(logits.clone(), sampling, uniform)
    for one, other in zip(found, expected):
        assert one is other is None or torch.equal(one, other)
    tokens, logprobs, entropy, *_ = found
    exact = logits.double() / (temperature or 1.0)
    if temperature:
        exact = truncated(exact, top_p=0.9, top_k=50, min_p=0.01)
    exact = torch.distributions.Categorical(logits=exact.clamp(min=-1e9))
    assert_close(logprobs.double(), exact.log_prob(tokens), rtol=0, atol=1e-5)
    assert_close(entropy.double(), exact.entropy(), rtol=0, atol=1e-5)


def test_logits_that_are_not_finite_are_marked():
    logits = torch.zeros(4, 3)
    logits[1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=1)
    assert sample_tokens(logits, sampling, torch.zeros(4))[3].tolist() == [True, False, False, False]


def test_random_numbers_depend_on_their_place_only():
    rows = [(prompt, member) for prompt in range(3) for member in range(4)]
    numbers = uniforms(7, rows, 50)
    assert numbers.shape == (12, 50)
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert numbers.unique().numel() == 600
    assert torch.equal(uniforms(7, rows[5:7], 20), numbers[5:7, :20])
    assert not torch.equal(uniforms(8, rows[:1], 50), numbers[:1])
    assert torch.equal(
        uniforms(2**64 - 1, [(2**32 - 1, 2**32 - 1)], 3), uniforms(2**64 - 1, [(2**32 - 1, 2**32 - 1)], 3)
    )
    mean = uniforms(1, rows, 2000).mean(-1)
    assert_close(mean, torch.full((12,), 0.5), rtol=0, atol=5 / (12 * 2000) ** 0.5)  # five standard errors
