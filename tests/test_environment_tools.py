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
from grpo_lightning.sandbox.client import Unavailable
from tests.support import toolbox
from tests.support.composed import settings
from tests.support.hostile_turns import turns
from tests.test_chat import made, special_ids


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
        (call("add", b=1, c=2), f"error: 'c' is no argument; 'a' is missing; {usage}"),
        (call("add", a="1"), f"error: 'a' is \"1\", and should be int; {usage}"),
        ("<tool_call>", f"error: the call has no end; {form} between <tool_call> and </tool_call>"),
        ("<tool_call>{'name': 'add'}</tool_call>", "error: the call is not valid JSON: Expecting property name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', f"error: the call has no arguments; {form}"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "error: 'a' is NaN, and should be int"),
        (f"<tool_call>{'[' * 9000}{']' * 9000}</tool_call>", "error: the call is not valid JSON: it is nested too dee"),
        (f"<tool_call>{'x' * 20_001}</tool_call>", "error: the call has 20001 characters; the limit is 20000"),
    ]:
        found = reply_to(text)
        assert isinstance(found, BadCall)
        assert found.startswith(reply)
        assert len(found) < 400
    tools = Tools([toolbox.add], max_calls=2)
    assert tools(turns=[call("add", a=1) * 2]) == "2\n2"
    reply = tools(turns=[call("add", a=1) * 1000])
    assert reply == "2\n2\nerror: too many calls in one turn; only the first 2 were carried out"
    assert isinstance(reply, BadCall)


def test_values_come_as_the_hints_say():
    arguments = {"color": "blue", "sizes": [1.0, 2], "place": [1.0, "left"], "layers": 2.0, "prices": {"a": 1}}
    expected = (toolbox.Color.BLUE, [1, 2], (1, "left"), "matt", 2, {"a": 1.0}, 3)
    assert reply_to(call("paint", **arguments, note=3), toolbox.paint) == repr(expected)
    fewer = {"color": "red", "sizes": [], "place": [1, "left"], "layers": None, "prices": None, "note": "x"}
    expected = (toolbox.Color.RED, [], (1, "left"), "matt", None, None, "x")
    assert reply_to(call("paint", **fewer), toolbox.paint) == repr(expected)
    right = {"color": "blue", "sizes": [1], "place": [1, "left"]}
    for change, words in [
        ({"color": "green"}, '\'color\' is "green", and should be one of "red", "blue"'),
        ({"finish": "dull"}, "'finish' is \"dull\", and should be Literal['matt', 'glossy']"),
        ({"sizes": [1, "2"]}, "'sizes[1]' is \"2\", and should be int"),
        ({"place": [1]}, "'place' is [1], and should be tuple[int, str]"),
        ({"prices": {"shop": "one"}}, '\'prices\' is {"shop": "one"}, and should be dict[str, float] | None'),
    ]:
        assert words in reply_to(call("paint", **right | change), toolbox.paint)


