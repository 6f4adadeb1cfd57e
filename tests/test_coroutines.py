"""Rewards that are coroutines: what they may do, and that nothing of them is left."""

import asyncio
import contextlib
import functools
import sys
import threading
import time

import pytest

from grpo_lightning.reward import PerCompletion, RewardError, RewardSpec, Scoring, check_columns, coroutines, score
from tests.support import judges


@pytest.fixture(autouse=True)
def a_loop_of_its_own(monkeypatch):
    monkeypatch.setattr(coroutines, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(coroutines, "SLICE", 0.05)
    monkeypatch.setattr(coroutines, "_num_left", 0)
    yield
    coroutines.close()
    deadline = time.monotonic() + 5
    while (left := threads()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "rewards"]


def of(function, **settings):
    return {"mine": RewardSpec(PerCompletion(function), 1.0, **{"timeout": 5.0, "max_failed": 0.0} | settings)}


def scored(function, completions, poll=None, **settings):
    """The scores, and the fraction that failed."""
    scoring = Scoring(of(function, **settings), ["?"] * len(completions), {}, poll)
    found = scoring.finish(completions, None)
    return found.values["mine"], found.failed["mine"]


class Awaited:
    async def __call__(self, completions, prompts):
        return await judges.lengths(completions, prompts)

    async def method(self, completions, prompts):
        return await judges.lengths(completions, prompts)

    async def of_one(self, completion, prompt):
        return await judges.length(completion, prompt)


FORMS = {
    "function": judges.lengths,
    "partial": functools.partial(functools.partial(judges.lengths), level=1),
    "object": Awaited(),
    "partial_object": functools.partial(Awaited()),
    "method": Awaited().method,
    "per_completion": PerCompletion(judges.length),
    "per_completion_partial": PerCompletion(functools.partial(judges.length)),
    "per_completion_method": PerCompletion(Awaited().of_one),
}


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_every_form_of_a_coroutine_scores(function, timeout):
    weighted = RewardSpec(function, 1.0, timeout=timeout, max_failed=0.0)
    check_columns({"mine": weighted}, [])
    # characters / 10 + those of the prompt / 1000
    assert score({"mine": weighted}, ["ab", "c", ""], ["xyz", "", "abcde"], {}) == {"mine": [0.302, 0.001, 0.5]}


def test_calls_begin_before_the_others_are_sampled_and_run_at_once():
    begun = [threading.Event() for _ in range(3)]
    go = threading.Event()

    async def waits(completion):
        begun[int(completion)].set()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return float(completion)

    scoring = Scoring(of(waits), ["?"] * 3, {})
    assert scoring.may_begin
    scoring.begin(2, "2", [1])
    scoring.begin(0, "0", [1])
    assert begun[2].wait(5)
    assert begun[0].wait(5)
    assert not begun[1].is_set()
    go.set()
    assert scoring.finish(["0", "1", "2"], None).values == {"mine": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_calls_at_a_time_than_allowed(concurrency):
    running, most = 0, 0

    async def counts(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return 0.0

    scored(counts, ["x"] * 10, concurrency=concurrency)
    assert most == concurrency


# --- failures


async def misbehaves(completion):
    if completion == "raises":
        raise OSError("\x1b[2Jno line")
    if completion == "exits":
        sys.exit(3)
    if completion == "cancels":
        raise asyncio.CancelledError
    if completion == "hangs":
        await asyncio.sleep(60)
    if completion == "swallows":
        for _ in range(2):  # that of its time limit, and that of the end
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
    if completion == "blocks":
        time.sleep(1.5)
    return 1.0


HOW = {
    "raises": "exception: OSError: .{,8}2Jno line",
    "exits": "exception: RuntimeError: SystemExit: 3",
    "cancels": "exception: CancelledError",
    "hangs": "timeout: took longer than 0.5 s",
    "swallows": "timeout: took longer than 0.5 s",
    "blocks": "timeout: took longer than 0.5 s without any await",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_whatever_a_call_does_is_a_failure_of_its_row(how):
    start = time.monotonic()
    texts = ["fine", how, "fine", "fine"]
    settings = {"timeout": 0.5, "failed_score": -1.0}
    assert scored(misbehaves, texts, max_failed=0.25, **settings) == ([1.0, -1.0, 1.0, 1.0], 0.25)
    with pytest.raises(
        RewardError,
        match=rf"^reward 'mine' failed on 1 of 4 completions \(.*reward.mine.max_failed=0.2\); first on row 1, "
        rf"{HOW[how]}, completion '{how}'; the last 2 were not waited for$",
    ):
        scored(misbehaves, texts, max_failed=0.2, **settings)
    assert time.monotonic() - start < 10


# --- more tries


def fails(times, error):
    """A coroutine that raises so often, and the times of its calls."""
    called: list[float] = []

    async def function(completion):
        called.append(time.monotonic())
        if len(called) <= times:
            raise error
        return 1.0

    return function, called


@pytest.mark.parametrize("retries, score, calls", [(0, 0.0, 1), (1, 0.0, 2), (2, 1.0, 3), (5, 1.0, 3)])
def test_a_call_that_failed_is_made_again(retries, score, calls):
    function, called = fails(2, OSError("no line"))
    assert scored(function, ["x"], retries=retries, max_failed=1.0) == ([score], 1.0 - score)
    assert len(called) == calls


# --- the end


class Asked(Exception):
    pass


def test_asked_to_end_all_calls_are_cancelled_and_closed():
    ended = []

    class Client:
        async def __call__(self, completions):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def aclose(self):
            ended.append("closed")

    def poll():
        raise Asked

    scoring = Scoring({"mine": RewardSpec(functools.partial(Client()), 1.0, timeout=None)}, ["?"] * 3, {}, poll)
    scoring.begin(0, "x", [1])
    start = time.monotonic()
    with pytest.raises(Asked):
        scoring.finish(["x"] * 3, None)
    coroutines.close()
    assert ended == ["cancelled"] * 3 + ["closed"]
    assert threads() == []
    assert time.monotonic() - start < 2
