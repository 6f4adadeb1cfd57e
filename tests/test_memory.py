"""The prediction of memory: by hand, and beside a real run."""

from dataclasses import replace

import pytest

from benchmarks.memory import CASES, LONG, apart
from grpo_lightning.memory import LARGEST_SET, Shape, Use, activations, predicted, table, use_of
from grpo_lightning.sampler.native import sampler, token_sampling
from tests.support.composed import composed

SHAPE = Shape(trained=1000, frozen=0, body=800, hidden=10, layers=2, intermediate=40, vocabulary=20, keys=5)
USE = Use(prompts=2, group_size=3, prompt_tokens=7, completion_tokens=11, microbatch_tokens=10**6)


def test_states_by_hand():
    parts = predicted(SHAPE, USE)
    assert parts["weights"] == 4000
    assert parts["optimizer"] == 8000
    assert parts["reference"] == 0
    assert predicted(SHAPE, Use(**{**vars(USE), "reference_bytes": 2.0}))["reference"] == 2000
    assert predicted(SHAPE, Use(**{**vars(USE), "shards": 4}))["optimizer"] == 2000
    frozen = Shape(**{**vars(SHAPE), "trained": 10, "frozen": 1000})
    small = predicted(frozen, Use(**{**vars(USE), "frozen_bytes": 0.5, "state_bytes": 2.0}))
    assert (small["weights"], small["optimizer"]) == (4 * 10 + 500, 20)


def test_activations_and_cache_by_hand():
    # norms 4 * 6 * 10, attention 4 * (2 * 10 + 2 * 5), feed-forward 4 * 4 * 40
    assert activations(SHAPE, is_half=False) == 240 + 120 + 640
    # norms 4 * 4 * 10 and 5 copies of 2 * 10
    assert activations(SHAPE, is_half=True) == 160 + 100 + 60 + 320
    # 2 prompts of 7 once and 6 completions of 11 in 2 layers of keys and values, one of them twice, logits three times;
    # and a copy of its prompt for each of 6
    assert predicted(SHAPE, USE)["sampling"] == 2 * 4 * 5 * (2 * (2 + 6) * 7 + 3 * 6 * 11) + 3 * 4 * 6 * 20
    long = predicted(SHAPE, replace(USE, prompt_tokens=20_000))["sampling"]  # 2 * 4 * 5 * 6 * 20,000 is above 4 MiB
    assert long == 2 * 4 * 5 * (2 * 2 * 20_000 + 3 * 6 * 11) + 3 * 4 * 6 * 20
    apart = predicted(SHAPE, Use(**{**vars(USE), "shares_prompts": False}))["sampling"]
    assert apart == 2 * 4 * 5 * (2 * 6 * 7 + 3 * 6 * 11) + 3 * 4 * 6 * 20


def test_sets_of_truncated_sampling_by_hand():
    assert LARGEST_SET == token_sampling.MAX_SUPPORT
    # 6 completions: 8 numbers of 4 bytes for each of 2 tokens, or 17 on a GPU, and 48 bytes of each to sort them
    for device, draws in (("cpu", 2), ("cuda", sampler.SYNC_EVERY + 1)):
        whole = replace(USE, device=device)
        more = predicted(SHAPE, replace(whole, set_tokens=8))["sampling"] - predicted(SHAPE, whole)["sampling"]
        assert more == 6 * 8 * (4 * draws + 48)
    # no set is larger than the vocabulary
    large, larger = (predicted(SHAPE, replace(USE, set_tokens=size))["sampling"] for size in (20, 1024))
    assert large == larger
    # where all logits exist, they are copied and masked: 108 tokens, 66 of completions
    plain = replace(USE, shares_prompts=False)
    more = predicted(SHAPE, replace(plain, set_tokens=8))["update"] - predicted(SHAPE, plain)["update"]
    assert more == pytest.approx(1.25 * 4 * 66 * 20, rel=1e-12)


def test_how_large_sets_may_be():
    varying = "{_target_: grpo_lightning.schedule.Linear, start: 0.9, end: 1.0, steps: 30}"
    for setting, size in (("top_p=1.0", 0), ("min_p=0.1", 1024), ("top_k=50", 50), (f"top_p={varying}", 1024)):
        config = composed(f"rollout.{setting}")
        use = use_of(config, processes=1, is_sharded=False, on_cpu=True, prompt_tokens=10)
        assert use.set_tokens == size


