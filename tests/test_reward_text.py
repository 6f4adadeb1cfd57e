import functools
import time
from fractions import Fraction

import pytest

from grpo_lightning.reward.accuracy import exact, last_number, numeric
from grpo_lightning.reward.format import format as format_reward
from grpo_lightning.reward.format import tag_count
from grpo_lightning.reward.length import length
from grpo_lightning.reward.text import answer_text, tag


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<a>1</a>", "1"),
        ("<a> 1 </a> and <a>\n2\t</a>", "2"),
        ("<a>1</a> <a>2", "1"),
        ("<a>1<a>2</a>", "2"),
        ("<a><a>1</a>2</a>", "1"),
        ("</a>1<a>", None),
        ("1</a>", None),
    ],
)
def test_tag_is_the_last_complete_one(text, content):
    assert tag(text, "a") == content


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>3</think><answer> 4 </answer>", "4"),
        ("<think>3</think> 4 ", "4"),
        ("1<think>2</think>3<think>4</think>5", "135"),
        ("1 <think> 2, or", "1"),  # cut off while thinking
        ("<think>1<think>2</think>3</think>4", "4"),
        ("<answer>4", "<answer>4"),
        ("", ""),
    ],
)
def test_answer_text(completion, answer):
    assert answer_text(completion) == answer


HOSTILE = [
    "<answer>" * 125_000,
    "<answer>" * 62_500 + "</answer>" * 62_500,
    "</answer>" * 111_111,
    "<think>" * 142_857,
    "<think></think>" * 66_666,
    "<answer>" + " " * 20_000,
    "<answer>" + " " * 1_000_000 + "x</answer",
    "<" * 1_000_000,
    "9" * 1_000_000,
    "1," * 500_000,
    "1/" * 500_000,
    "1,111" * 200_000,
    "\\frac{" * 166_666,
    "-" * 1_000_000,
    "1e" * 500_000 + "9" * 20,
    "0" * 200 + "." * 1_000_000,
    "\ud800\x00",
]


def test_hostile_text_takes_linear_time_and_earns_nothing():
    answers, start = ["7"] * len(HOSTILE), time.process_time()
    assert exact(HOSTILE, answers) == numeric(HOSTILE, answers, tolerance=0) == [0.0] * len(HOSTILE)
    assert format_reward(HOSTILE) == [0.0] * len(HOSTILE)
    assert len(tag_count(HOSTILE)) == len(length(HOSTILE, target=5)) == len(HOSTILE)
    assert time.process_time() - start < 1.0


# --- accuracy


def test_exact_compares_stripped_text():
    completions = ["<answer> cat </answer>", "cat", "<answer>Cat</answer>", "<answer>cat.</answer>"]
    assert exact(completions, [" cat\n"] * 4, level=[1] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert exact(["7", "7.5"], [7, 7.5]) == [1.0, 1.0]


@pytest.mark.parametrize("reward", [exact, functools.partial(numeric, tolerance=0.1)])
@pytest.mark.parametrize("answer", ["", "  ", None, True, ["1"]])
def test_a_broken_right_answer_raises(reward, answer):
    with pytest.raises(ValueError, match="answer: expected text or a number, got"):
        reward(["1"], [answer])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so it is 1,234.", 1234),
        ("3, 4, 5", 5),
        ("1,2345", 2345),
        ("\u22123", -3),
        ("-$1,000", -1000),
        (".5", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("50%", 50),
        ("1.5e3", 1500),
        ("1e50", 10**50),
        ("1/0", None),
        ("1e51", None),
        ("1e999999999", None),
        ("9" * 51, None),
        ("1/" + "9" * 51, None),
        ("none", None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


def test_numeric_tolerance_is_absolute():
    completions = ["1000001", "about 1000000.5", "999999.5", "999999", "no"]
    assert numeric(completions, ["1,000,000"] * 5, tolerance=0.5) == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert numeric(["1/3", "0.333333"], ["0.3333333", "1/3"], tolerance=1e-6) == [1.0, 1.0]
    assert numeric(["9007199254740993"], ["9007199254740992"], tolerance=1e-6) == [0.0]  # equal as floats


@pytest.mark.parametrize("answer", ["seven", "1/0", "1e99"])
def test_a_right_answer_without_a_number_raises(answer):
    with pytest.raises(ValueError, match=f"answer: expected a number, got '{answer}'"):
        numeric(["7"], [answer], tolerance=0.0)


# --- format and length


@pytest.mark.parametrize(
    ("completion", "formatted", "tags"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        (" \n<think>\na</think>\n\t<answer>b\n</answer>\n", 1.0, 1.0),
        ("<think></think><answer></answer>", 1.0, 1.0),
        ("Hm <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0),
        ("<think><answer></think></answer>", 0.0, 1.0),
        ("<think><think>a</think><answer>b</answer>", 0.0, 0.75),
        ("<answer>b</answer>", 0.0, 0.5),
    ],
)
def test_format_and_tag_count(completion, formatted, tags):
    assert format_reward([completion, "x"], answer=["7", "7"]) == [formatted, 0.0]
    assert tag_count([completion], answer=["7"]) == [tags]


def test_length_falls_from_the_target_to_twice_it():
    completions = ["", "a" * 3, "a" * 4, "a" * 5, "a" * 7, "a" * 8, "a" * 9, "  é\n"]
    assert length(completions, target=4, answer=[]) == [1.0, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0, 1.0]
