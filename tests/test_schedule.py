import pytest

from grpo_lightning.schedule import constant, cosine, linear


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (linear, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (cosine, [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),  # (1 + cos(pi / 4)) / 2, (1 + cos(3 pi / 4)) / 2
    ],
)
def test_by_hand(schedule, expected):
    assert [schedule(step, total_steps=6, warmup_steps=2) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [constant, linear, cosine])
def test_no_warmup_starts_at_the_full_rate_and_nothing_goes_below_zero(schedule):
    assert schedule(0, total_steps=3, warmup_steps=0) == 1.0
    assert schedule(99, total_steps=3, warmup_steps=0) in (0.0, 1.0)
    assert schedule(0, total_steps=1, warmup_steps=5) == pytest.approx(0.2)