@pytest.mark.parametrize(
    "changed, expected",
    [
        # 80 tokens, 66 of them of completions; two layers keep 1000 bytes of each; the feed-forward part of the last
        # has 2 * 160 more when it goes backward, beside the gradient of the head, 800.
        ({}, 80 * 2320 + 800),
        # 16 bits: head 40 * (3 * 80 + 2 * 66) = 14_880, logits 2 * 4 * 66 * 20 = 10_560; all weights again, 2 * 1000
        ({"is_half": True}, 160 * 640 + 14_880 + 10_560 + 800 + 2000),
        # the inputs of two layers, 2 * 40 * 80, and one layer going backward, beside the gradient of the head
        ({"checkpointing": True}, 6_400 + 80 * 1320 + 800),
        # no inputs; all gradients, 4 * 1000, beside the first layer, are more than the head's beside the last
        ({"checkpointing": True, "offloads": True}, 80 * 1320 + 4_000),
        # five of the wide tensors, and the gradient of a hidden state
        ({"offloads": True}, 80 * (5 * 160 + 40) + 4_000),
        # in 16 bits 640 bytes and 2 * 80; all weights again, 2 * 1000
        ({"is_half": True, "checkpointing": True}, 6_400 + 80 * 800 + 800 + 2 * (1000 - 400)),
        # 4 parts of 20 tokens, the later of which find gradients there
        # 70 of 80 tokens first, without gradients before them; then 10 with them: 4,000 + 23,980
        ({"microbatch_tokens": 70}, 70_000 + 70 * 1_320 + 800),
        ({"microbatch_tokens": 20}, 4_000 + 40_000 + 40 * (60 + 2 * 16.5) + 2 * 4 * 16.5 * 20 + 800),
        # prompts once per completion: 108 tokens, five times their logits
        ({"shares_prompts": False}, 216_000 + 40 * (3 * 108 + 2 * 66) + 5 * 4 * 66 * 20 + 800),
    ],
    ids=str,
)
def test_an_update_by_hand(changed, expected):
    assert predicted(SHAPE, replace(USE, **changed))["update"] == pytest.approx(expected, rel=1e-12)


def test_the_line_that_is_printed():
    sizes = {"weights": 1.5, "optimizer": 3.0, "reference": 0.004, "sampling": 0.25, "update": 0.5, "peak": 5.004}
    told = "memory: 5.00 GiB at most (weights 1.50, optimizer 3.00, sampling 0.25, update 0.50), predicted"
    assert table({name: size * 2**30 for name, size in sizes.items()}) == told
    assert table({"update": 0.0, "peak": 1.0}) == "memory: 0.00 GiB at most, predicted"


def test_a_number_that_varies_counts_with_its_largest_value():
    longer = "{_target_: grpo_lightning.schedule.Linear, start: 32, end: 40, steps: 30}"
    stepwise = "{_target_: grpo_lightning.schedule.Piecewise, values: [8, 24, 16], borders: [3, 5]}"
    for number, largest in ((longer, 40), (stepwise, 24), ("9", 9)):
        config = composed(f"rollout.max_new_tokens={number}")
        use = use_of(config, processes=1, is_sharded=False, on_cpu=True, prompt_tokens=10)
        assert use.completion_tokens == largest


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], {"copy_bytes": 4.0, "offloads": False, "device": "cpu", "kv_cache_bytes": None}),
        (["policy.activation_offload=true", "trainer=gpu"], {"copy_bytes": 2.0, "offloads": True, "device": "cuda"}),
        (["trainer=gpu", "trainer.precision=32-true"], {"copy_bytes": 0.0}),
        (["trainer.precision=bf16-mixed"], {"copy_bytes": 2.0}),
        (["trainer.precision=bf16-mixed", "policy.share_prompts=false"], {"copy_bytes": 0.0}),
        (["policy.quantization=4bit", "policy.adapter={r: 4}"], {"copy_bytes": 0.0}),
    ],
    ids=str,
)
def test_what_settings_say(overrides, expected):
    on_cpu = "trainer=gpu" not in overrides
    config = composed(*overrides, *["trainer=cpu"] * on_cpu)
    use = use_of(config, processes=1, is_sharded=False, on_cpu=on_cpu, prompt_tokens=10)
    assert {name: getattr(use, name) for name in expected} == expected
    config["rollout"]["kv_cache_gib"] = 1.5
    use = use_of(config, processes=1, is_sharded=False, on_cpu=on_cpu, prompt_tokens=10)
    assert use.kv_cache_bytes == 1.5 * 2**30


@pytest.mark.slow
def test_an_update_on_one_stream_of_4k_tokens_needs_what_was_predicted(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = apart("update", "short", *LONG["16k tokens, checkpointing"][1])
    assert found["measured"] == pytest.approx(found["peak"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "LoRA"])
def test_a_real_run_needs_what_was_predicted(case, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = apart("medium", *CASES[case])
    assert found["measured"] == pytest.approx(found["peak"], rel=0.15)
