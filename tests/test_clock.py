"""Seconds of phases, on a device that only queues work."""

import time

import pytest
import torch

from grpo_lightning.clock import Clock
from grpo_lightning.transformer import size
from grpo_lightning.transformer.size import least_seconds, matmul_rate


class Device:
    """A CUDA device with a clock: what is queued takes its time once it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.queued = 0.0
        self.waits = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def synchronize(self, device: object = None) -> None:
        self.now += self.queued
        self.queued = 0.0
        self.waits += 1


def test_queued_work_counts_towards_the_phase_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    clock = Clock()
    device.queued = 100.0  # of the step before
    clock.restart()
    device.queued += 1.0  # between phases
    with clock("rollout"):
        device.queued += 2.0
    with clock("update"):
        device.now += 0.5
        device.queued += 4.0
    device.queued += 8.0
    assert clock.read() == {"rollout": 2.0, "update": 4.5, "step": 1.0 + 2.0 + 4.5 + 8.0}


def test_the_least_time_of_queued_work_by_hand() -> None:
    now, queued, waits = 0.0, 0.0, 0

    def work() -> None:
        nonlocal queued, now
        now += 0.001  # to queue it
        queued += 50.0 if waits == 0 else 0.4 if waits == 2 else 0.5  # the first time loads libraries

    def finish() -> None:
        nonlocal queued, now, waits
        now, queued, waits = now + queued, 0.0, waits + 1

    # A round is 4 * (0.001 + 0.5) = 2.004 s, the second one 4 * (0.001 + 0.4) = 1.604 s, after which 3 s are over.
    found = least_seconds(work, at_once=4, finish=finish, seconds=3.0, clock=lambda: now)
    assert found == pytest.approx(0.401)
    assert waits == 3


def test_the_rate_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert matmul_rate(16, device=torch.device("cpu"), dtype=torch.bfloat16, seconds=0.01) > 1e6
    assert torch.equal(torch.rand(1), expected)


def test_the_rate_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "least_seconds", lambda work, **named: (work(), 0.5)[1])
    # [2048, 24] times [24, 96]: 2 * 2048 * 24 * 96 = 9,437,184 operations in half a second
    assert matmul_rate(24, device=torch.device("cpu"), dtype=torch.float32) == 18_874_368
