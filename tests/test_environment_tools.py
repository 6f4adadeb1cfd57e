"""Tools: what a model calls is carried out once, and whatever else it says becomes a reply."""

import inspect
import json
import pickle
import random
import sys
from functools import partial

import pytest

import grpo_lightning as grpo
from grpo_lightning import start
from grpo_lightning.composition.overrides import plain
from grpo_lightning.environment import BadCall, Environment
from grpo_lightning.environment.tools import Over, Tools
from grpo_lightning.environment.tools.calls import Call, Malformed, calls
from grpo_lightning.settings import ConfigError, check, trust
from grpo_lightning.settings.built import check_built
from grpo_lightning.settings.functions import with_targets
from tests.support import toolbox
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import settings
from tests.test_replies import made

TRUST = ["trusted=[tests,benchmarks]"]


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


def test_what_a_chat_template_is_given_says_not_what_a_tool_takes():
    environment, wrong = Tools([toolbox.add]), call("add", a=[1], b=2)
    before = environment(turns=[wrong])
    assert isinstance(before, BadCall)
    environment.tools[0]["function"]["parameters"].clear()
    assert environment(turns=[wrong]) == before


def test_a_chat_template_shows_the_schema_and_the_reply():
    tools = Tools([toolbox.add])
    replies = made("qwen2_5", tools=tools.tools)
    ids = replies.ids("3", role=tools.role, after=replies._tokenizer.eos_token_id)
    shown = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert replies._tokenizer.decode(ids) == shown
    asked = replies._rendered()
    assert json.dumps(tools.tools[0]) in asked
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in asked


@pytest.mark.parametrize(
    "text, reply",
    [
        (call("add", a=1, b=2), "3"),
        (call("add", a=1), "2"),
        (f"I add. {call('add', a=1, b=2)} and {call('now')}{call('add', a=-5, b=0)}", "3\nnoon\n-5"),
        (call("add", a=2.0, b=1), "3"),
        ('<tool_call>{"name": "now"}</tool_call>', "noon"),
        ('<tool_call>{"id": 7, "name": "add", "arguments": "{\\"a\\": 4}"}</tool_call>', "5"),
        ('{"name": "add", "parameters": {"a": 4}}', "5"),
        ('\n {"name": "add", "arguments": {"a": 4}} \n', "5"),
        (f"<think>{call('now')}</think>{call('add', a=1)}", "2"),
        ("7", None),
        ("", None),
        ("<answer>3</answer>", None),
        (f"<think>{call('now')}</think>noon", None),
        (f"<think>{call('now')}", None),
        ("</tool_call>", None),
        ('{"name": "Ann", "age": 3}', None),
        ('{"answer": 3}', None),
        ('{"name": "add"', None),
        ("[1, 2]", None),
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
        (call("add", a=1, c=1), f"error: 'c' is no argument; {USAGE}"),
        (call("add", a="1"), f"error: 'a' is \"1\", and should be integer; {USAGE}"),
        (call("add", a=True), f"error: 'a' is true, and should be integer; {USAGE}"),
        (call("add", a=None), f"error: 'a' is null, and should be integer; {USAGE}"),
        (call("add", a=1.5), f"error: 'a' is 1.5, and should be integer; {USAGE}"),
        ("<tool_call>", "error: the call has no end; a call is " + FORM + " between <tool_call> and </tool_call>"),
        (
            '<tool_call>{"name": "add",}</tool_call>',
            "error: the call is not valid JSON: Illegal trailing comma before end of object at character 15; a call is "
            if sys.version_info >= (3, 13)
            else "error: the call is not valid JSON: Expecting property name enclosed in double quotes at character",
        ),
        ("<tool_call></tool_call>", "error: the call is not valid JSON: Expecting value at character 1; a call is "),
        ("<tool_call>[]</tool_call>", f"error: the call has no name; a call is {FORM}"),
        ("<tool_call>7</tool_call>", f"error: the call has no name; a call is {FORM}"),
        ('<tool_call>{"name": 3}</tool_call>', f"error: the call has no name; a call is {FORM}"),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "error: the arguments of a call are a JSON ",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "error: the call holds NaN; allowed",
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>', "error: the call holds -Infinity"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
            "error: the call holds a number th",
        ),
        (call("add", a=10**40), "error: the call holds a number of 41 digits; allowed are 40"),
        ('<tool_call>{"name": "add", "name": "now"}</tool_call>', "error: the call names a key twice in one object"),
        (call("add", a="\ud800"), "error: the call holds half of a surrogate pair, which is no character"),
        ('<tool_call>{"name": "now", "arguments": {"\\ud800": 1}}</tool_call>', "error: the call holds half of a surr"),
        (
            f"<tool_call>{'[' * 5000}{']' * 5000}</tool_call>",
            "error: the call is nested too deeply; allowed are 32 levels",
        ),
        (f"<tool_call>{'[' * 40}{']' * 40}</tool_call>", "error: the call is nested too deeply; allowed are 32 levels"),
        (f"<tool_call>{' ' * 20_001}</tool_call>", "error: the call has 20001 characters; allowed are 20000"),
        ('{"name": "add", "parameters": {"a": 1,}}', "error: the call is not valid JSON"),
    ],
)
def test_what_cannot_be_carried_out_is_replied_to_with_what_is_wrong(text, reply):
    found = told(text)
    assert isinstance(found, BadCall)
    assert found.startswith(reply)
    assert len(found) < 400


