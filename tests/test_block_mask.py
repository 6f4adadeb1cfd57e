"""The mask for FlexAttention against torch's own from all pairs of tokens, and how often its kernel is compiled."""

import random
import resource
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.testing import assert_close

from grpo_lightning.transformer import attention, kernels
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.transformer.attention_flex import _bounds, _visible_pairs, block_mask
from tests.test_attention import mask, masked, tensors

CPU = torch.device("cpu")


def filled(groups: list[tuple[int, tuple[int, ...]]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The groups with another of a prompt alone, so that there is a multiple of 128 tokens."""
    size = sum(prompt + sum(completions) for prompt, completions in groups)
    return (*groups, *([(-size % 128, ())] if size % 128 else []))


def streams() -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
    draw = random.Random(0)
    several = [[(128, (128, 128)), (128, ())], [(1, (0, 127, 256)), (127, (1,))], [(300, (1,) * 90 + (260, 0, 400))]]
    for longest in (6, 60, 200):
        for _ in range(2):
            completions = [tuple(draw.choices(range(longest), k=draw.randint(0, 5))) for _ in range(draw.randint(1, 4))]
            several.append([(draw.randint(1, longest), lengths) for lengths in completions])
    return [filled(groups) for groups in several]


def blocks(listed: BlockMask) -> dict[str, list[set[int]]]:
    """Which blocks a kernel visits, for every block of queries and, in the backward pass, of keys."""
    names = ("kv", "full_kv", "q", "full_q")
    pairs: dict[str, tuple[Any, Any]] = {
        n: (getattr(listed, f"{n}_num_blocks"), getattr(listed, f"{n}_indices")) for n in names
    }
    return {
        name: [set(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]
        for name, (counts, indices) in pairs.items()
    }


@pytest.mark.parametrize("groups", streams(), ids=str)
def test_blocks_are_those_that_all_pairs_of_tokens_give(groups: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
    seen = mask(groups)
    size = len(seen)
    expected = create_block_mask(lambda b, h, query, key: seen[query, key], None, None, size, size, device="cpu")
    found = block_mask(groups, CPU)
    assert blocks(found) == blocks(expected)
    assert found.shape == expected.shape
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    counted = seen.view(size // 128, 128, size // 128, 128).sum((1, 3))  # [N, N] -> [b, 128, b, 128] -> [b, b]
    assert torch.equal(_visible_pairs(*_bounds(groups), size // 128), counted.double())
    every = torch.arange(size)
    assert torch.equal(found.mask_mod(0, 0, every[:, None], every), seen)  # type: ignore[arg-type]


def test_blocks_by_hand() -> None:
    # prompt 0..199 | completion 200..455 | completion 456..511, in blocks of 128
    found = blocks(block_mask(((200, (256, 56)),), CPU))
    # Queries 128..255 see all of 0..127. Those in 256..383 are of the first completion and see prompt and completion.
    # Of 384..511 some are of the second, which does not see 256..383, but all see 0..127.
    assert found["full_kv"] == [set(), {0}, {0, 1}, {0}]
    assert found["kv"] == [{0}, {1}, {2}, {1, 2, 3}]


def test_a_stream_that_does_not_fill_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="a stream of 100 tokens: allowed is a multiple of 128, at least 128"):
        block_mask(((60, (40,)),), CPU)


def test_no_pair_of_tokens_takes_memory() -> None:
    draw = random.Random(0)
    groups = tuple((draw.randint(50, 600), tuple(draw.choices(range(900), k=8))) for _ in range(18))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = Stream(groups, CPU)
    assert stream.spans[-1][-1] > 65536
    assert stream.block_mask.shape[-1] % 128 == 0
    # A byte for every pair would be 4.3 GB; the lists of blocks are 4 times 513 * 513 * 4 bytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.slow
def test_streams_of_all_lengths_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic, options: plain(function, dynamic=dynamic, backend=counting)
    )
    kernels._made.cache_clear()
    monkeypatch.setattr(attention, "flex_for", lambda device: attention.compiled_flex)
    draw = random.Random(0)
    lengths = [(3, (2,)), (100, (28,)), (256, ()), (1, (255,)), (256, (1,))]
    lengths += [(draw.randint(1, 200), tuple(draw.choices(range(150), k=3))) for _ in range(16)]
    for group in lengths:
        query, key, value, _ = (each.detach() for each in tensors((group,), 4, 2))
        found = Stream((group,), CPU).flex(query, key, value, 0.3)
        assert_close(found, masked(query, key, value, (group,), 0.3), rtol=0, atol=5e-6)
        assert len(graphs) == 1
    # Another model is another graph, and so on: more than torch allows unless asked.
    for heads in range(1, 10):
        query, key, value, _ = (each.detach() for each in tensors(((5, (4,)),), heads, heads))
        Stream(((5, (4,)),), CPU).flex(query, key, value, 0.3)
    assert len(graphs) > torch._dynamo.config.recompile_limit
    assert torch._dynamo.config.optimize_ddp
    torch._dynamo.reset()
    kernels._made.cache_clear()


def test_graphs_are_whole_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    noted = lambda: seen.append(torch._dynamo.config.optimize_ddp)  # noqa: E731
    monkeypatch.setattr(kernels, "_made", lambda function, dynamic: noted)
    attention.compiled_flex()
    assert seen == [False]
