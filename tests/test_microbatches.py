"""Micro-batches and operations of a forward pass, by hand."""

import re

import torch

from grpo_lightning.policy import hf
from grpo_lightning.policy.base import packed_microbatches, padded_microbatches, same_prompts
from grpo_lightning.policy.loading import character_llama
from grpo_lightning.types import Rollout
from tests.support.running import small_run


def ragged(prompts, completions) -> Rollout:
    """Rows with prompts given as lists of ids and completions by their lengths."""
    width, length = max(map(len, prompts)), max(completions)
    mask = torch.arange(length) < torch.tensor(completions)[:, None]
    ids = torch.tensor([[9] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    zeros = torch.zeros(mask.shape)
    return Rollout(torch.cat([ids, zeros.long()], 1), torch.cat([real, mask], 1), mask, zeros, zeros, zeros)


def test_rows_with_the_same_prompt_are_found():
    # 9 is what shorter prompts are padded with, and a token of the third
    rows = ragged([[1, 2], [2], [9, 2], [1, 2], [2]], [1, 2, 3, 4, 1])
    assert same_prompts(rows) == [[0, 3], [1, 4], [2]]


def test_padded_microbatches_by_hand():
    # prompt + completion:  2+1   2+4   3+4   1+1 ; sorted 7, 6, 3, 2
    rows = ragged([[1, 2], [3, 4], [5, 6, 7], [8]], [1, 4, 4, 1])

    def split(tokens):
        return [rows.tolist() for rows in padded_microbatches(rows, tokens)]

    assert split(28) == [[2, 1, 0, 3]]  # 4 rows x (3 + 4)
    assert split(27) == [[2, 1, 0], [3]]
    assert split(14) == [[2, 1], [0, 3]]  # 2 x 7, 2 x (2 + 1)
    assert split(13) == [[2], [1, 0], [3]]  # 2 x 7 is too many; 2 x 6 is not
    assert split(1) == [[2], [1], [0], [3]]  # longer than the budget: alone


def test_packed_microbatches_by_hand():
    # groups of 2 + (1 + 4), 3 + (4 + 2), 1 + 1 tokens
    rows = ragged([[1, 2], [5, 6, 7], [1, 2], [8], [5, 6, 7]], [1, 4, 4, 1, 2])

    def split(tokens):
        return [rows.tolist() for rows in packed_microbatches(rows, tokens)]

    assert split(18) == [[1, 4, 0, 2, 3]]  # 9 + 7 + 2
    assert split(17) == [[1, 4, 0, 2], [3]]
    assert split(16) == [[1, 4, 0, 2], [3]]
    assert split(15) == [[1, 4], [0, 2, 3]]  # 9 and 7 + 2
    assert split(9) == [[1, 4], [0, 2, 3]]
    assert split(8) == [[1], [4], [0, 2], [3]]  # 3 + 4 | 3 + 2, no room for 7 | 7, no room for 2
    assert split(6) == [[1], [4], [0], [2], [3]]
    assert split(1) == [[1], [4], [0], [2], [3]]


def test_operations_of_a_forward_pass_by_hand():
    policy = character_llama(hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, context=32, seed=0)
    # a layer has 4 x 8 x 8 + 3 x 8 x 16 = 640 weights in matrices; the vocabulary has 103 tokens
    one = policy.flops(ragged([[5, 6, 7, 8]], [2]))
    # pairs: 4 x 4 / 2 = 8 in the prompt, 2 x (4 + 1) = 10 in the completion
    assert one == 2 * 1280 * (4 + 2) + 2 * 103 * 8 * 2 + 4 * 8 * 2 * 18
    # the same prompt again, with 3 tokens and 3 x (4 + 1.5) = 16.5 pairs; another prompt of 2 (2 pairs) with 1 (2.5)
    more = policy.flops(ragged([[5, 6, 7, 8], [5, 6, 7, 8], [9, 9]], [2, 3, 1]))
    assert more == 2 * 1280 * (4 + 2 + 3 + 2 + 1) + 2 * 103 * 8 * 6 + 4 * 8 * 2 * (18 + 16.5 + 4.5)


def test_the_limit_is_that_of_the_machine_in_the_precision_that_steps_compute_in(tmp_path, monkeypatch, caplog):
    policy = character_llama(hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, context=32, seed=0)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert 1e6 < policy.flops_per_second() < 1e16
    assert torch.equal(torch.rand(1), expected)
    asked, rates = [], {torch.bfloat16: 28e9, torch.float32: 116e9}  # of a CPU without bfloat16 units

    def recording(hidden, *, device, dtype):
        asked.append(dtype)
        return rates[dtype]

    monkeypatch.setattr(hf, "matmul_rate", recording)
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)):
        module = small_run(tmp_path / precision, f"trainer.precision={precision}")
        assert asked.pop(0) == dtype
        assert module.flops_per_second == rates[dtype]
        asked.clear()
        assert module.metrics["perf/gemm_fraction"] > 0
    [told] = [record.getMessage() for record in caplog.records if "GFLOP/s" in record.getMessage()]
    assert re.search(r" 28 GFLOP/s .* 116:", told)
