"""Environments: how they are called, what they may return, and what becomes of those that fail."""

from functools import partial

import pytest

import grpo_lightning as grpo
from grpo_lightning.environment import Environment, EpisodeError, Episodes, check_columns
from tests.support import environments
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import build
from tests.support.environments import episodes_of, replies_to
from tests.support.workers import limited

WHERE = pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in_workers"])


@pytest.fixture(autouse=True, scope="module")
def one_worker():
    with limited(1):
        yield


@WHERE
def test_an_episode_is_played_turn_by_turn(timeout):
    episodes = episodes_of(environments.guess, {"number": [5, 20, 7, 3]}, timeout=timeout)
    assert episodes.is_slow is (timeout is not None)
    assert replies_to(episodes, 0, "3", " 9 ", "5") == ["higher", "lower", None]
    assert replies_to(episodes, 1, "21", "blue") == ["lower", None]
    assert replies_to(episodes, 2, "1", "2", "3", "9") == ["higher", "higher", "higher", None]  # the fourth is cut
    assert episodes.scores == [((1, 0.25), (2, 1.0)), ((0, 0.25),), ((3, 0.25),), ()]
    assert episodes.over == [True, True, False, False]
    assert episodes.failed == [None] * 4
    assert episodes.metrics == {"episode/failed": 0.0, "episode/bad_calls": 0.0, "episode/cut_replies": 0.0}
    assert episodes.seconds > 0


def test_a_call_gets_what_it_names_as_copies():
    environments.seen.clear()
    columns = {"number": [5], "parts": [["a"]], "mood": ["column"]}
    episodes = episodes_of(partial(environments.noting, mood="bound"), columns)
    assert replies_to(episodes, 0, "one", "two") == ["go on", "go on"]
    assert columns["parts"] == [["a"]]
    assert environments.seen == [
        (["one"], 5, "bound", {"parts": "['a']", "replies": "[]", "prompt": "'p'"}),
        (["one", "two"], 5, "bound", {"parts": "['a']", "replies": "['go on']", "prompt": "'p'"}),
    ]


@WHERE
def test_rng_is_the_same_in_every_process_and_every_call(timeout):
    episodes = episodes_of(environments.drawn, size=2, timeout=timeout)
    first, again = replies_to(episodes, 0, "a", "b")
    assert first == again == "165858125"  # random.Random(int of SHA-256 of "0,0,0").randrange(10**9)
    assert replies_to(episodes, 1, "a") == ["8546908"]  # of (0, 0, 1)


@WHERE
def test_what_an_environment_may_return(timeout):
    right = {
        "int": (None, 2.0),
        "numpy": (None, 0.5),
        "numpy_text": ("text", None),
        "bad_scored": ("no such tool", -0.5),
        "surrogate": ("a? b ?", None),
        "control": ("\x00\x1b[2J\u202e\r\n", None),
        "giant": ("x" * 71 + "… (3000000 characters in all)", None),
    }
    episodes = episodes_of(environments.returning, {"what": list(right)}, timeout=timeout, max_reply=100)
    for row, (reply, score) in enumerate(right.values()):
        assert replies_to(episodes, row, "x") == [reply]
        assert episodes.scores[row] == (() if score is None else ((0, score),))
    assert episodes.failed == [None] * len(right)
    assert episodes.metrics["episode/bad_calls"] == episodes.metrics["episode/cut_replies"] == 1 / len(right)

    wrong = ["true", "nan", "list", "unscored"]
    episodes = episodes_of(environments.returning, {"what": wrong}, timeout=timeout, max_failed=0.0)
    for row in range(len(wrong)):
        assert replies_to(episodes, row, "x") == [None]
        assert episodes.failed[row].startswith(("exception: ValueError: the environment returned ", "exception: Over"))
    assert (set(episodes.scores), set(episodes.over)) == ({()}, {False})
    with pytest.raises(EpisodeError, match=r"environments\.returning failed in 4 of 4 episodes"):
        episodes.check()


@WHERE
def test_an_exception_is_a_failure_of_its_row(timeout):
    episodes = episodes_of(environments.ends_itself, {"how": ["well", "raise", "lie"]}, timeout=timeout, max_failed=0.3)
    for row in range(3):
        episodes.step(row, "the last words")
    assert [episodes.reply(row) for row in range(3)] == [None] * 3
    assert episodes.scores == [((0, 1.0),), (), ()]
    assert episodes.over == [True, False, False]
    assert episodes.failed[0] is None
    assert episodes.failed[1].startswith(r"exception: KeyError: '\x1b[31mred'")
    assert episodes.failed[2].startswith("exception: KeyError: 'no representation'")
    assert episodes.metrics["episode/failed"] == pytest.approx(2 / 3)
    message = (
        r"in 2 of 3 episodes \(allowed fraction: environment.max_failed=0.3\); first on row 1, .*red.* turn 1: 'the"
    )
    with pytest.raises(EpisodeError, match=message):
        episodes.check()


