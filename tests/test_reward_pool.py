"""Workers that are really killed, really crash and really hang."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from grpo_lightning.reward import RewardError, RewardSpec, Scoring, score, workers
from tests.support import hostile
from tests.support.workers import limited

HERE = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True, scope="module")
def two_workers():
    with limited(2):
        yield


def never_lets_python_run(value=0):
    """A loop in C without a look at signals, so that only the kernel ends it."""
    return max(range(10**13))


def refuses():
    raise OSError("not here")


class OnlyThere:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return refuses, ()

    def __call__(self, value):
        return OnlyThere()


class SlowVerifier:
    """Sleeps for as long as the answer says. Here, since what the tests of verifiers import takes seconds."""

    def __call__(self, answer, entry):
        time.sleep(float(answer))
        return 1 / entry["metadata"]["value"]


def processes():
    return [*workers._pool._pool_manager.worker_manager.workers]


def run(function, rows, seconds=5.0):
    return workers.submit(function, rows, seconds=seconds).result()


def test_values_come_in_the_order_of_their_rows():
    assert run(hostile.double, [{"value": i} for i in range(50)]) == [2 * i for i in range(50)]
    assert run(functools.partial(hostile.double), [{"value": "ab"}]) == ["abab"]
    assert run(hostile.double, []) == []


def test_a_row_that_takes_too_long_is_ended_and_the_others_are_not():
    start = time.monotonic()
    found = run(hostile.naps, [{"seconds": s} for s in (0.0, 60.0, 0.1, 60.0, 0.0)], seconds=1.0)
    assert time.monotonic() - start < 20
    assert [found[i] for i in (0, 2, 4)] == [0.0, 0.1, 0.0]
    assert found[1] == found[3] == workers.Failure("timeout", "took longer than 1 s")


@pytest.mark.parametrize("hang", [hostile.hangs_in_c, never_lets_python_run])
def test_hangs_in_c_code_are_ended_and_hold_nobody_up(hang):
    run(hostile.double, [{"value": 1}] * 2)
    start = time.monotonic()
    hanging = workers.submit(hang, [{"value": 0}] * 2, seconds=0.5)
    assert run(hostile.double, [{"value": 1}]) == [2]
    assert [found.kind for found in hanging.result()] == ["timeout"] * 2
    assert time.monotonic() - start < 2.5  # 0.5 s for both at once; asking them to end first would take 3 s


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


def test_a_function_that_no_worker_can_import_is_the_users_mistake():
    pending = workers.submit(OnlyThere(), [{"value": 0}] * 3, seconds=5.0)
    with pytest.raises(ValueError, match="OnlyThere.*cannot run in a worker process: OSError: not here; allowed"):
        pending.result()
    assert run(hostile.double, [{"value": 1}]) == [2]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks up a process id")
def test_signals_that_reach_all_processes_are_for_the_trainer_alone():
    run(hostile.double, [{"value": 1}] * 4)
    pending = workers.submit(hostile.naps, [{"seconds": 0.5}] * 2, seconds=5.0)
    time.sleep(0.2)
    before = processes()
    server = forkserver._forkserver._forkserver_pid
    for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        for pid in [*before, server]:
            os.kill(pid, getattr(signal, number))
    assert pending.result() == [0.5, 0.5]
    assert processes() == before
    assert alive(server)
    assert not set(workers._FOR_TRAINER) & signal.pthread_sigmask(signal.SIG_BLOCK, [])  # which still gets them


def test_rows_survive_workers_that_are_killed_from_outside():
    run(hostile.double, [{"value": 1}] * 4)
    for pid in processes():
        os.kill(pid, signal.SIGKILL)
    assert run(hostile.double, [{"value": value} for value in range(20)]) == [2 * value for value in range(20)]


SCRIPT = """
import sys, time
from pathlib import Path
from grpo_lightning.reward import workers
from tests.support import hostile
from tests.test_reward_pool import never_lets_python_run

