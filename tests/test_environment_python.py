"""Cells of Python: a notebook that is played again for every turn, in a sandbox."""

import time

import pytest

from grpo_lightning.composition import resolve_config
from grpo_lightning.config import ConfigError, check_runtime
from grpo_lightning.environment import Environment, Episodes
from grpo_lightning.environment.python import Python
from grpo_lightning.sandbox import client
from grpo_lightning.sandbox.client import Unavailable
from tests.support.composed import settings
from tests.support.hostile_programs import GREEDY
from tests.test_environment_tools import call

LIMITS = {"seconds": 20.0, "cpu_seconds": 2, "memory_mb": 256}
SHORT = {"seconds": 1.0, "cpu_seconds": 1, "memory_mb": 256}


def fenced(code, language="python"):
    return f"I try.\n```{language}\n{code}\n```\nLet me see."


def played(*cells, **limits):
    """The reply to each cell."""
    environment = Python(**(limits or LIMITS))
    turns = [cell if cell.startswith(("<", "I ")) else fenced(cell) for cell in cells]
    return [environment(turns=turns[: number + 1]) for number in range(len(turns))]


def test_a_notebook():
    assert played(
        "import math\nx = 3\nprint('hi')",
        "print(x)\nmath.floor(x + 4.5)",
        "def half(a):\n    return a / 0\n",
        "x += 1\n\nhalf(2)",
        "x",
        "y = 2 *",
        "x = 10; raise ValueError('no')",
        "x",
        "None",
        "print('a', end='')",
    ) == [
        "hi",
        "3\n7",
        "(no output)",
        "ZeroDivisionError: division by zero (line 3)",
        "4",
        "SyntaxError: invalid syntax (line 1)",
        "ValueError: no (line 1)",
        "10",
        "(no output)",
        "a",
    ]


@pytest.mark.parametrize(
    "turn, reply",
    [
        (fenced("1 + 1", "py"), "2"),
        (fenced("x = 2") + fenced("x"), "2"),
        ("<think>\n```python\nx = 1\n```\n</think>" + fenced("2"), "2"),
        (call("python", code="print(1)\n2"), "1\n2"),
        ('{"name": "python", "parameters": {"code": "3"}}', "3"),
        (fenced("1 + 1", "bash"), None),
        ("```python\n1 + 1", None),
        ("2", None),
    ],
)
def test_the_code_of_a_turn(turn, reply):
    assert Python(**LIMITS)(turns=[turn]) == reply


def test_what_a_cell_does_to_its_own_process():
    replies = played(
        "x = 1",
        "import sys; sys.stdout.close()",
        "print(x)",
        "import os; os._exit(0)",
        "x + 1",
        "import os; x = 5; os.kill(os.getpid(), 9)",
        "x + 2",
        "sys.exit(3)",
        "input()",
        "sys.stderr.write('not seen\\n'); import os; os.write(2, b'nor this'); None",
        "import os; os.write(1, b'raw'); None",
        "big = bytearray(10**10)",
        "from sys import stdout as out",
        "out.write('x\\n'); None",
        "'\ud800'",
        "open('/etc/passwd')",
        "open('own', 'w').write('kept')",
        "open('own').read()",
        "import random; random.random()",
        "random.seed(1); del print",
    )
    lost = "; what this cell has defined is lost)"
    assert replies[:14] == [
        "(no output)",
        "(no output)",
        "1",
        f"(ended with status 0{lost}",
        "2",
        f"(ended by signal 9{lost}",
        "3",
        "SystemExit: 3 (line 1)",
        "EOFError: EOF when reading a line (line 1)",
        "(no output)",
        "raw",
        "MemoryError (line 1)",
        "(no output)",
        "x",
    ]
    assert replies[14].startswith("UnicodeEncodeError")
    assert replies[15].startswith("PermissionError: [Errno 13]")
    assert replies[16:18] == ["4", "'kept'"]
    assert replies[18].startswith("0.")
    assert replies[19] == "NameError: name 'print' is not defined (line 1)"
    assert played("import random; random.random()") == [replies[18]]


def test_a_cell_at_a_limit_leaves_nothing_behind():
    began = time.monotonic()
    replies = played("x = 1", "x = 2\nimport time\ntime.sleep(100)", "x", "time", "print('a' * 2**21)", "x", **SHORT)
    assert replies == [
        "(no output)",
        "(ended: all cells together may take 1 s, and 1 s of computing; what this cell has defined is lost)",
        "1",
        replies[3],
        replies[4],
        "1",
    ]
    assert replies[3].startswith("NameError: name 'time' is not defined")
    assert replies[4].endswith("(ended: it printed more than 1048576 bytes; what this cell has defined is lost)")
    assert replies[4].startswith("a" * 1000 + "\n… (")
    assert len(replies[4]) < 2200
    assert time.monotonic() - began < 6  # the cell that sleeps has run once


def test_an_episode_in_a_worker():
    environment = Environment(Python(**LIMITS), 4, timeout=60.0)
    episodes = Episodes(environment, ["?"] * 2, {}, [(0, 0, 0), (0, 0, 1)])
    for turn, replies in (("x = 5", ["(no output)", "(no output)"]), ("x + 1", ["6", "6"])):
        for row in range(2):
            episodes.step(row, fenced(turn))
        assert [episodes.reply(row) for row in range(2)] == replies
    episodes.step(0, "It is 6.")
    episodes.step(1, call("python"))
    assert episodes.reply(0) is None
    assert episodes.reply(1).startswith("error: the only tool is python")
    assert episodes.over == [True, False]
    assert episodes.metrics["episode/bad_calls"] == 0.5


@pytest.mark.slow
def test_hostile_cells_end_as_replies_and_the_notebook_goes_on():
    header = "import ctypes, os, sys, threading, time\ndef escaped(what): print('ESCAPED', what)\n"
    environment = Python(**SHORT | {"memory_mb": 128})
    patient = Python(**SHORT | {"memory_mb": 128, "seconds": 20.0, "cpu_seconds": 20})
    for name, program in list(GREEDY.items())[::2]:
        turns = [fenced("seven = 7"), fenced(header + program), fenced("seven")]
        reply = environment(turns=turns[:2])
        assert len(reply) < 3000, name
        assert "ESCAPED" not in reply, name
        # A cell that has ended by itself runs again before the next; some take nearly all of the second.
        after = (environment if "(ended" in reply else patient)(turns=turns)
        assert after == "7" or name == "closes everything", (name, after)


def test_without_a_sandbox_nothing_runs(monkeypatch):
    client.close()
    change = "from grpo_lightning.sandbox import landlock; landlock._CREATE = 5000; "
    monkeypatch.setattr(client, "_BEGIN", client._BEGIN.replace("main(int", f"{change}main(int"))
    config = resolve_config(settings("environment=python"))
    with pytest.raises(Unavailable, match="Landlock"):
        Python(**LIMITS)(turns=[fenced("'never run here'")])
    with pytest.raises(ConfigError, match="environment.function: the sandbox cannot start"):
        check_runtime(config)
    client.close()
