"""Counting operations, by hand."""

import itertools

import torch

from grpo_lightning.policy import hf
from grpo_lightning.policy.loading import character_llama
from grpo_lightning.transformer import size
from grpo_lightning.types import Sampled
from tests.support.running import small_run


def rows(prompts, lengths) -> Sampled:
    length, width = max(lengths), max(map(len, prompts))
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    zeros = torch.zeros(mask.shape)
    return Sampled(
        torch.cat([ids, zeros.long()], 1),
        torch.cat([real, mask], 1),
        mask,
        zeros,
        zeros,
        ("",) * len(ids),
        (True,) * len(ids),
    )


def test_operations_of_a_forward_pass_by_hand():
    policy = character_llama(hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, context=32, seed=0)
    # a layer has 4 x 8 x 8 + 3 x 8 x 16 = 640 weights in matrices; the vocabulary has 103 tokens
    one = policy.flops(rows([[5, 6, 7, 8]], [2]))
    # pairs: 4 x 4 / 2 = 8 in the prompt, 2 x (4 + 1) = 10 in the completion
    assert one == 2 * 1280 * (4 + 2) + 2 * 103 * 8 * 2 + 4 * 8 * 2 * 18
    # the same prompt again, with 3 tokens and 3 x (4 + 1.5) = 16.5 pairs; another prompt of 2 (2 pairs) with 1 (2.5)
    more = policy.flops(rows([[5, 6, 7, 8], [5, 6, 7, 8], [9, 9]], [2, 3, 1]))
    assert more == 2 * 1280 * (4 + 2 + 3 + 2 + 1) + 2 * 103 * 8 * 6 + 4 * 8 * 2 * (18 + 16.5 + 4.5)


def test_the_limit_is_that_of_the_machine_in_the_precision_that_steps_compute_in(tmp_path, monkeypatch):
    policy = character_llama(hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, context=32, seed=0)
    assert 1e6 < policy.flops_per_second() < 1e16
    asked = []

    def recording(hidden, *, device, dtype):
        asked.append(dtype)
        return 1e9

    monkeypatch.setattr(hf, "matmul_rate", recording)
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)):
        module = small_run(tmp_path / precision, f"trainer.precision={precision}")
        assert asked.pop() == dtype
        assert module.flops_per_second == 1e9
        assert module.metrics["perf/gemm_fraction"] > 0


def test_the_rate_of_products_by_hand_leaves_random_numbers_alone(monkeypatch):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert size.matmul_rate(16, device=torch.device("cpu"), dtype=torch.bfloat16, seconds=0.01) > 1e6
    assert torch.equal(torch.rand(1), expected)
    ticks = itertools.count()
    monkeypatch.setattr(size, "perf_counter", lambda: 0.5 * next(ticks))
    # [2048, 24] times [24, 96]: 2 * 2048 * 24 * 96 = 9,437,184 operations in half a second
    assert size.matmul_rate(24, device=torch.device("cpu"), dtype=torch.float32) == 18_874_368
