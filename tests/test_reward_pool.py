"""Workers that are really killed, really crash and really hang."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_lightning.reward import RewardError, Scoring, Weighted, pool, score
from tests import hostile


@pytest.fixture(autouse=True, scope="module")
def two_workers():
    pool.configure(2)
    yield
    pool.configure(None)


def run(function, rows, seconds=5.0):
    return pool.submit(function, rows, seconds=seconds).result()


def test_values_come_in_the_order_of_their_rows():
    assert run(hostile.double, [{"value": i} for i in range(50)]) == [2 * i for i in range(50)]
    assert run(functools.partial(hostile.double), [{"value": "ab"}]) == ["abab"]
    assert run(hostile.double, []) == []


def test_a_row_that_takes_too_long_is_ended_and_the_others_are_not():
    start = time.monotonic()
    found = run(hostile.naps, [{"seconds": s} for s in (0.0, 60.0, 0.1, 60.0, 0.0)], seconds=1.0)
    assert time.monotonic() - start < 20
    assert [found[i] for i in (0, 2, 4)] == [0.0, 0.1, 0.0]
    assert found[1] == found[3] == pool.Failure("timeout", "took longer than 1 s")


def test_a_hang_in_c_code_is_ended():
    found = run(hostile.hangs_in_c, [{"value": 0}], seconds=0.5)
    assert found[0].kind == "timeout"
    assert run(hostile.double, [{"value": 1}]) == [2]


def test_waiting_for_a_worker_is_not_counted():
    assert run(hostile.naps, [{"seconds": 0.3}] * 8, seconds=1.0) == [0.3] * 8  # the last starts after 0.9 s


def test_imports_are_not_counted():
    assert run(hostile.Once(1.5), [{"value": 1}], seconds=0.5) == [2]


@pytest.mark.parametrize(
    "how, kind, message",
    [
        ("raise", "exception", "RuntimeError: no no"),
        ("exit", "exception", "SystemExit: 3"),
        ("os_exit", "crash", "exit code 4"),
        ("crash", "crash", "exit code -11"),
        ("recurse", "exception", "RecursionError"),
        ("memory", "exception", "MemoryError"),
        ("lambda", "exception", "pickle"),
        ("unpicklable_error", "exception", "Unpicklable: its text cannot be shown"),
    ],
)
def test_whatever_happens_in_a_worker_is_a_failure_of_its_row(how, kind, message):
    found = run(hostile.misbehaves, [{"how": "fine"}, {"how": how}, {"how": "print"}])
    assert (found[0], found[2]) == ("fine", "print")
    assert found[1].kind == kind
    assert message in found[1].message
    assert len(found[1].message) <= 300


def test_what_cannot_be_pickled_is_refused_at_once():
    with pytest.raises(ValueError, match="cannot run in a worker process.*functions of a module"):
        pool.submit(lambda value: value, [{"value": 1}], seconds=1.0)


def test_the_pool_starts_again_after_it_was_closed():
    pool.close()
    assert run(hostile.double, [{"value": 4}]) == [8]


def test_cores_are_shared_between_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert pool._default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert pool._default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert pool._default_workers() == 1


SCRIPT = """
import sys
from pathlib import Path
from grpo_lightning.reward import pool
from tests import hostile

if __name__ == "__main__":
    pool.configure(2)
    pool.submit(hostile.double, [{"value": 1}] * 4, seconds=9).result()
    Path(sys.argv[1] + ".idle").write_text(" ".join(str(p) for p in pool._pool._pool_manager.worker_manager.workers))
    pool.submit(hostile.writes_pid_and_hangs, [{"path": sys.argv[1]}], seconds=2).result if len(sys.argv) > 2 else 0
    import time
    time.sleep(100)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("hanging", [False, True])
def test_no_worker_outlives_a_killed_trainer(hanging, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    marker = tmp_path / "pid"
    here = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": here}
    arguments = [sys.executable, str(script), str(marker), *(["hang"] if hanging else [])]
    trainer = subprocess.Popen(arguments, env=environment)
    idle = Path(f"{marker}.idle")
    waited_for = marker if hanging else idle
    deadline = time.monotonic() + 60
    while not (waited_for.exists() and waited_for.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(pid) for pid in idle.read_text().split()]
    assert len(workers) == 2
    assert all(map(alive, workers))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 15
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


# --- rewards with a timeout

TIMED = {"slow": Weighted(hostile.odd_sleeps, 1.0, timeout=1.0)}


def test_a_hanging_reward_is_ended_and_counted_and_scores_what_is_set():
    texts, columns = ["a", "hang", "c"], {"answer": ["a", "x", "x"]}
    found = Scoring(TIMED, ["p"] * 3, columns).finish(texts, [[1]] * 3)
    assert found.values == {"slow": [1.0, 0.0, 0.0]}
    assert found.failed == {"slow": pytest.approx(1 / 3)}
    rewards = {"slow": Weighted(hostile.odd_sleeps, 1.0, timeout=1.0, failed_score=None)}
    assert score(rewards, ["p"] * 3, texts, columns) == {"slow": [1.0, None, 0.0]}


def test_completions_may_be_handed_over_one_by_one_in_any_order():
    scoring = Scoring(
        TIMED | {"sum": Weighted(lambda completions: [5.0] * 4, 1.0)}, ["p"] * 4, {"answer": list("abcd")}
    )
    assert scoring.may_begin
    scoring.begin(2, "c", [1])
    scoring.begin(0, "x", [1])
    assert scoring.finish(["x", "b", "c", "x"], [[1]] * 4).values == {
        "slow": [0.0, 1.0, 1.0, 0.0],
        "sum": [5.0] * 4,
    }
    assert not Scoring({"sum": Weighted(lambda completions: [1.0], 1.0)}, ["p"], {}).may_begin


def test_more_failures_than_allowed_end_the_run_with_the_cause():
    rewards = {"odd": Weighted(hostile.odd_raises, 1.0, timeout=5.0, max_failed=0.5)}
    assert score(rewards, ["p"] * 4, ["a", "", "", "bb"], {}) == {"odd": [1.0, 0.0, 0.0, 0.5]}
    with pytest.raises(RewardError) as error:
        score(rewards, ["p"] * 3, ["a", "", ""], {})
    assert str(error.value) == (
        "reward 'odd' failed on 2 of 3 completions (allowed share: reward.odd.max_failed=0.5); first on row 1, "
        "exception: ZeroDivisionError: division by zero, completion ''"
    )


def test_a_wrong_count_in_a_worker_is_a_mistake_of_the_function():
    with pytest.raises(RewardError, match="'two': expected a list with one score for one completion"):
        score({"two": Weighted(hostile.two_scores, 1.0, timeout=5.0)}, ["p"], ["a"], {})


@pytest.mark.parametrize("setting, value", [("timeout", 0), ("timeout", -1.0), ("max_failed", 1.5), ("clip", [1, 0])])
def test_impossible_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=f"{setting}: expected"):
        Weighted(len, 1.0, **{setting: value})
