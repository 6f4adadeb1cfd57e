"""Signals that come while an environment is waited for."""

import time
from types import SimpleNamespace

import pytest

from grpo_lightning.distributed import signals
from grpo_lightning.environment import Environment
from grpo_lightning.reward.engine import pool
from tests.support import environments


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_in_lockstep_a_signal_ends_all_episodes_and_is_raised_later(timeout, monkeypatch):
    """Where the other processes are told of it, too: they would wait for this one in the next forward pass."""

    def asked_to_end():
        raise signals.Preempted(15)

    monkeypatch.setattr(signals, "current", lambda: SimpleNamespace(check=asked_to_end))
    environment = Environment(environments.ends_itself, 4, timeout=timeout)
    how = "hang" if timeout else "end"
    given = ["p", "p"], {"how": [how, how]}, [(0, 0, 0), (0, 0, 1)], asked_to_end
    began = time.monotonic()
    episodes = environment.episodes(*given, in_lockstep=True)
    for row in range(2):
        episodes.said(row, "x")
    assert [episodes.reply(row) for row in range(2)] == [None, None]
    assert episodes.over == [False, False]
    with pytest.raises(signals.Preempted):
        episodes.check()
    episodes = environment.episodes(*given)
    episodes.said(0, "x")
    with pytest.raises(signals.Preempted):
        episodes.reply(0)
    assert time.monotonic() - began < 30
    pool.close()