def test_an_exception_of_a_tool_is_a_reply_and_results_are_texts():
    for how, reply in [
        ("exit", "error: misbehave: SystemExit: 3"),
        ("recursion", "error: misbehave: RecursionError: maximum recursion depth exceeded"),
        ("long", "error: misbehave: ValueError: no no no"),
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
    needed = {name: one.default is one.empty for name, one in inspect.signature(tools).parameters.items()}
    assert needed == {"turns": True, "table": True, "rng": True, "hint": False}
    row = {"table": {"a": "b"}, "rng": random.Random(0)}
    expected = random.Random(0)
    assert tools(turns=[call("look_up", key="a")], **row) == f"b {expected.randrange(1000)}"
    assert tools(turns=[call("look_up", key="c")], **row) == f"no hint {expected.randrange(1000)}"
    assert tools(turns=[call("look_up", key="c")], **row, hint="gone") == f"gone {expected.randrange(1000)}"
    refused = tools(turns=[call("look_up", key="a", table={"a": "mine"})], **row)
    assert refused == "error: 'table' is no argument; the tool is look_up(key: str)"


def test_methods_and_partials_are_tools():
    shelf = Tools([toolbox.Shelf(["one", "two"]).find, partial(toolbox.add, b=10)])
    again = pickle.loads(pickle.dumps(shelf))
    assert again.tools == shelf.tools
    assert list(shelf.tools[1]["function"]["parameters"]["properties"]) == ["a"]
    text = call("find", index=1) + call("add", a=1) + call("find", index=5) + call("add", a=1, b=1)
    assert again(turns=[text]) == (
        "two\n11\nerror: find: IndexError: list index out of range\nerror: 'b' is no argument; the tool is add(a: int)"
    )


def test_episodes_with_tools_in_this_process_and_in_workers():
    words = ["one", "two", "three"]
    here = []
    for timeout in (None, 20.0):
        tools = Tools([toolbox.look_up, toolbox.misbehave], columns=["table", "rng", "hint"])
        environment = Environment(tools, 4, timeout)
        assert environment.reply_role == "tool"
        assert environment.tools == tools.tools
        columns = {"table": [{"a": word} for word in words], "answer": words}
        episodes = Episodes(environment, ["?"] * 3, columns, [(0, 0, member) for member in range(3)])
        for row in range(3):
            episodes.step(row, call("look_up", key="a"))
        replies = [episodes.reply(row) for row in range(3)]
        assert [reply.split()[0] for reply in replies] == words
        assert replies == (here := here or replies)
        episodes.step(0, "<tool_call>")
        episodes.step(1, "done")
        episodes.step(2, call("misbehave", how="value"))
        assert episodes.reply(0).startswith("error: the call has no end")
        assert episodes.reply(1) is None
        assert episodes.reply(2).startswith("error: misbehave: ValueError")
        assert episodes.over == [False, True, False]
        assert episodes.failed == [None, None, None]
        # two bad calls and no failure in three episodes
        assert episodes.metrics["episode/bad_calls"] == pytest.approx(2 / 3)
        assert episodes.metrics["episode/failed"] == 0


# 10,000 hostile turns: each gets a reply of bounded length or ends its episode, and no reply speaks for others.

LONGEST = 9 * (2000 + 100)  # eight results, and the word on further calls


@pytest.fixture(scope="module")
def hostile():
    return turns(10_000, seed=0)


@pytest.fixture(scope="module")
def replies(hostile):
    """What tools reply to each, and the time that the slowest took."""
    tools = Tools([toolbox.add, toolbox.echo, toolbox.now, toolbox.paint, toolbox.misbehave])

    def seconds(turn):
        began = time.thread_time()
        found.append(tools(turns=[turn]))
        return time.thread_time() - began

    found = []
    slow = [turn for turn in hostile if seconds(turn) > 0.1]
    # A turn that takes long does so again; a collection of this process's garbage does not.
    return found, max((min(seconds(turn) for _ in range(3)) for turn in slow), default=0.0)


def test_none_escapes_hangs_or_raises(replies):
    found, slowest = replies
    kinds = Counter(type(reply) for reply in found)
    assert set(kinds) == {str, BadCall, type(None)}
    assert min(kinds.values()) > 500  # all of the three are tried
    for reply in found:
        if reply is not None:
            result = StepResult.of(reply)
            assert len(reply) <= LONGEST
            result.reply.encode()
            assert result.is_bad_call is isinstance(reply, BadCall)
            assert "Traceback" not in reply
            assert "site-packages" not in reply
    assert slowest < 0.5


@pytest.mark.parametrize("role", ["tool", "user"])
def test_no_reply_speaks_for_others(replies, role):
    template = made("qwen2_5")
    special = special_ids(template._tokenizer)

    def specials(text):
        return [one for one in template.reply(text, role=role, after=None) if one in special]

    frame = specials("3")
    assert len(frame) == 4  # the end of the model's turn, a begin and an end, and the begin of its next turn
    for reply in {StepResult.of(reply).reply for reply in replies[0] if reply is not None}:
        assert specials(reply) == frame


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
    assert outputs(
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


def test_the_code_of_a_turn():
    for turn, reply in [
        (fenced("1 + 1", "py"), "2"),
        (fenced("x = 2") + fenced("x"), "2"),
        ("<think>\n```python\nx = 1\n```\n</think>" + fenced("2"), "2"),
        (call("python", code="print(1)\n2"), "1\n2"),
        ('{"name": "python", "parameters": {"code": "3"}}', "3"),
        (call("python"), 'error: the only tool is python, and its only argument is "code", a text'),
        (fenced("1 + 1", "bash"), None),
        ("```python\n1 + 1", None),
        ("2", None),
    ]:
        assert Python(**LIMITS)(turns=[turn]) == reply


def test_what_a_cell_does_to_its_own_process():
    lost = "; what this cell has defined is lost)"
    cells = {
        "x = 1": "(no output)",
        "print(x)": "1",
        "import os; os._exit(0)": f"(ended with status 0{lost}",
        "x + 1": "2",
        "import os; x = 5; os.kill(os.getpid(), 9)": f"(ended by signal 9{lost}",
        "x + 2": "3",
        "import sys; sys.exit(3)": "SystemExit: 3 (line 1)",
        "input()": "EOFError: EOF when reading a line (line 1)",
        "import sys; sys.stderr.write('not seen\\n'); import os; os.write(2, b'nor this'); None": "(no output)",
        "big = bytearray(10**10)": "MemoryError (line 1)",
        "open('/etc/passwd')": "PermissionError: [Errno 13]",
        "open('own', 'w').write('kept')": "4",
        "open('own').read()": "'kept'",
    }
    for reply, expected in zip(outputs(*cells), cells.values(), strict=True):
        assert reply.startswith(expected)


def test_a_cell_at_a_limit_leaves_nothing_behind():
    began = time.monotonic()
    cells = ("x = 1", "x = 2\nimport time\ntime.sleep(100)", "x", "time", "print('a' * 2**21)", "x")
    replies = outputs(*cells, **SHORT)
    limit = "(ended: all cells together may take 1 s, and 1 s of computing; what this cell has defined is lost)"
    assert replies == ["(no output)", limit, "1", replies[3], replies[4], "1"]
    assert replies[3].startswith("NameError: name 'time' is not defined")
    assert replies[4].endswith("(ended by the limit on output; what this cell has defined is lost)")
    assert replies[4].startswith("a" * 1000 + "\n… (")
    assert len(replies[4]) < 2200
    assert time.monotonic() - began < 6  # the cell that sleeps has run once


def test_without_a_sandbox_nothing_runs(monkeypatch):
    client.close()
    change = "from grpo_lightning.sandbox import isolation; isolation._CREATE_RULESET = 5000; "
    monkeypatch.setattr(client, "_START", client._START.replace("main(int", f"{change}main(int"))
    config = resolve_config(settings("environment=python"))
    with pytest.raises(Unavailable, match="Landlock"):
        Python(**LIMITS)(turns=[fenced("'never run here'")])
    with pytest.raises(ConfigError, match="environment.function: the sandbox cannot start"):
        check_runtime(config)
    client.close()
