"""Seconds of phases, on a device that only queues work."""

import itertools
import time

import pytest
import torch

from grpo_lightning.clock import Clock
from grpo_lightning.transformer import size
from grpo_lightning.transformer.size import matmul_rate


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


def test_the_rate_leaves_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert matmul_rate(16, device=torch.device("cpu"), dtype=torch.bfloat16, seconds=0.01) > 1e6
    assert torch.equal(torch.rand(1), expected)


def test_the_rate_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(size, "perf_counter", lambda: 0.5 * next(ticks))
    # [2048, 24] times [24, 96]: 2 * 2048 * 24 * 96 = 9,437,184 operations in half a second
    assert matmul_rate(24, device=torch.device("cpu"), dtype=torch.float32) == 18_874_368
