"""Attention over a stream of groups, against the same attention with a mask over all pairs of tokens."""

import random
import resource
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import AttentionInterface

from grpo_lightning.transformer import attention
from grpo_lightning.transformer.attention import (
    Stream,
    _bounds,
    _visible_pairs,
    block_mask,
    register_grouped,
    shared_prefix,
)

CPU = torch.device("cpu")
STREAMS = {
    "one group": ((3, (2, 1)),),
    "a prompt alone": ((4, ()),),
    "empty completions": ((2, (0, 3, 0)), (1, (0,))),
    "ragged": ((5, (3, 0, 7, 1)), (1, (2,)), (9, ()), (12, (30, 28, 4))),
    "longer than a block of the kernel": ((70, (1, 40, 200)), (3, (90,))),
}


def mask(groups, prefix=0) -> torch.Tensor:
    """[N, N] True where a query (row) may see a key, one token after the other."""
    owner = [(None, None)] * prefix  # (group, completion or None) of every token
    for number, (prompt, completions) in enumerate(groups):
        owner += [(number, None)] * prompt
        for completion, length in enumerate(completions):
            owner += [(number, completion)] * length
    seen = [[k <= q and g in (None, mine[0]) and c in (None, mine[1]) for k, (g, c) in enumerate(owner)]
            for q, mine in enumerate(owner)]  # fmt: skip
    return torch.tensor(seen)


def masked(query, key, value, groups, scale, prefix=0):
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask(groups, prefix), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def tensors(groups, heads, key_heads, width=16, prefix=0):
    torch.manual_seed(0)
    size = prefix + sum(prompt + sum(completions) for prompt, completions in groups)
    # As a model makes them: token after token in memory, heads second.
    made = [torch.randn(1, size, n, width).transpose(1, 2).requires_grad_() for n in (heads, key_heads, key_heads)]
    return [*made, torch.randn(1, size, heads, width)]


@pytest.mark.parametrize("heads, key_heads, factor", [(4, 4, 1.0), (6, 2, 1.0), (2, 2, 40.0)])
@pytest.mark.parametrize("groups", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("prefix", [0, 7])
def test_values_and_gradients_are_those_of_a_masked_softmax(groups, heads, key_heads, factor, prefix):
    query, key, value, slopes = tensors(groups, heads, key_heads, prefix=prefix)
    inputs = [(factor * query).detach().requires_grad_(), key, value]  # with 40, scores far from zero
    found = Stream(groups, CPU, prefix).attend(0, *inputs, 0.3)
    expected = masked(*inputs, groups, 0.3, prefix)
    assert_close(found, expected, rtol=0, atol=5e-6 * factor)
    for one, other in zip(torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes)):
        assert_close(one, other, rtol=0, atol=2e-5 * factor**1.4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_the_same():
    for groups in STREAMS.values():
        *inputs, _ = (t.detach() for t in tensors(groups, 4, 2))
        assert_close(Stream(groups, CPU).flex(*inputs, 0.3), masked(*inputs, groups, 0.3), rtol=0, atol=5e-6)


def test_places_by_hand():
    # tokens: 0 1 2 prompt, 3 4 first completion, 5 second | 6 prompt, 7 its completion
    stream = Stream(((3, (2, 1)), (1, (1,))), CPU)
    assert stream.spans == [(0, 3, 6), (6, 7, 8)]
    assert stream.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert [places.tolist() for places in stream.predictors] == [[2, 3, 4], [2, 5], [6, 7]]
    stream = Stream(((1, (2, 1)), (2, (1,))), CPU, 2)
    assert stream.spans == [(2, 3, 6), (6, 8, 9)]
    assert stream.positions.tolist() == [[0, 1, 2, 3, 4, 3, 2, 3, 4]]
    assert [places.tolist() for places in stream.predictors] == [[2, 3, 4], [2, 5], [7, 8]]


def test_a_shared_prefix_by_hand(monkeypatch):
    decoder = SimpleNamespace(device=CPU, num_parameters=lambda exclude_embeddings: 10)
    monkeypatch.setattr(attention, "MIN_SAVED", 40)  # 2 * 10 for each of its tokens, of all prompts but one
    prompts = {2: [(1, 2, 3), [1, 2, 4]], 1: [[1, 2], [1, 2, 3], [1, 2]], 0: [[1, 3], [1, 2]]}
    assert {found: shared_prefix(decoder, some) for found, some in prompts.items()} == {n: n for n in prompts}


def test_without_a_stream_the_attention_is_the_one_it_was_made_from():
    name = register_grouped("sdpa")
    assert register_grouped(name) == name == "grouped_sdpa"
    assert register_grouped("eager") == "eager"  # cannot be replaced by name
    query, key, value, _ = (t.detach() for t in tensors(((6, ()),), 2, 2))

    class Layer:
        num_key_value_groups, is_causal, training = 1, True, False

    arguments = (Layer(), query, key, value, None)
    expected = AttentionInterface()["sdpa"](*arguments, scaling=0.2)[0]
    assert torch.equal(AttentionInterface()[name](*arguments, scaling=0.2)[0], expected)


def streams():
    """Groups, the last of which is a prompt alone, so that there is a multiple of 128 tokens."""
    draw = random.Random(0)
    several = [[(128, (128, 128)), (128, ())], [(1, (0, 127, 256)), (127, (1,))], [(300, (1,) * 90 + (260, 0, 400))]]
    for longest in (6, 60, 200):
        for _ in range(2):
            completions = [tuple(draw.choices(range(longest), k=draw.randint(0, 5))) for _ in range(draw.randint(1, 4))]
            several.append([(draw.randint(1, longest), lengths) for lengths in completions])
    sizes = [sum(prompt + sum(completions) for prompt, completions in groups) for groups in several]
    return [(*groups, *([(-size % 128, ())] if size % 128 else [])) for groups, size in zip(several, sizes)]


def blocks(listed):
    """Which blocks a kernel visits, for every block of queries and, in the backward pass, of keys."""
    return {
        name: [
            set(row[:count].tolist())
            for count, row in zip(getattr(listed, f"{name}_num_blocks")[0, 0], getattr(listed, f"{name}_indices")[0, 0])
        ]
        for name in ("kv", "full_kv", "q", "full_q")
    }


def test_blocks_are_those_that_all_pairs_of_tokens_give():
    for groups in streams():
        seen = mask(groups)
        size = len(seen)
        expected = create_block_mask(
            lambda b, h, query, key, seen=seen: seen[query, key], None, None, size, size, device="cpu"
        )
        found = block_mask(groups, CPU)
        assert blocks(found) == blocks(expected)
        assert (found.shape, found.BLOCK_SIZE) == (expected.shape, expected.BLOCK_SIZE)
        counted = seen.view(size // 128, 128, size // 128, 128).sum((1, 3))  # [N, N] -> [b, 128, b, 128] -> [b, b]
        assert torch.equal(_visible_pairs(*_bounds(groups), size // 128), counted.double())
        every = torch.arange(size)
        assert torch.equal(found.mask_mod(0, 0, every[:, None], every), seen)


def test_no_pair_of_tokens_takes_memory():
    draw = random.Random(0)
    groups = tuple((draw.randint(50, 600), tuple(draw.choices(range(900), k=8))) for _ in range(18))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = Stream(groups, CPU)
    assert stream.spans[-1][-1] > 65536
    assert stream.block_mask.shape[-1] % 128 == 0
    # A byte for every pair would be 4.3 GB; the lists of blocks are 4 times 513 * 513 * 4 bytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
