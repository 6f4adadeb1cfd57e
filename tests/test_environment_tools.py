"""Tools: what a model calls is carried out once, and whatever else it says becomes a reply."""

import inspect
import json
import pickle
import random
import sys
from functools import partial

import pytest

from grpo_lightning.environment import BadCall, Environment, Episodes
from grpo_lightning.environment.tools import Over, Tools
from tests.support import toolbox
from tests.support.checkpoints import write_checkpoint


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def told(text, *tools, **row):
    return Tools(list(tools or (toolbox.add, toolbox.now)))(turns=["earlier", text], **row)


def faults(how):
    return told(call("misbehave", how=how), toolbox.misbehave)


def test_the_schema_is_what_the_signature_and_the_docstring_say():
    assert Tools([toolbox.add, toolbox.now]).tools == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "The first number."},
                        "b": {
                            "type": "integer",
                            "description": "The second number, which is one if left out.",
                        },
                    },
                    "required": ["a"],
                },
                "return": {"type": "integer"},
            },
        },
        {
            "type": "function",
            "function": {
                "name": "now",
                "description": "Says what time it is.",
                "parameters": {"type": "object", "properties": {}},
                "return": {"type": "string"},
            },
        },
    ]


@pytest.mark.parametrize(
    "text, reply",
    [
        (call("add", a=1, b=2), "3"),
        (f"I add. {call('add', a=1, b=2)} and {call('now')}{call('add', a=-5, b=0)}", "3\nnoon\n-5"),
        ('<tool_call>{"id": 7, "name": "add", "arguments": "{\\"a\\": 4}"}</tool_call>', "5"),
        ('{"name": "add", "parameters": {"a": 4}}', "5"),
        (f"<think>{call('now')}</think>{call('add', a=1)}", "2"),
        ("7", None),
        (f"<think>{call('now')}</think>noon", None),
    ],
)
def test_a_turn_with_calls_is_replied_to_and_one_without_ends_the_episode(text, reply):
    found = told(text)
    assert found == reply
    assert type(found) is type(reply)


FORM = '{"name": NAME, "arguments": {...}}'
USAGE = "the tool is add(a: integer, b: integer)"


@pytest.mark.parametrize(
    "text, reply",
    [
        (call("sub", a=1), "error: there is no tool 'sub'; allowed: add, now"),
        (call("add", b=1), f"error: 'a' is missing; {USAGE}"),
        (call("add", a="1"), f"error: 'a' is \"1\", and should be integer; {USAGE}"),
        ("<tool_call>", "error: the call has no end; a call is " + FORM + " between <tool_call> and </tool_call>"),
        ("<tool_call>[]</tool_call>", f"error: the call has no name; a call is {FORM}"),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "error: the arguments of a call are a JSON ",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "error: the call holds NaN; allowed",
        ),
        ('<tool_call>{"name": "add", "name": "now"}</tool_call>', "error: the call names a key twice in one object"),
        (call("add", a="\ud800"), "error: the call holds half of a surrogate pair, which is no character"),
        (
            f"<tool_call>{'[' * 5000}{']' * 5000}</tool_call>",
            "error: the call is nested too deeply; allowed are 32 levels",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_replied_to_with_what_is_wrong(text, reply):
    found = told(text)
    assert isinstance(found, BadCall)
    assert found.startswith(reply)
    assert len(found) < 400


def test_further_calls_are_not_carried_out():
    tools = Tools([toolbox.add], max_calls=2)
    assert tools(turns=[call("add", a=1) * 2]) == "2\n2"
    reply = tools(turns=[call("add", a=1) * 1000])
    assert reply == "2\n2\nerror: too many calls in one turn; allowed are 2, others were not carried out"
    assert isinstance(reply, BadCall)


def test_values_come_as_the_hints_say():
    arguments = {
        "color": "blue",
        "sizes": [1.0, 2],
        "place": [1.0, "left"],
        "layers": 2.0,
        "prices": {"a": 1},
        "note": 3,
    }
    expected = (toolbox.Color.BLUE, [1, 2], (1, "left"), "matt", 2, {"a": 1}, 3)
    assert told(call("paint", **arguments), toolbox.paint) == repr(expected)
    fewer = {"color": "red", "sizes": [], "place": [1, "left"], "layers": None, "prices": None, "note": "x"}
    expected = (toolbox.Color.RED, [], (1, "left"), "matt", None, None, "x")
    assert told(call("paint", **fewer), toolbox.paint) == repr(expected)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"color": "green"}, '\'color\' is "green", and should be one of "red", "blue"'),
        ({"sizes": [1, "2"]}, "'sizes[1]' is \"2\", and should be integer"),
        ({"place": ["left", 1]}, "'place[0]' is \"left\", and should be integer"),
        ({"layers": "two"}, "'layers' is \"two\", and should be integer or null"),
        ({"prices": {"shop": "one"}}, "'prices[shop]' is \"one\", and should be number"),
        ({"sizes": ["a" * 1000]}, "'sizes[0]' is \"" + "a" * 49 + "…, and should be integer"),
    ],
)
def test_values_of_another_type_are_named_with_their_place(change, words):
    right = {"color": "blue", "sizes": [1], "place": [1, "left"]}
    assert words in told(call("paint", **right | change), toolbox.paint)