def hangs(path):
    Path(path).write_text("hangs")
    never_lets_python_run()

if __name__ == "__main__":
    workers.MOST_WORKERS = 2
    workers.submit(hostile.double, [{"value": 1}] * 4, seconds=9).result()
    workers = workers._pool._pool_manager.worker_manager.workers
    Path(sys.argv[1] + ".idle").write_text(" ".join(map(str, workers)))
    if len(sys.argv) > 2:
        workers.submit(hangs, [{"path": sys.argv[1]}], seconds=2)
    time.sleep(100)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [False, True])
def test_no_worker_outlives_a_killed_trainer(hanging, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    marker = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": HERE}
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


def output_of(tmp_path, text):
    """What a script prints, and its complaints."""
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": HERE}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    return ended.stdout, ended.stderr


def test_a_forked_process_starts_workers_of_its_own(tmp_path):
    text = """
import os
from grpo_lightning.reward import workers
from tests.support import hostile
if __name__ == "__main__":
    workers.MOST_WORKERS = 1
    workers.submit(hostile.misbehaves, [{"how": "print"}], seconds=5).result()  # is not shown
    print(workers.submit(hostile.double, [{"value": 1}], seconds=5).result(), flush=True)
    child = os.fork()
    if not child:
        print(workers.submit(hostile.double, [{"value": 2}], seconds=5).result(), flush=True)
        workers.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(workers.submit(hostile.double, [{"value": 3}], seconds=5).result(), flush=True)
"""
    assert output_of(tmp_path, text)[0] == "[2]\n[4]\n[6]\n"


# --- rewards with a timeout

TIMED = {"slow": RewardSpec(hostile.odd_sleeps, 1.0, timeout=1.0)}


@pytest.mark.slow
def test_a_hanging_reward_is_ended_and_counted_and_scores_what_is_set():
    texts, columns = ["a", "hang", "c"], {"answer": ["a", "x", "x"]}
    found = Scoring(TIMED, ["p"] * 3, columns).finish(texts, [[1]] * 3)
    assert found.values == {"slow": [1.0, 0.0, 0.0]}
    assert found.failed == {"slow": pytest.approx(1 / 3)}
    rewards = {"slow": RewardSpec(hostile.odd_sleeps, 1.0, timeout=1.0, failed_score=None)}
    assert score(rewards, ["p"] * 3, texts, columns) == {"slow": [1.0, None, 0.0]}


def test_more_failures_than_allowed_end_the_run_with_the_cause():
    rewards = {"odd": RewardSpec(hostile.odd_raises, 1.0, timeout=5.0, max_failed=0.5)}
    assert score(rewards, ["p"] * 4, ["a", "", "", "bb"], {}) == {"odd": [1.0, 0.0, 0.0, 0.5]}
    with pytest.raises(RewardError) as error:
        score(rewards, ["p"] * 3, ["a", "", ""], {})
    assert str(error.value) == (
        "reward 'odd' failed on 2 of 3 completions (allowed fraction: reward.odd.max_failed=0.5); first on row 1, "
        "exception: ZeroDivisionError: division by zero, completion ''"
    )


def test_a_wrong_count_in_a_worker_is_a_mistake_of_the_function():
    with pytest.raises(RewardError, match="'two': expected a list with one score for one completion"):
        score({"two": RewardSpec(hostile.two_scores, 1.0, timeout=5.0)}, ["p"], ["a"], {})


@pytest.mark.parametrize(
    "setting, value, allowed",
    [
        ("timeout", 0, "seconds > 0 or null"),
        ("timeout", -1.0, "seconds > 0 or null"),
        ("max_failed", 1.5, "a fraction from 0 to 1"),
        ("clip", [1, 0], "[lowest, highest] or null"),
    ],
)
def test_impossible_settings_are_refused(setting, value, allowed):
    with pytest.raises(ValueError, match=re.escape(f"{setting}={value}: must be {allowed}")):
        RewardSpec(len, 1.0, **{setting: value})