def test_a_bad_call_beside_good_ones():
    found = told(call("add", a=1) + call("sub") + call("now"))
    assert found == "2\nerror: there is no tool 'sub'; allowed: add, now\nnoon"
    assert isinstance(found, BadCall)


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
        ({"sizes": 3}, "'sizes' is 3, and should be array"),
        ({"place": ["left", 1]}, "'place[0]' is \"left\", and should be integer"),
        ({"finish": "wet"}, '\'finish\' is "wet", and should be one of "matt", "glossy"'),
        ({"layers": "two"}, "'layers' is \"two\", and should be integer or null"),
        ({"prices": {"shop": "one"}}, "'prices[shop]' is \"one\", and should be number"),
        ({"note": [1]}, "'note' is [1], and should be integer or string"),
        ({"sizes": ["a" * 1000]}, "'sizes[0]' is \"" + "a" * 49 + "…, and should be integer"),
    ],
)
def test_values_of_another_type_are_named_with_their_place(change, words):
    right = {"color": "blue", "sizes": [1], "place": [1, "left"]}
    assert words in told(call("paint", **right | change), toolbox.paint)


@pytest.mark.parametrize(
    "how, reply",
    [
        ("value", "error: misbehave: ValueError: invalid literal for int() with base 10: 'no'"),
        ("exit", "error: misbehave: SystemExit: 3"),
        ("file", "error: misbehave: FileNotFoundError: No such file or directory"),
        ("path", "error: misbehave: RuntimeError: cannot read '(path)': 3/4 of http://a.b/c/d"),
        ("unwritable", "error: misbehave: Unwritable"),
        ("recursion", "error: misbehave: RecursionError: maximum recursion depth exceeded"),
        ("memory", "error: misbehave: "),
        ("long", "error: misbehave: ValueError: no no no"),
        ("lines", "error: misbehave: ValueError: one two"),
        ("object", "error: misbehave: TypeError: it returned a value of type object, which JSON cannot hold"),
        ("cycle", "error: misbehave: ValueError: Circular reference detected"),
        ("huge", "error: misbehave: ValueError: Exceeds the limit (4300 digits)"),
        ("refused", "not today"),
    ],
)
def test_an_exception_of_a_tool_is_a_reply(how, reply):
    found = faults(how)
    assert isinstance(found, BadCall)
    assert found.startswith(reply)
    assert len(found) < 400
    assert "\n" not in found


def test_who_interrupts_a_tool_is_heard():
    with pytest.raises(KeyboardInterrupt):
        faults("interrupt")


