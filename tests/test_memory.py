"""The prediction of memory: by hand, and beside a real run."""

from dataclasses import replace

import pytest

from benchmarks.memory import CASES, LONG, apart
from grpo_lightning.memory import Shape, Workload, predict, workload
from tests.support.composed import composed

SHAPE = Shape(trained=1000, frozen=0, body=800, hidden=10, layers=2, intermediate=40, vocabulary=20, keys=5)
LOAD = Workload(prompts=2, group_size=3, prompt_tokens=7, completion_tokens=11, microbatch_tokens=10**6)


def test_states_by_hand():
    parts = predict(SHAPE, LOAD)
    assert (parts["weights"], parts["optimizer"], parts["reference"]) == (4000, 8000, 0)
    assert predict(SHAPE, replace(LOAD, reference_bytes=2.0))["reference"] == 2000
    assert predict(SHAPE, replace(LOAD, shards=4))["optimizer"] == 2000
    small = predict(replace(SHAPE, trained=10, frozen=1000), replace(LOAD, frozen_bytes=0.5, state_bytes=2.0))
    assert (small["weights"], small["optimizer"]) == (4 * 10 + 500, 20)


def test_sampling_by_hand():
    # 2 prompts of 7 once and 6 completions of 11 in 2 layers of keys and values, one of them twice, logits three times;
    # and a copy of its prompt for each of 6
    assert predict(SHAPE, LOAD)["sampling"] == 2 * 4 * 5 * (2 * (2 + 6) * 7 + 3 * 6 * 11) + 3 * 4 * 6 * 20
    long = predict(SHAPE, replace(LOAD, prompt_tokens=20_000))["sampling"]  # 2 * 4 * 5 * 6 * 20,000 is above 4 MiB
    assert long == 2 * 4 * 5 * (2 * 2 * 20_000 + 3 * 6 * 11) + 3 * 4 * 6 * 20
    unshared = predict(SHAPE, replace(LOAD, shares_prompts=False))["sampling"]
    assert unshared == 2 * 4 * 5 * (2 * 6 * 7 + 3 * 6 * 11) + 3 * 4 * 6 * 20
    # room for two of the completions, 80 bytes a token
    few = predict(SHAPE, replace(LOAD, kv_cache_bytes=80.0 * (2 * 7 + 2 * 11)))["sampling"]
    assert few == 2 * 4 * 5 * (2 * (2 + 2) * 7 + 3 * 2 * 11) + 3 * 4 * 2 * 20


def test_an_update_by_hand():
    for changed, expected in (
        # 80 tokens, 66 of them of completions; two layers keep 1000 bytes of each: norms 4 * 6 * 10, attention
        # 4 * (2 * 10 + 2 * 5), feed-forward 4 * 4 * 40; the feed-forward part of the last has 2 * 160 more when it goes
        # backward, beside the gradient of the head, 800.
        ({}, 80 * 2320 + 800),
        # 16 bits: head 40 * (3 * 80 + 2 * 66) = 14_880, logits 2 * 4 * 66 * 20 = 10_560; all weights again, 2 * 1000
        ({"is_half": True}, 160 * 640 + 14_880 + 10_560 + 800 + 2000),
        # the inputs of two layers, 2 * 40 * 80, and one layer going backward, beside the gradient of the head
        ({"checkpointing": True}, 6_400 + 80 * 1320 + 800),
        # no inputs; all gradients, 4 * 1000, beside the first layer, are more than the head's beside the last
        ({"checkpointing": True, "offloads": True}, 80 * 1320 + 4_000),
        # five of the wide tensors, and the gradient of a hidden state
        ({"offloads": True}, 80 * (5 * 160 + 40) + 4_000),
        # 4 parts of 20 tokens, the later of which find gradients there
        ({"microbatch_tokens": 20}, 4_000 + 40_000 + 40 * (60 + 2 * 16.5) + 2 * 4 * 16.5 * 20 + 800),
        # prompts once per completion: 108 tokens, five times their logits
        ({"shares_prompts": False}, 216_000 + 40 * (3 * 108 + 2 * 66) + 5 * 4 * 66 * 20 + 800),
    ):
        assert predict(SHAPE, replace(LOAD, **changed))["update"] == pytest.approx(expected, rel=1e-12), changed


def test_the_workload_of_settings():
    scheduled = "{_target_: grpo_lightning.schedule.Linear, start: 32, end: 40, steps: 30}"
    for overrides, expected in (
        ([], {"copy_bytes": 4.0, "offloads": False, "device": "cpu", "kv_cache_bytes": None, "reference_bytes": 4.0}),
        (["policy.activation_offload=true", "trainer=gpu"], {"copy_bytes": 2.0, "offloads": True, "device": "cuda"}),
        (["trainer=gpu", "trainer.precision=32-true"], {"copy_bytes": 0.0}),
        (["trainer.precision=bf16-mixed", "policy.share_prompts=false"], {"copy_bytes": 0.0}),
        (
            ["policy.quantization=4bit", "policy.adapter={r: 4}", "reference=adapter_off"],
            {"copy_bytes": 0.0, "frozen_bytes": 0.53, "reference_bytes": 0.0},
        ),
        (["rollout.kv_cache_gib=1.5", "reference.dtype=bfloat16"], {"kv_cache_bytes": 1.5 * 2**30}),
        (["reference.dtype=bfloat16"], {"reference_bytes": 2.0}),
        (["loss.kl_coef=0"], {"reference_bytes": 0.0}),
        ([f"rollout.max_new_tokens={scheduled}"], {"completion_tokens": 40}),
    ):
        on_cpu = "trainer=gpu" not in overrides
        config = composed(*overrides, *["trainer=cpu"] * on_cpu)
        load = workload(config, processes=1, is_sharded=False, on_cpu=on_cpu, prompt_tokens=10)
        assert {name: getattr(load, name) for name in expected} == expected, overrides


@pytest.mark.slow
@pytest.mark.parametrize("case", ["LoRA", "16k tokens, checkpointing"])
def test_a_real_run_needs_what_was_predicted(case, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ("medium", *CASES[case]) if case in CASES else ("update", "short", *LONG[case][1])
    measured = apart(*arguments)
    assert measured["measured"] == pytest.approx(measured["peak"], rel=0.15 if case in CASES else 0.1)
