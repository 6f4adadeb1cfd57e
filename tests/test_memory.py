"""The prediction of memory: by hand, and beside a real run."""

import pytest

from benchmarks.memory import CASES, apart
from grpo_lightning.memory import Shape, Use, activations, predicted, table, use_of
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
    assert activations(SHAPE, is_half=True) == 240 + 60 + 320
    # 2 prompts of 7 once and 6 completions of 11 in 2 layers of keys and values, and logits three times
    assert predicted(SHAPE, USE)["sampling"] == 2 * 4 * 5 * 2 * (2 * 7 + 6 * 11) + 3 * 4 * 6 * 20
    apart = predicted(SHAPE, Use(**{**vars(USE), "shares_prompts": False}))["sampling"]
    assert apart == 2 * 4 * 5 * 2 * (6 * 7 + 6 * 11) + 3 * 4 * 6 * 20
    full, checkpointed = (
        predicted(SHAPE, Use(**{**vars(USE), "checkpointing": flag}))["update"] for flag in (False, True)
    )
    assert full - checkpointed == 80 * (2 * 1000 - (1000 + 4 * 10 * 2))
    sizes = {"weights": 1.5, "optimizer": 3.0, "reference": 0.004, "sampling": 0.25, "update": 0.5, "peak": 5.004}
    told = "memory: 5.00 GiB at most (weights 1.50, optimizer 3.00, sampling 0.25, update 0.50), predicted"
    assert table({name: size * 2**30 for name, size in sizes.items()}) == told
    assert table({"update": 0.0, "peak": 1.0}) == "memory: 0.00 GiB at most, predicted"


def test_a_number_that_varies_counts_with_its_largest_value():
    longer = "{_target_: grpo_lightning.varying.Linear, start: 32, end: 40, steps: 30}"
    stepwise = "{_target_: grpo_lightning.varying.Piecewise, values: [8, 24, 16], borders: [3, 5]}"
    for number, largest in ((longer, 40), (stepwise, 24), ("9", 9)):
        config = composed(f"rollout.max_new_tokens={number}")
        use = use_of(config, processes=1, is_sharded=False, on_cpu=True, prompt_tokens=10)
        assert use.completion_tokens == largest


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "LoRA"])
def test_a_real_run_needs_what_was_predicted(case, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = apart("medium", *CASES[case])
    assert found["measured"] == pytest.approx(found["peak"], rel=0.15)
