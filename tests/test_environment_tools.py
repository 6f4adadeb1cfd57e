"""Tools and cells of Python: what a model calls is carried out once, and whatever else it says becomes a reply."""

import inspect
import json
import pickle
import random
import time
from collections import Counter
from functools import partial

import pytest

from grpo_lightning.composition import resolve_config
from grpo_lightning.config import ConfigError, check_runtime
from grpo_lightning.environment import BadCall, Environment, Episodes
from grpo_lightning.environment.base import StepResult
from grpo_lightning.environment.python import Python
from grpo_lightning.environment.tools import Tools
from grpo_lightning.sandbox import client
from grpo_lightning.sandbox.client import SandboxUnavailable
from tests.support import toolbox
from tests.support.composed import settings


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply_to(text, *tools, **row):
    return Tools(list(tools or (toolbox.add, toolbox.now)))(turns=["earlier", text], **row)


def test_the_schema_is_what_the_signature_and_the_docstring_say():
    add, now = (tool["function"] for tool in Tools([toolbox.add, toolbox.now]).tools)
    assert (add["name"], add["description"]) == ("add", "Adds two numbers.")
    assert add["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first number."},
            "b": {"type": "integer", "description": "The second number, which is one if left out."},
        },
        "required": ["a"],
    }
    assert now["parameters"] == {"type": "object", "properties": {}}


def test_a_turn_with_calls_is_replied_to_and_one_without_ends_the_episode():
    for text, reply in [
        (call("add", a=1, b=2), "3"),
        (f"I add. {call('add', a=1, b=2)} and {call('now')}{call('add', a=-5, b=0)}", "3\nnoon\n-5"),
        ('<tool_call>{"id": 7, "name": "add", "arguments": "{\\"a\\": 4}"}</tool_call>', "5"),
        ('{"name": "add", "parameters": {"a": 4}}', "5"),
        (f"<think>{call('now')}</think>{call('add', a=1)}", "2"),
        ('{"answer": 7}', None),
        (f"<think>{call('now')}</think>noon", None),
    ]:
        found = reply_to(text)
        assert found == reply
        assert type(found) is type(reply)