@pytest.mark.parametrize(
    "how, reply",
    [
        ("exit", "error: misbehave: SystemExit: 3"),
        ("path", "error: misbehave: RuntimeError: cannot read '(path)': 3/4 of http://a.b/c/d"),
        ("unwritable", "error: misbehave: Unwritable"),
        ("recursion", "error: misbehave: RecursionError: maximum recursion depth exceeded"),
        ("long", "error: misbehave: ValueError: no no no"),
        ("object", "error: misbehave: TypeError: it returned a value of type object, which JSON cannot hold"),
        ("cycle", "error: misbehave: ValueError: Circular reference detected"),
        ("refused", "not today"),
    ],
)
def test_an_exception_of_a_tool_is_a_reply(how, reply):
    found = faults(how)
    assert isinstance(found, BadCall)
    assert found.startswith(reply)
    assert len(found) < 400
    assert "\n" not in found


@pytest.mark.parametrize(
    "how, reply",
    [
        ("surrogate", "a?b"),
        ("numpy", '{"mean": 0.5, "all": [0, 1, 2], "set": [1, 2]}'),
        ("nan", "NaN"),
        ("cut", "x" * 2000 + "… (cut: 2000 of 2001 characters)"),
    ],
)
def test_results_are_texts_of_bounded_length(how, reply):
    assert faults(how) == reply
    assert type(faults(how)) is str


def test_a_tool_ends_the_episode():
    tools = Tools([toolbox.finish, toolbox.now], columns=["number"])
    assert tools(turns=[call("now") + call("finish", answer=7) + call("now")], number=7) == 1.0
    assert tools(turns=[call("finish", answer=6)], number=7) == 0.0
    assert tools(turns=[call("finish", answer=0)], number=7) is None
    assert Over(0.5).score == 0.5


def test_the_row_gives_what_the_model_does_not_see():
    tools = Tools([toolbox.look_up], columns=["table", "rng", "hint"])
    assert list(tools.tools[0]["function"]["parameters"]["properties"]) == ["key"]
    parameters = inspect.signature(tools).parameters
    assert {name: one.default is one.empty for name, one in parameters.items()} == {
        "turns": True,
        "table": True,
        "rng": True,
        "hint": False,
    }
    row = {"table": {"a": "b"}, "rng": random.Random(0)}
    expected = random.Random(0)
    assert tools(turns=[call("look_up", key="a")], **row) == f"b {expected.randrange(1000)}"
    assert tools(turns=[call("look_up", key="c")], **row) == f"no hint {expected.randrange(1000)}"
    assert tools(turns=[call("look_up", key="c")], **row, hint="gone") == f"gone {expected.randrange(1000)}"
    refused = tools(turns=[call("look_up", key="a", table={"a": "mine"})], **row)
    assert refused == "error: 'table' is no argument; the tool is look_up(key: string)"
    assert Tools([toolbox.count_turns], columns=["turns"])(turns=["a", call("count_turns")]) == "2 turns"


def test_methods_and_partials_are_tools():
    shelf = Tools([toolbox.Shelf(["one", "two"]).find, partial(toolbox.add, b=10)])
    again = pickle.loads(pickle.dumps(shelf))
    assert again.tools == shelf.tools
    assert list(shelf.tools[1]["function"]["parameters"]["properties"]) == ["a"]
    text = call("find", index=1) + call("add", a=1) + call("find", index=5) + call("add", a=1, b=1)
    assert again(turns=[text]) == (
        "two\n11\nerror: find: IndexError: list index out of range\n"
        "error: 'b' is no argument; the tool is add(a: integer)"
    )


@pytest.mark.parametrize(
    "tools, settings, words",
    [
        ([], {}, "tools: expected a list of functions, such as [my_tools.search], got []"),
        (
            ["my_tools.add"],
            {},
            "tools: expected functions, such as the dotted path my_tools.search, got 'my_t",
        ),
        ([toolbox.add, toolbox.add], {}, "tools: expected functions of different names, got add more than once"),
        ([toolbox.undescribed], {}, "tools: undescribed: DocstringParsingException: .* for the argument 'b'"),
        ([toolbox.unhinted], {}, "tools: unhinted: TypeHintParsingException: Argument a is missing a type hint"),
        ([toolbox.later], {}, "tools: expected plain functions .*, got later"),
    ],
)
def test_what_cannot_be_a_tool_is_named(tools, settings, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[") if "expected" in words else words):
        Tools(tools, **settings)


def test_episodes_with_tools_in_this_process_and_in_workers():
    words = ["one", "two", "three"]
    for timeout in (None, 20.0):
        environment = Environment(
            Tools([toolbox.look_up, toolbox.misbehave], columns=["table", "rng", "hint"]), 4, timeout
        )
        assert environment.reply_role == "tool"
        assert environment.tools == environment.function.tools
        columns = {"table": [{"a": word} for word in words], "answer": words}
        episodes = Episodes(environment, ["?"] * 3, columns, [(0, 0, member) for member in range(3)])
        for row in range(3):
            episodes.step(row, call("look_up", key="a"))
        replies = [episodes.reply(row) for row in range(3)]
        assert [reply.split()[0] for reply in replies] == words
        if timeout is None:
            here = replies
        else:
            assert replies == here
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


MINE = """
import subprocess
from os import system


def add(a: int, b: int) -> int:
    '''Adds two numbers.

    Args:
        a: One.
        b: The other.
    '''
    return a + b


def silent(a: int) -> int:
    return a
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A small model whose chat template shows tools in few words: it reads 512 tokens."""
    path = write_checkpoint(tmp_path_factory.mktemp("shown") / "policy", "qwen2", chat=True)
    template = path / "chat_template.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}" + template.read_text()
    )
    return path


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a module of the user's, in the directory of the start."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tools_of_mine.py").write_text(MINE)
    yield "tools_of_mine"
    sys.modules.pop("tools_of_mine", None)
