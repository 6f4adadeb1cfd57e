"""Whole runs with a judge: it fails, it is asked once, runs are killed and go on, and nothing waits for it."""

import hashlib
import json
import shutil

import pytest
import torch

from tests.support.judges import Reply, serving
from tests.support.running import small_run

pytestmark = pytest.mark.slow
KEY = "k3y-of-nobody-at-all"


def settings(server, rewards="custom,judge"):
    return (
        f"reward=[{rewards}]",
        f"reward.judge.function.base_url={server.url}",
        "reward.judge.function.model=m",
        "reward.judge.function.api_key_env=SOME_KEY",
    )


def by_text(number, text):
    """A judge who always says the same of the same text, from 0 to 10."""
    return f"SCORE: {hashlib.sha256(text.encode()).digest()[0] / 25.5:.3f}"


def weights(directory):
    return torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)


def test_a_run_bears_a_bad_judge_and_writes_no_secret(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.reward.coroutines._FIRST_WAIT", 0.01)
    bad = [Reply(status=500), Reply(text=f"\x1b[2J{KEY} SCORE: 99"), Reply(hangs_up=True)]

    def mixed(number, text):
        """Every fourth completion gets no answer at all, others one at the second try."""
        if hashlib.sha256(text.encode()).digest()[1] % 4 == 0:
            return bad[number % 3]
        return bad[number % 3] if number % 5 == 0 else f"{KEY}\n{by_text(number, text)}"

    with serving(mixed) as server:
        module = small_run(tmp_path, *settings(server), "reward.judge.max_failed=1", "steps=2")
    assert 0 < module.metrics["failure/judge"] < 1
    assert 0 < module.metrics["reward/judge"] < 1
    lines = [json.loads(line) for line in (tmp_path / "judge.jsonl").read_text().splitlines()]
    assert all(0 <= line["score"] <= 1 for line in lines)
    assert len(lines) == len({line["request"] for line in lines}) < len(server.asked)
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    assert "\x1b" not in (tmp_path / "judge.jsonl").read_text()


def test_a_continued_run_asks_nothing_twice(tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    more = ("callbacks.checkpoint.every=1", "validation.every=2", "checkpoint=last")
    # a judge who never says the same again
    with serving(lambda number, _: f"SCORE: {number * 37 % 100 / 10}") as server:
        small_run(first, *settings(server), *more[:2], "steps=2")
        shutil.copytree(first, again)
        expected = small_run(first, *settings(server), *more, "steps=4")
        assert len(set(server.messages)) == len(server.messages)
        own = settings(server)
    shutil.copy(first / "judge.jsonl", again / "judge.jsonl")
    found = small_run(again, *own, *more, "steps=4")
    timed = ("time/", "perf/")
    for name, value in expected.metrics.items():
        if not name.startswith(timed):
            assert found.metrics[name] == value, name
    assert all(torch.equal(weights(again)[name], value) for name, value in weights(first).items())
    assert (first / "judge.jsonl").read_bytes() == (again / "judge.jsonl").read_bytes()