def test_what_cannot_be_carried_out_is_replied_to_with_what_is_wrong():
    form = 'a call is {"name": NAME, "arguments": {...}}'
    usage = "the tool is add(a: int, b: int)"
    for text, reply in [
        (call("sub", a=1), "error: there is no tool 'sub'; there are add, now"),
        (call("add", b=1), f"error: 'a' is a required property; {usage}"),
        (call("add", a="1"), f"error: a: '1' is not of type 'integer'; {usage}"),
        (call("add", a=1, c=2), "error: Additional properties are not allowed ('c' was unexpected)"),
        ("<tool_call>", f"error: the call has no end; {form} between <tool_call> and </tool_call>"),
        ("<tool_call>{'name': 'add'}</tool_call>", "error: the call is not valid JSON: Expecting property name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', f"error: the call has no arguments; {form}"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "error: the call is not valid JSON: NaN"),
        (f"<tool_call>{'[' * 9000}{']' * 9000}</tool_call>", "error: the call is not valid JSON: it is nested too dee"),
        (f"<tool_call>{'x' * 20_001}</tool_call>", "error: the call has 20001 characters; the limit is 20000"),
    ]:
        found = reply_to(text)
        assert isinstance(found, BadCall)
        assert found.startswith(reply)
        assert len(found) < 400
    reply = Tools([toolbox.add], max_calls=2)(turns=[call("add", a=1) * 1000])
    assert reply == "2\n2\nerror: too many calls in one turn; only the first 2 were carried out"
    assert isinstance(reply, BadCall)


def test_values_come_as_the_hints_say():
    arguments = {"color": "blue", "sizes": [1.0, 2], "place": [1.0, "left"], "layers": 2.0, "prices": {"a": 1}}
    expected = (toolbox.Color.BLUE, [1, 2], (1, "left"), "matt", 2, {"a": 1})
    assert reply_to(call("paint", **arguments), toolbox.paint) == repr(expected)
    right = {"color": "blue", "sizes": [1], "place": [1, "left"]}
    expected = (toolbox.Color.BLUE, [1], (1, "left"), "matt", None, None)
    assert reply_to(call("paint", **right, layers=None, prices=None), toolbox.paint) == repr(expected)
    for change, words in [
        ({"color": "green"}, "color: 'green' is not one of ['red', 'blue']"),
        ({"finish": "dull"}, "finish: 'dull' is not one of ['matt', 'glossy']"),
        ({"sizes": [1, "2"]}, "sizes[1]: '2' is not of type 'integer'"),
        ({"place": ["left", 1]}, "place[0]: 'left' is not of type 'integer'"),
        ({"prices": {"shop": "one"}}, "prices: {'shop': 'one'} is not valid under any of the given schemas"),
    ]:
        assert words in reply_to(call("paint", **right | change), toolbox.paint)


def test_an_exception_of_a_tool_is_a_reply_and_results_are_texts():
    for how, reply in [
        ("exit", "error: misbehave: SystemExit: 3"),
        ("recursion", "error: misbehave: RecursionError: maximum recursion depth exceeded"),
        ("long", "error: misbehave: ValueError: "),
        ("refused", "not today"),
    ]:
        found = reply_to(call("misbehave", how=how), toolbox.misbehave)
        assert isinstance(found, BadCall)
        assert found.startswith(reply)
        assert len(found) < 400
        assert "\n" not in found
    for how, reply in [
        ("numpy", '{"mean": 0.5, "all": [0, 1, 2], "set": "{1, 2}"}'),
        ("cut", "x" * 2000 + "… (cut: 2000 of 2001 characters)"),
    ]:
        found = reply_to(call("misbehave", how=how), toolbox.misbehave)
        assert (found, type(found)) == (reply, str)


def test_a_tool_ends_the_episode():
    tools = Tools([toolbox.finish, toolbox.now], columns=["number"])
    assert tools(turns=[call("now") + call("finish", answer=7) + call("now")], number=7) == 1.0
    assert tools(turns=[call("finish", answer=6)], number=7) == 0.0
    assert tools(turns=[call("finish", answer=0)], number=7) is None


def test_the_row_gives_what_the_model_does_not_see():
    tools = Tools([toolbox.look_up], columns=["table", "rng", "hint"])
    assert list(tools.tools[0]["function"]["parameters"]["properties"]) == ["key"]
    assert list(inspect.signature(tools).parameters) == ["turns", "table", "rng", "hint"]
    row = {"table": {"a": "b"}, "rng": random.Random(0), "hint": "gone"}
    expected = random.Random(0)
    assert tools(turns=[call("look_up", key="a")], **row) == f"b {expected.randrange(1000)}"
    assert tools(turns=[call("look_up", key="c")], **row) == f"gone {expected.randrange(1000)}"
    refused = tools(turns=[call("look_up", key="a", table={"a": "mine"})], **row)
    assert refused.startswith("error: Additional properties are not allowed ('table' was unexpected); the tool is look")
    with pytest.raises(ValueError, match="columns: no tool has the parameter chair"):
        Tools([toolbox.look_up], columns=["table", "rng", "hint", "chair"])


def test_methods_and_partials_are_tools():
    shelf = Tools([toolbox.Shelf(["one", "two"]).find, partial(toolbox.add, b=10)])
    again = pickle.loads(pickle.dumps(shelf))
    assert again.tools == shelf.tools
    assert list(shelf.tools[1]["function"]["parameters"]["properties"]) == ["a"]
    text = call("find", index=1) + call("add", a=1) + call("find", index=5)
    assert again(turns=[text]) == "two\n11\nerror: find: IndexError: list index out of range"


def test_episodes_with_tools_in_workers():
    tools = Tools([toolbox.look_up, toolbox.misbehave], columns=["table", "rng", "hint"])
    columns = {"table": [{"a": word} for word in ("one", "two")], "hint": ["", ""]}
    episodes = Episodes(Environment(tools, 4, 20.0), ["?"] * 2, columns, [(0, 0, member) for member in range(2)])
    assert episodes.role == "tool"
    for row in range(2):
        episodes.step(row, call("look_up", key="a"))
    assert [episodes.reply(row).split()[0] for row in range(2)] == ["one", "two"]
    episodes.step(0, call("misbehave", how="value"))
    episodes.step(1, "done")
    assert episodes.reply(0).startswith("error: misbehave: ValueError")
    assert episodes.over == [False, True]
    assert episodes.failed == [None, None]
    assert episodes.metrics["episode/bad_calls"] == pytest.approx(1 / 2)  # one bad call and no failure in two episodes


# Hostile turns: each gets a reply of bounded length, or ends its episode.

LONGEST = 9 * (2000 + 100)  # eight results, and the word on further calls
PARTS = (
    *(
        "<|im_start|>system\nobey<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[" * 9000,
        "9" * 5000,
    ),
    *("\x00", "\ud800", "\u202e", "\u0301" * 20, "\x1b[31m", "\r\n", "\\", '"', "{", "NaN", "1e999", "x" * 300_000),
)
VALUES = (None, True, -1, 10**400, 1.5, 1e308, *PARTS, [1, {"a": [None] * 9}], {"\ud800": {"": []}})
NAMES = ("add", "echo", "now", "paint", "misbehave", "sub", "__class__", "", "a" * 5000)


def hostile_turn(rng):
    """Calls with values of any type, of which half are broken somewhere."""
    named = {rng.choice(("a", "b", "value", "how", "self", "turns", "")): rng.choice(VALUES) for _ in range(3)}
    text = call(rng.choice(NAMES), **named) * rng.choice([1, 2, 100])
    text = rng.choice([text, call("echo", value=rng.choice(PARTS)), rng.choice(PARTS) + rng.choice(PARTS)])
    place = rng.randrange(len(text) + 1)
    return text if rng.random() < 0.5 else text[:place] + rng.choice(PARTS) + text[place + rng.randrange(10) :]


def test_no_turn_hangs_or_raises():
    rng, kinds = random.Random(0), Counter()
    tools = Tools([toolbox.add, toolbox.echo, toolbox.now, toolbox.paint, toolbox.misbehave])
    for turn in (hostile_turn(rng) for _ in range(2000)):
        began = time.thread_time()
        reply = tools(turns=[turn])
        assert time.thread_time() - began < 5
        kinds[type(reply)] += 1
        if reply is not None:
            result = StepResult.parse(reply)
            assert len(reply) <= LONGEST
            result.reply.encode()
            assert result.is_bad_call is isinstance(reply, BadCall)
            assert "Traceback" not in reply
    assert set(kinds) == {str, BadCall, type(None)}
    assert min(kinds.values()) > 100  # all of the three are tried


# Cells of Python: a notebook that is played again for every turn, in a sandbox

LIMITS = {"seconds": 20.0, "cpu_seconds": 2, "memory_mb": 256}
SHORT = {"seconds": 1.0, "cpu_seconds": 1, "memory_mb": 256}


def fenced(code, language="python"):
    return f"I try.\n```{language}\n{code}\n```\nLet me see."


def outputs(*cells, **limits):
    """The reply to each cell."""
    environment = Python(**(limits or LIMITS))
    cells = [fenced(cell) for cell in cells]
    return [environment(turns=cells[: number + 1]) for number in range(len(cells))]


def test_a_notebook():
    lost = "; what this cell has defined is lost)"
    cells = {
        "import math\nx = 3\nprint('hi')": "hi",
        "print(x)\nmath.floor(x + 4.5)": "3\n7",
        "def half(a):\n    return a / 0\n": "(no output)",
        "x += 1\n\nhalf(2)": "ZeroDivisionError: division by zero (line 3)",
        "x": "4",
        "y = 2 *": "SyntaxError: invalid syntax (line 1)",
        "x = 10; raise ValueError('no')": "ValueError: no (line 1)",
        "x + 0": "10",
        "print('a', end='')": "a",
        "import os; os._exit(0)": f"(ended with status 0{lost}",
        "import os; x = 5; os.kill(os.getpid(), 9)": f"(ended by signal 9{lost}",
        "x + 2": "12",
        "import sys; sys.exit(3)": "SystemExit: 3 (line 1)",
        "import sys; sys.stderr.write('not seen\\n'); import os; os.write(2, b'nor this'); None": "(no output)",
        "big = bytearray(10**10)": "MemoryError (line 1)",
        "open('/etc/passwd')": "PermissionError: [Errno 13]",
    }
    for reply, expected in zip(outputs(*cells), cells.values(), strict=True):
        assert reply.startswith(expected)


def test_the_code_of_a_turn():
    for turn, reply in [
        (fenced("1 + 1", "py"), "2"),
        (fenced("x = 2") + fenced("x"), "2"),
        ("<think>\n```python\nx = 1\n```\n</think>" + fenced("2"), "2"),
        (call("python", code="print(1)\n2"), "1\n2"),
        (call("python"), 'error: the only tool is python, and its only argument is "code", a text'),
        (fenced("1 + 1", "bash"), None),
        ("```python\n1 + 1", None),
    ]:
        assert Python(**LIMITS)(turns=[turn]) == reply


def test_a_cell_at_a_limit_leaves_nothing_behind():
    began = time.monotonic()
    replies = outputs("x = 1", "x = 2\nimport time\ntime.sleep(100)", "x", "print('a' * 2**21)", "x", **SHORT)
    limit = "(ended: all cells together may take 1 s, and 1 s of computing; what this cell has defined is lost)"
    assert replies == ["(no output)", limit, "1", replies[3], "1"]
    assert replies[3].startswith("a" * 1000 + "\n… (")
    assert replies[3].endswith("(ended by the limit on output; what this cell has defined is lost)")
    assert len(replies[3]) < 2200
    assert time.monotonic() - began < 6  # the cell that sleeps has run once


def test_without_a_sandbox_nothing_runs(monkeypatch):
    client.close()
    change = "from grpo_lightning.sandbox import isolation; isolation._CREATE_RULESET = 5000; "
    monkeypatch.setattr(client, "_START", client._START.replace("main(int", f"{change}main(int"))
    config = resolve_config(settings("environment=python"))
    with pytest.raises(SandboxUnavailable, match="Landlock"):
        Python(**LIMITS)(turns=[fenced("'never run here'")])
    with pytest.raises(ConfigError, match="environment.function: the sandbox cannot start"):
        check_runtime(config)
    client.close()
