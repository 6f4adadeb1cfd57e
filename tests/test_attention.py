"""Attention over a stream of groups, against the same attention with a mask over everything."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AttentionInterface

from grpo_lightning.transformer.attention import Stream, grouped

CPU = torch.device("cpu")
STREAMS = {
    "one group": ((3, (2, 1)),),
    "a prompt alone": ((4, ()),),
    "empty completions": ((2, (0, 3, 0)), (1, (0,))),
    "ragged": ((5, (3, 0, 7, 1)), (1, (2,)), (9, ()), (12, (30, 28, 4))),
    "longer than a block of the kernel": ((70, (1, 40, 200)), (3, (90,))),
}


def mask(groups) -> torch.Tensor:
    """[N, N] True where a query (row) may see a key, one token after the other."""
    owner = []  # (group, completion or None) of every token
    for number, (prompt, completions) in enumerate(groups):
        owner += [(number, None)] * prompt
        for completion, length in enumerate(completions):
            owner += [(number, completion)] * length
    seen = [[k <= q and g == mine[0] and c in (None, mine[1]) for k, (g, c) in enumerate(owner)]
            for q, mine in enumerate(owner)]  # fmt: skip
    return torch.tensor(seen)


def masked(query, key, value, groups, scale):
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask(groups), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def tensors(groups, heads, key_heads, width=16):
    torch.manual_seed(0)
    size = sum(prompt + sum(completions) for prompt, completions in groups)
    # As a model makes them: token after token in memory, heads second.
    made = [torch.randn(1, size, n, width).transpose(1, 2).requires_grad_() for n in (heads, key_heads, key_heads)]
    return [*made, torch.randn(1, size, heads, width)]


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("groups", STREAMS.values(), ids=STREAMS.keys())
def test_values_and_gradients_are_those_of_a_masked_softmax(groups, heads, key_heads):
    *inputs, slopes = tensors(groups, heads, key_heads)
    found = Stream(groups, CPU).attend(0, *inputs, 0.3)
    expected = masked(*inputs, groups, 0.3)
    assert_close(found, expected, rtol=0, atol=5e-6)
    for one, other in zip(torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes)):
        assert_close(one, other, rtol=0, atol=2e-5)


def test_scores_far_from_zero_do_not_overflow():
    groups = ((4, (3, 5)), (2, (1,)))
    *inputs, slopes = tensors(groups, 2, 2)
    inputs = [(t * factor).detach().requires_grad_() for t, factor in zip(inputs, (40.0, 40.0, 1.0))]
    found, expected = Stream(groups, CPU).attend(0, *inputs, 1.0), masked(*inputs, groups, 1.0)
    assert_close(found, expected, rtol=0, atol=1e-4)
    for one, other in zip(torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes)):
        assert one.isfinite().all()
        assert_close(one, other, rtol=0, atol=2e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", STREAMS.values(), ids=STREAMS.keys())
def test_flex_attention_sees_the_same(groups):
    *inputs, _ = (t.detach() for t in tensors(groups, 4, 2))
    assert_close(Stream(groups, CPU).flex(*inputs, 0.3), masked(*inputs, groups, 0.3), rtol=0, atol=5e-6)


def test_places_by_hand():
    # tokens: 0 1 2 prompt, 3 4 first completion, 5 second | 6 prompt, 7 its completion
    stream = Stream(((3, (2, 1)), (1, (1,))), CPU)
    assert stream.spans == [(0, 3, 6), (6, 7, 8)]
    assert stream.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert [places.tolist() for places in stream.predictors] == [[2, 3, 4], [2, 5], [6, 7]]


def test_segments_of_similar_length_lie_side_by_side():
    stream = Stream(((10, (8, 2)), (7, (0, 1))), CPU)
    # 10, 8 and 7 are within 0.7 of 10; 2 stands for itself, and so does 1, which is half of it
    lengths = [real.sum(-1).tolist() for _, real in stream.segments]
    assert lengths == [[10, 8, 7], [2], [1]]
    covered = torch.cat([places[real] for places, real in stream.segments])
    assert sorted(covered.tolist()) == list(range(28))


def test_keys_and_values_have_the_same_length():
    """torch's kernel for CPUs would read beyond the shorter ones, and write so where it makes gradients."""
    query, longer, shorter = (torch.randn(1, 2, size, 8) for size in (3, 6, 3))
    for key, value in ((shorter, longer), (longer, shorter)):
        told = rf"attention to keys \[1, 2, {key.shape[2]}, 8\] and values \[1, 2, {value.shape[2]}, 8\]"
        with pytest.raises(ValueError, match=told):
            AttentionInterface()[grouped("sdpa")](torch.nn.Module(), query, key, value, None)
        with pytest.raises(ValueError, match=told):
            Stream(STREAMS["one group"], CPU).flex(query, key, value, 1.0)


def test_without_a_stream_the_attention_is_the_one_it_was_made_from():
    name = grouped("sdpa")
    assert grouped(name) == name == "grouped_sdpa"
    assert grouped("eager") == "eager"  # cannot be replaced by name
    query, key, value, _ = (t.detach() for t in tensors(((6, ()),), 2, 2))

    class Layer:
        num_key_value_groups, is_causal, training = 1, True, False

    arguments = (Layer(), query, key, value, None)
    expected = AttentionInterface()["sdpa"](*arguments, scaling=0.2)[0]
    assert torch.equal(AttentionInterface()[name](*arguments, scaling=0.2)[0], expected)
