"""Workers that are really killed, really crash and really hang; and rewards that are coroutines."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children, forkserver
from pathlib import Path

import pytest

from grpo_lightning.reward import PerCompletion, PermanentError, RewardError, RewardSpec, Scoring, workers
from tests.support import hostile, judges
from tests.support.composed import ROOT
from tests.support.rewards import score
from tests.support.workers import limited


@pytest.fixture(autouse=True, scope="module")
def two_workers():
    with limited(2):
        yield


def processes():
    return sorted(process.pid for process in active_children() if process.name == "pebble_pool_worker")


def run(function, rows, seconds=5.0):
    pending = [workers.submit(function, row, seconds=seconds) for row in rows]
    return [one.result() for one in pending]


def test_each_call_gets_its_value():
    assert run(hostile.double, [{"value": i} for i in range(50)]) == [2 * i for i in range(50)]
    assert run(functools.partial(hostile.double), [{"value": "ab"}]) == ["abab"]


@pytest.mark.parametrize("hang", [hostile.hangs_in_c, hostile.never_lets_python_run, hostile.naps])
def test_what_takes_too_long_is_ended_and_holds_nobody_up(hang):
    run(hostile.double, [{"value": 1}] * 2)
    start = time.monotonic()
    hanging = [workers.submit(hang, {"value": 60.0}, seconds=0.5) for _ in range(2)]
    assert run(hostile.double, [{"value": 1}]) == [2]
    assert [one.result() for one in hanging] == [workers.Failure("timeout", "took longer than 0.5 s")] * 2
    assert time.monotonic() - start < 2.5  # 0.5 s for both at once; asking them to end first would take 3 s


def test_whatever_happens_in_a_worker_is_a_failure_of_its_call():
    for how, kind, message in (
        ("exit", "exception", "SystemExit: 3"),
        ("os_exit", "crash", "exit code 4"),
        ("crash", "crash", "exit code -11"),
        ("memory", "exception", "MemoryError"),
        ("lambda", "exception", "pickle"),
    ):
        found = run(hostile.misbehaves, [{"how": "fine"}, {"how": how}, {"how": "print"}])
        assert (found[0], found[2]) == ("fine", "print")
        assert found[1].kind == kind
        assert message in found[1].message
        assert len(found[1].message) <= 300


def test_signals_that_reach_all_processes_are_for_the_trainer_alone():
    run(hostile.double, [{"value": 1}] * 4)
    pending = [workers.submit(hostile.naps, {"value": 0.5}, seconds=5.0) for _ in range(2)]
    time.sleep(0.2)
    before = processes()
    server = forkserver._forkserver._forkserver_pid
    for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        for pid in [*before, server]:
            os.kill(pid, getattr(signal, number))
    assert [one.result() for one in pending] == [0.5, 0.5]
    assert len(before) == 2
    assert processes() == before
    assert alive(server)
    assert not set(workers._TRAINER_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])  # which still gets them
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert run(hostile.double, [{"value": value} for value in range(20)]) == [2 * value for value in range(20)]


SCRIPT = """
import os, sys, time
from pathlib import Path
from grpo_lightning.reward import workers
from tests.support import hostile
from tests.test_reward_workers import processes