@pytest.mark.parametrize(
    "how, reply",
    [
        ("surrogate", "a?b"),
        ("numpy", '{"mean": 0.5, "all": [0, 1, 2], "set": [1, 2]}'),
        ("nan", "NaN"),
        ("none", "null"),
        ("umlaut", '["ä"]'),
        ("whole", "x" * 2000),
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


def test_only_the_last_turn_is_carried_out():
    assert told("7") is None  # after "earlier"
    assert Tools([toolbox.now])(turns=[call("now"), "that is all"]) is None
    assert Tools([toolbox.now])(turns=["<tool_call>", call("now")]) == "noon"


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
        (toolbox.add, {}, "tools: expected a list of functions"),
        (
            ["my_tools.add"],
            {},
            "tools: expected functions, such as the dotted path my_tools.search, got 'my_t",
        ),
        ([toolbox.Shelf], {}, "tools: expected functions"),
        ([partial(toolbox.add, 1)], {}, "tools: expected functions"),
        ([toolbox.add, toolbox.add], {}, "tools: expected functions of different names, got add more than once"),
        ([toolbox.undescribed], {}, "tools: undescribed: DocstringParsingException: .* for the argument 'b'"),
        ([toolbox.unhinted], {}, "tools: unhinted: TypeHintParsingException: Argument a is missing a type hint"),
        ([toolbox.silent], {}, "tools: silent: DocstringParsingException: .*no docstring"),
        ([toolbox.odd], {}, "tools: odd: NameError: name 'Missing' is not defined"),
        ([toolbox.look_up], {}, "tools: look_up: TypeHintParsingException: Argument rng is missing a type hint"),
        ([toolbox.variable], {}, r"tools: variable: expected named parameters only, got \*words"),
        ([toolbox.later], {}, "tools: expected plain functions .*, got later"),
        ([toolbox.add], {"columns": ["c"]}, "columns: expected names of parameters of add, got c"),
        ([toolbox.add], {"columns": "b"}, "columns: expected a list of names, got 'b'"),
        ([toolbox.add], {"max_calls": 0}, "max_calls=0: allowed is an integer >= 1"),
        ([toolbox.add], {"max_result": 5}, "max_result=5: allowed is an integer >= 100"),
    ],
)
def test_what_cannot_be_a_tool_is_named(tools, settings, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[") if "expected" in words else words):
        Tools(tools, **settings)


def test_limits_are_what_is_still_allowed():
    nested = lambda depth: f'{{"name": "echo", "arguments": {{"value": {"[" * depth}{"]" * depth}}}}}'  # noqa: E731
    assert told(f"<tool_call>{nested(30)}</tool_call>", toolbox.echo) == "[" * 30 + "]" * 30  # below two objects: 32
    assert told(f"<tool_call>{nested(31)}</tool_call>", toolbox.echo).endswith("allowed are 32 levels")
    padded = f'{{"name": "now"{" " * (20_000 - 15)}}}'
    assert len(padded) == 20_000
    assert told(f"<tool_call>{padded}</tool_call>") == "noon"
    assert told(call("add", a=10**39, b=0)) == str(10**39)


def test_calls_are_read_as_they_are_written():
    text = 'a<tool_call>x</tool_call>b<tool_call>{"name": "f", "arguments": {"x": "<tool_call>"}}</tool_call>'
    first, second = calls(text, most=5)
    assert isinstance(first, Malformed)
    assert second == Call("f", {"x": "<tool_call>"})
    assert len(calls(text, most=1)) == 2
    assert calls("", most=1) == []


def test_episodes_with_tools_in_this_process_and_in_workers():
    words = ["one", "two", "three"]
    for timeout in (None, 20.0):
        environment = Environment(
            Tools([toolbox.look_up, toolbox.misbehave], columns=["table", "rng", "hint"]), 4, timeout
        )
        assert environment.reply_role == "tool"
        assert environment.tools == environment.function.tools
        columns = {"table": [{"a": word} for word in words], "answer": words}
        episodes = environment.episodes(["?"] * 3, columns, [(0, 0, member) for member in range(3)])
        for row in range(3):
            episodes.said(row, call("look_up", key="a"))
        replies = [episodes.reply(row) for row in range(3)]
        assert [reply.split()[0] for reply in replies] == words
        if timeout is None:
            here = replies
        else:
            assert replies == here
        episodes.said(0, "<tool_call>")
        episodes.said(1, "done")
        episodes.said(2, call("misbehave", how="value"))
        assert episodes.reply(0).startswith("error: the call has no end")
        assert episodes.reply(1) is None
        assert episodes.reply(2).startswith("error: misbehave: ValueError")
        assert episodes.over == [False, True, False]
        assert episodes.failed == [None, None, None]
        # two bad calls and no failure in three episodes
        assert episodes.metrics["episode/bad_calls"] == pytest.approx(2 / 3)
        assert episodes.metrics["episode/failed"] == 0


@pytest.mark.slow
def test_tools_that_hang_or_die_are_failures_of_their_row():
    environment = Environment(Tools([toolbox.misbehave, toolbox.now]), 4, timeout=2.0)
    episodes = environment.episodes(["?"] * 3, {}, [(0, 0, member) for member in range(3)])
    for row, text in enumerate([call("misbehave", how="hang"), call("misbehave", how="die"), call("now")]):
        episodes.said(row, text)
    assert [episodes.reply(row) for row in range(3)] == [None, None, "noon"]
    assert [bool(one) for one in episodes.failed] == [True, True, False]


def test_dotted_paths_become_targets_wherever_they_stand():
    words = ["environment=tools", "environment.function.tools=[tests.support.toolbox.add, tests.support.toolbox.now]"]
    config = plain(settings(*words), [*words, *TRUST])
    listed = [
        {"_target_": "tests.support.toolbox.add", "_partial_": True},
        {"_target_": "tests.support.toolbox.now", "_partial_": True},
    ]
    assert config["environment"]["function"]["tools"] == listed
    assert config["rollout"]["environment"]["function"]["tools"] == listed
    assert trust.problems(config) == []
    tools = {"_target_": "grpo_lightning.environment.tools.Tools", "tools": ["my_tools.add", {"_target_": "my.b"}]}
    listed = [{"_target_": "my_tools.add", "_partial_": True}, {"_target_": "my.b"}]
    assert with_targets({"a": [tools, {"tools": ["b.c"]}]}) == {"a": [tools | {"tools": listed}, {"tools": ["b.c"]}]}
    assert tools["tools"][0] == "my_tools.add"  # what is given stays


@pytest.mark.parametrize(
    "path", ["os.system", "grpo_lightning.run.Run", "torch.os.system", "subprocess.run", "_io.open", "my tools.add"]
)
def test_what_settings_may_not_name_is_no_tool(path):
    words = ["environment=tools", f"environment.function.tools=[tests.support.toolbox.add,'{path}']"]
    (problem,) = trust.problems(plain(settings(*words), [*words, *TRUST]))
    assert problem.startswith(f"environment.function.tools.1._target_={path}: allowed are parts of this package")


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
    monkeypatch.setattr(start, "START", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tools_of_mine.py").write_text(MINE)
    yield "tools_of_mine"
    sys.modules.pop("tools_of_mine", None)


def run(shown, listed, *words):
    own = ["environment=tools", f"environment.function.tools={listed}", "policy=hf", f"policy.path={shown}"]
    own += ["data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8"]
    rows = [{"prompt": "1 + 2?", "answer": "3"}] * 4
    return grpo.compose(*own, "trainer=cpu", "steps=1", *words, reward=length, data=rows)


def length(completions):
    return [float(len(text)) for text in completions]


@pytest.mark.slow
def test_tools_of_a_file_of_the_user(shown, mine):
    module = run(shown, f"[{mine}.add]", "environment.timeout=null").module
    environment = module.rollout.environment
    assert environment.reply_role == "tool"
    assert environment.function(turns=[call("add", a=1, b=2)]) == "3"
    prompt = module.policy.render("1 + 2?")
    assert prompt.startswith(json.dumps(environment.tools[0]["function"]))
    bound = run(shown, f"[{{_target_: {mine}.add, _partial_: true, b: 40}}]").module.rollout.environment
    assert bound.timeout == 30.0
    assert bound.function(turns=[call("add", a=2)]) == "42"


@pytest.mark.parametrize(
    "listed, words",
    [
        ("[{}.system]", r"environment\.function\.tools\.0\._target_=tools_of_mine\.system: is defined in posix"),
        ("[{}.subprocess.run]", r"environment\.function\.tools\.0\._target_=.*leads to the module subprocess"),
        ("[{}.add,os.system]", r"environment\.function\.tools\.1\._target_=os\.system: allowed are parts of"),
        ("[{}.ad]", r"environment\.function\.tools\.0\._target_=tools_of_mine\.ad: not found"),
        ("[add]", r"environment\.function\.tools\.0\._target_=add: allowed is a dotted path"),
    ],
)
def test_tools_that_settings_name_are_checked_as_all_targets_are(listed, words, mine):
    named = ["environment=tools", f"environment.function.tools={listed.format(mine)}"]
    config = plain(settings(*named), [*named, *TRUST])
    config["trainer"]["precision"] = "32-true"

    def checked():
        check(config)
        check_built(config)

    with pytest.raises(ConfigError, match=words):
        checked()