@pytest.mark.slow
def test_workers_that_hang_or_die_are_failures():
    hows = ["hang_in_c", "well", "kill", "well"]
    episodes = episodes_of(environments.ends_itself, {"how": hows}, timeout=2.0, max_failed=0.49)
    for row in range(4):
        episodes.step(row, "x")
    assert [episodes.reply(row) for row in range(4)] == [None] * 4
    assert episodes.scores == [(), ((0, 1.0),)] * 2
    late, died = "timeout: took longer than 2 s", "crash: its worker died with exit code -9"
    assert episodes.failed == [late, None, died, None]
    with pytest.raises(EpisodeError, match="in 2 of 4 episodes .* first on row 0, timeout: took longer than 2 s"):
        episodes.check()


def test_columns_and_settings_are_checked_first():
    for columns, message in [
        ([], r"environments.guess: parameter 'number' is no column of the data, which are \[\]"),
        (["number", "turns"], "column 'turns' has the name of an argument"),
    ]:
        with pytest.raises(EpisodeError, match=message):
            check_columns(Environment(environments.guess, 4), columns)
    for settings, message in [
        ({"function": environments.later}, "expected no coroutine function .*later"),
        ({"max_turns": 0}, "max_turns=0: must be an integer >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            Environment(**{"function": environments.guess, "max_turns": 4, **settings})


def test_what_an_object_says_of_itself_is_read():
    environment = Environment(environments.Tool(2), 4)
    assert environment.tools == environments.Tool.tools
    assert environment.reply_role == Episodes(environment, [], {}, []).role == "tool"
    assert Environment(environments.Tool(2), 4, role="user").reply_role == "user"
    assert Environment(environments.guess, 4).tools is None
    assert environment.name == "tests.support.environments.Tool"
    assert replies_to(episodes_of(environments.Tool(2), size=1), 0, "a", "b") == ["more", None]


# Generators


@WHERE
def test_a_generator_is_played_again_for_every_turn(timeout):
    episodes = episodes_of(environments.countdown, {"start": [10, 10, 10, 99]}, timeout=timeout)
    assert replies_to(episodes, 0, "3", "2", "5") == ["7 left", "5 left", None]
    assert replies_to(episodes, 1, "2", "9") == ["8 left", None]
    assert replies_to(episodes, 2, "1", "stop") == ["9 left", None]
    assert replies_to(episodes, 3, "1", "1", "1", "1") == ["98 left", "97 left", "96 left", None]
    assert episodes.scores == [
        ((0, 0.125), (1, 0.125), (2, 1.0)),
        ((1, -1.0),),
        ((0, 0.125),),
        ((1, 0.125), (3, 0.125)),
    ]
    assert episodes.over == [True, True, True, False]
    assert episodes.failed == [None] * 4


def test_a_generator_that_is_no_environment_fails():
    for function, turns, failure in [
        (environments.forgetful, 2, "not a function of its turns: None after 'x', and before it was 'go on'"),
        (environments.hasty, 1, "the first `yield` must have no value"),
        (environments.replying_at_the_end, 1, "expected a reply by `yield` and the end by `return`, got 'reply'"),
    ]:
        episodes = episodes_of(function, {"start": [1]})
        assert replies_to(episodes, 0, *["x"] * turns)[-1] is None
        assert episodes.failed[0].startswith(f"exception: ValueError: {failure}")


# As settings, and what the policy is told

SIZES = ("steps=2", "data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer=cpu")
ROWS = [{"prompt": f"Guess {number}", "number": number} for number in range(6)]


def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


def test_training_and_validation_have_the_same_environment():
    words = ["environment=custom", "environment.function._target_=tests.support.environments.guess"]
    words += ["environment.max_turns=3", "environment.timeout=2", "environment.role=tool"]
    rollout, validation = build(*words)("rollout"), build(*words)("validation")
    for one in (rollout.scorer.environment, validation.scorer.environment):
        assert (one.max_turns, one.timeout, one.max_failed, one.failed_score) == (3, 2, 0.5, None)
        assert (one.max_reply, one.reply_role, one.name) == (10_000, "tool", "tests.support.environments.guess")


TOOL = (
    "environment=custom",
    "environment.function._target_=tests.support.environments.Tool",
    "environment.function._partial_=false",
    "+environment.function.most=2",
)


def with_tools(path, *words):
    return grpo.compose(*SIZES, "policy=hf", f"policy.path={path}", *TOOL, *words, reward=letters, data=ROWS)


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.slow
def test_the_chat_template_is_given_the_tools_or_the_run_refused(tmp_path):
    path = write_checkpoint(tmp_path / "policy", "qwen2", chat=True)
    with pytest.raises(ValueError, match="the chat template .*does not show the tools add"):
        _ = with_tools(path).module
    with pytest.raises(ValueError, match=r"tools \(add\) need a policy with a chat template"):
        _ = with_tools(path, "policy.plain_text=true").module
    (path / "chat_template.jinja").write_text(TEMPLATE)
    policy = with_tools(path).module.policy
    assert policy.chat.render("How much?").startswith("add: Sums up ${a} and ${b}.\n<|im_start|>user\nHow much?<")
    assert policy.chat.reply_role == "tool"
    assert "<|im_start|>tool\nmore" in policy.tokenizer.decode(policy.reply_ids("more", after=None))
    assert with_tools(path, "environment.role=user").module.policy.chat.reply_role == "user"
