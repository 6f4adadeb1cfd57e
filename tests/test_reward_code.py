"""Programs that models write are scored by what they do, and no program ends a run"""

from functools import partial

import pytest

from grpo_lightning.config import ConfigError, check_runtime
from grpo_lightning.reward import RewardSpec, Scoring
from grpo_lightning.reward.code import code, program
from grpo_lightning.sandbox import client
from tests.support.composed import composed
from tests.support.workers import limited

SETTINGS = {"all_or_nothing": False, "seconds": 5.0, "cpu_seconds": 2, "seconds_in_all": 20.0, "memory_mb": 256}
DOUBLES = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}, {"input": "0", "output": "0"}]
RIGHT = "print(2 * int(input()))"


def fenced(text, language="python"):
    return f"Let me think.\n\n```{language}\n{text}\n```\nThat is it."


def scored(text, tests=DOUBLES, **settings):
    (score,) = code([fenced(text)], [tests], **{**SETTINGS, **settings})
    return score


def test_the_program_of_a_completion():
    for completion, found in (
        (fenced("a"), "a\n"),
        (fenced("a", "bash"), None),
        (fenced("a") + fenced("b"), "b\n"),
        (fenced("a") + fenced("b", "text"), "a\n"),
        ("<think>\n```python\na\n```\n</think>", None),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n<answer>\n```python\nb\n```\n</answer>", "b\n"),
        ("<answer>print(1)</answer>", "print(1)"),
        ("print(1)", None),
        (fenced("x" * 100_000), None),
    ):
        assert program(completion) == found, completion[:80]


def test_the_share_of_the_tests_that_pass():
    for text, score in (
        (RIGHT, 1.0),
        ("print(4)", 1 / 3),
        ("print('4  \\n\\n')", 1 / 3),  # white space at ends
        ("print('4 4')", 0.0),
        (RIGHT + "\nraise SystemExit(1)", 0.0),
        (RIGHT + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)", 1.0),
        ("import os\nos._exit(0)", 0.0),  # an exit status alone passes nothing
        ("def (", 0.0),
        ("while True: pass", 0.0),
        ("x = bytearray(2**30)\n" + RIGHT, 0.0),
    ):
        assert scored(text, seconds=1.5, cpu_seconds=1) == score, text
    assert scored("print(4)", all_or_nothing=True) == 0.0
    with pytest.raises(ValueError, match="no test expects any output"):
        scored("pass", [{"input": "1", "output": ""}])
    assert (
        scored("n = int(input())\nif n: print(n)", [{"input": "0", "output": ""}, {"input": "1", "output": "1"}]) == 1
    )


ADD = "def add(a, b):\n    print('adding')\n    return a + b\n"


def test_functions_are_called():
    for text, arguments, output, score in (
        (ADD, [1, 2], 3, 1.0),
        (ADD, [0.1, 0.2], 0.3, 1.0),
        (ADD, [0.1, 0.2], 0.3001, 0.0),
        (ADD, [10**20, 1], 10**20, 0.0),  # whole numbers are exact
        (ADD, [1], 3, 0.0),
        ("def add(x): return (x, {'a': None})", [1], [1, {"a": None}], 1.0),
        ("def add(): return True", [], 1, 0.0),
        ("def add(): return {1, 2}", [], [1, 2], 0.0),
        ("def add():\n    import os\n    os._exit(0)", [], 0, 0.0),
    ):
        # As parquet has rows whose tests have different keys.
        test = {"function": "add", "args": arguments, "output": output, "input": None}
        assert scored(text, [test]) == score, text
    method = {"function": "Solution.f", "args": [7], "output": 7}
    assert scored("class Solution:\n    def f(self, x): return x", [method]) == 1.0


def test_what_is_expected_never_enters_the_sandbox(monkeypatch):
    given = []

    def run(text, stdin, limits):
        given.append(text + stdin)
        return client.run(text, stdin, limits)

    monkeypatch.setattr("grpo_lightning.reward.code.run", run)
    tests = [{"input": "1", "output": "987654321"}, {"function": "f", "args": [1], "output": "987654321"}]
    assert scored("def f(x): return x", tests) == 0.0
    assert len(given) == 2
    assert not any("987654321" in text for text in given)


@pytest.mark.slow
def test_the_first_test_that_takes_too_long_ends_the_rest(monkeypatch):
    calls = []
    monkeypatch.setattr("grpo_lightning.reward.code.run", lambda *a: calls.append(a) or client.run(*a))
    slow = "n = int(input())\nwhile n == 5: pass\nprint(2 * n)"
    assert scored(slow, seconds=1.0, cpu_seconds=1) == 1 / 3
    assert len(calls) == 2
    calls.clear()
    assert scored("import time\ntime.sleep(0.3)\n" + RIGHT, seconds_in_all=0.4) == 2 / 3
    assert len(calls) == 2


def test_a_program_that_fails_is_no_failure_of_the_reward():
    rewards = {"code": RewardSpec(partial(code, **SETTINGS), 1.0, timeout=60.0, max_failed=0.0)}
    texts = [fenced(RIGHT), fenced("import os; os._exit(3)"), "nothing", fenced("import os; os.kill(os.getppid(), 9)")]
    with limited(2):
        found = Scoring(rewards, ["p"] * 4, {"tests": [DOUBLES] * 4}).finish(texts, None)
    assert found.values["code"] == [1.0, 0.0, 0.0, 0.0]
    assert found.failed == {"code": 0.0}


def test_a_run_without_a_sandbox_ends_before_it_begins(monkeypatch):
    config = composed("reward=[code]", "data=jsonl", "data.path=x.jsonl")
    check_runtime(config)
    monkeypatch.setattr(client, "_ATTEMPTS", "print('read a file')#OUTSIDE")
    with pytest.raises(
        ConfigError, match=r"reward\.code\.function: the sandbox does not hold on this machine; .*read a file"
    ):
        check_runtime(config)
    check_runtime(composed("reward=[accuracy]"))