if __name__ == "__main__":
    workers.MAX_WORKERS = 2
    [one.result() for one in [workers.submit(hostile.double, {"value": 1}, seconds=9) for _ in range(4)]]
    before = processes()
    child = os.fork()
    if not child:  # it starts workers of its own
        value = workers.submit(hostile.double, {"value": 2}, seconds=9).result()
        workers.close_pool()
        os._exit(value)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert processes() == before  # and ends no others
    workers.submit(hostile.never_lets_python_run, {"value": 0}, seconds=2)
    time.sleep(0.5)
    Path(sys.argv[1]).write_text(" ".join(map(str, processes())))
    time.sleep(100)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_no_worker_outlives_a_killed_trainer(tmp_path):
    script, marker = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    trainer = subprocess.Popen([sys.executable, str(script), str(marker)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(pid) for pid in marker.read_text().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


# --- rewards with a timeout


@pytest.mark.slow
def test_a_hanging_reward_is_ended_and_counted_and_gets_the_score_of_failures():
    texts, columns = ["a", "hang", "c"], {"answer": ["a", "x", "x"]}
    timed = RewardSpec(hostile.odd_sleeps, 1.0, timeout=1.0)
    found = Scoring({"slow": timed}, ["p"] * 3, columns).finish(texts, [[1]] * 3)
    assert found.values == {"slow": [1.0, 0.0, 0.0]}
    assert found.failed == {"slow": pytest.approx(1 / 3)}
    without = RewardSpec(hostile.odd_sleeps, 1.0, timeout=1.0, failed_score=None)
    assert score({"slow": without}, ["p"] * 3, texts, columns) == {"slow": [1.0, None, 0.0]}


def test_more_failures_than_allowed_end_the_run_with_the_cause():
    specs = {"odd": RewardSpec(hostile.odd_raises, 1.0, timeout=5.0, max_failed=0.5)}
    assert score(specs, ["p"] * 4, ["a", "", "", "bb"], {}) == {"odd": [1.0, 0.0, 0.0, 0.5]}
    with pytest.raises(RewardError) as error:
        score(specs, ["p"] * 3, ["a", "", ""], {})
    assert str(error.value) == (
        "reward 'odd' failed on 2 of 3 completions (allowed fraction of all 3: reward.odd.max_failed=0.5); first on "
        "row 1, exception: ZeroDivisionError: division by zero, completion ''"
    )


# --- coroutines


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(workers, "_FIRST_WAIT", 0.01)
    yield
    workers.close_loop()


def of(function, **settings):
    return {"mine": RewardSpec(PerCompletion(function), 1.0, **{"timeout": 5.0, "max_failed": 0.0} | settings)}


def scored(function, completions, **settings):
    """The scores, and the fraction that failed."""
    found = Scoring(of(function, **settings), ["?"] * len(completions), {}).finish(completions, None)
    return found.values["mine"], found.failed["mine"]


def test_every_form_of_a_coroutine_scores(quick):
    for function in (
        judges.lengths,
        functools.partial(functools.partial(judges.lengths), level=1),
        PerCompletion(functools.partial(judges.length)),
    ):
        specs = {"mine": RewardSpec(function, 1.0, max_failed=0.0)}
        # characters / 10 + those of the prompt / 1000
        assert score(specs, ["ab", "c", ""], ["xyz", "", "abcde"], {}) == {"mine": [0.302, 0.001, 0.5]}


def test_calls_begin_before_the_others_are_sampled_and_run_at_once(quick):
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


def test_no_more_calls_at_a_time_than_allowed(quick):
    running, most = 0, 0

    async def counts(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return 0.0

    scored(counts, ["x"] * 10, concurrency=3)
    assert most == 3


async def misbehaves(completion):
    if completion == "raises":
        raise OSError("\x1b[2Jno line")
    if completion == "exits":
        sys.exit(3)
    if completion == "hangs":
        await asyncio.sleep(60)
    if completion == "swallows":
        for _ in range(2):  # that of its time limit, and that of the end
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
    return 1.0


def test_whatever_a_call_does_is_a_failure_of_its_row(quick):
    for how, message in {
        "raises": "exception: OSError: .{,8}2Jno line",
        "exits": "exception: RuntimeError: SystemExit: 3",
        "hangs": "timeout: took longer than 0.5 s",
        "swallows": "timeout: took longer than 0.5 s",
    }.items():
        texts = ["fine", how, "fine", "fine"]
        settings = {"timeout": 0.5, "failed_score": -1.0}
        assert scored(misbehaves, texts, max_failed=0.25, **settings) == ([1.0, -1.0, 1.0, 1.0], 0.25)
        match = (
            rf"^reward 'mine' failed on 1 of 2 completions \(.*max_failed=0.2\); first on row 1, {message}, completion"
        )
        with pytest.raises(RewardError, match=match):
            scored(misbehaves, texts, max_failed=0.2, **settings)


def test_a_call_that_failed_is_made_again(quick):
    for error, retries, expected, calls in (
        (OSError("no line"), 0, 0.0, 1),
        (OSError("no line"), 1, 0.0, 2),
        (OSError("no line"), 5, 1.0, 3),
        (PermanentError("no"), 5, 0.0, 1),
    ):
        called = []

        async def function(completion, called=called, error=error):
            called.append(completion)
            if len(called) <= 2:
                raise error
            return 1.0

        assert scored(function, ["x"], retries=retries, max_failed=1.0) == ([expected], 1.0 - expected)
        assert len(called) == calls


class Asked(Exception):
    pass


def test_asked_to_end_all_calls_are_cancelled():
    ended = []

    async def waits(completions):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    def poll():
        raise Asked

    scoring = Scoring({"mine": RewardSpec(waits, 1.0, timeout=None)}, ["?"] * 3, {}, poll)
    scoring.begin(0, "x", [1])
    start = time.monotonic()
    with pytest.raises(Asked):
        scoring.finish(["x"] * 3, None)
    workers.close_loop()
    assert ended == ["cancelled"] * 3
    assert time.monotonic() - start < 2
