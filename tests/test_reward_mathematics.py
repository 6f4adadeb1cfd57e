import logging
import re
import time
from functools import lru_cache

import pytest

from grpo_lightning.reward import formula, mathematics
from grpo_lightning.reward.mathematics import math


def scored(given, right):
    return math([f"<think>0</think><answer>{given}</answer>"], [right])[0]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("1/2", "0.5"),
        ("\\frac12", 0.5),
        ("0.333333", "1/3"),
        ("1,234", "1234"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("10^{-3}", "0.001"),
        ("\\binom{5}{2}", "10"),
        ("\u03c0/2", "\\frac{\\pi}{2}"),
        ("\u22123", "-3"),
        ("e^{-x^2}", "\\exp(-x^2)"),
        ("\\{2, 1\\}", "1, 2"),
        ("The answer is 72.", "48 + 24 = 72 #### 72"),
        ("5 \\text{ cm}", "5"),
        ("\u221a(2)/2", "\\frac{\\sqrt2}{2}"),
        ("La r\u00e9ponse est 72", "72"),
        ("\\boxed{\\text{Evelyn}}", "$\\text{ Evelyn }$"),
    ],
)
def test_equal_as_mathematics(given, right):
    assert scored(given, right) == 1.0


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("2", "3"),
        ("0.33", "1/3"),
        ("3.14", "\\pi"),
        ("(1,2)", "(2,1)"),
        ("x", "y"),
        ("1 or 2", "2"),
        ("48", "48 + 24 = 72 #### 72"),
        ("\\frac{1}{", "1"),
        ("\\boxed{7", "7"),
        ("", "7"),
        ("\u00bd", "\\frac12"),  # not read, and not taken for something else
        ("Bob", "\\text{Evelyn}"),
        ("\u7b54\u6848\u662f 71", "72"),
    ],
)
def test_unequal(given, right):
    assert scored(given, right) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{\\frac{1}{2}}",
        "<think>\\boxed{3}</think>So it is $\\boxed{ \\frac{1}{2} }$.",
        "word " * 1_000 + "\\boxed{0.5}",  # the box counts, however long the text before it
        "$\\frac{1}{2}$",
        "\\(\\frac{1}{2}\\)",
        "The sum is $\\frac{1}{2}$",
    ],
)
def test_where_the_formula_stands(completion):
    assert math([completion, "1"], ["1/2", "1/2"]) == [1.0, 0.0]


def test_several_formulas_are_a_set():
    assert scored("$3$ and $4$", "\\{3, 4\\}") == 1.0
    assert scored("$3$ and $4$", "4") == 0.0
    assert scored("$1$ and " * 6 + "$1$", "1") == 0.0  # at most six


def test_the_last_box_counts_and_not_the_better_of_two():
    assert scored("\\boxed{3} or \\boxed{4}", "4") == scored("\\boxed{1 + \\boxed{3}}", "3") == 1.0
    assert scored("\\boxed{3} or \\boxed{4}", "3") == 0.0
    assert scored("$3$ \\boxed{3} \\boxed{4", "3") == 0.0


HUGE = [
    "9**9**9",
    "9^{9^{9}}",
    "((9^9)^9)^99",  # 9 * 9 * 99 = 8,019
    "2^{99 \\cdot 99}",
    "1e-999999999",
    "201!",
    "(9!)!",
    "1" * 51,
    "\\sin\\sin\\sin\\sin\\sin 1",
    "\\cot-\\cot-\\cot-\\cot-\\cot1",
    "\\sin(\\cos(\\tan(\\ln(\\sec(1)))))",
    "\\log_{2}\\log_{2}\\log_{2}\\log_{2}\\log_{2} 3",
    "(x+1)" * 31,
    "\\cot" + "a" * 17,
    "\\prod_{i=1}^{10} i",
    '9"9"' * 30,
    "\\lim_{x \\to 0} x",
    "(" * 9 + "1" + ")" * 9,
]


@pytest.mark.parametrize("huge", HUGE)
def test_what_could_take_long_is_not_parsed(huge, monkeypatch):
    given = []
    original = mathematics.parse
    monkeypatch.setattr(mathematics, "parse", lambda text, *rest, **named: given.append(text) or original("$1$"))
    mathematics._parsed.cache_clear()
    assert scored(huge, "7") == 0.0
    assert scored(huge, huge) == 1.0
    assert scored("7", huge) == 0.0  # nor is it as a right answer
    assert set(given) <= {"$7$"}
    mathematics._parsed.cache_clear()


SMALL = [
    "x^{1000}",
    "2^{500}",
    "1" * 50,
    "((((((((1))))))))",
    "\\sin\\sin\\sin\\sin 1",
    "e^{2x}+e^{3x}+e^{4x}+e^{5x}",  # each ends with its bracket
    "x_1+" * 7 + "x_1",
    "1+" * 149 + "11",  # 300 characters
]


@pytest.mark.parametrize("small", SMALL)
def test_what_is_small_enough_is_parsed(small):
    assert mathematics._parsed(formula.read_formula(small))


def test_a_right_answer_to_the_letter_needs_no_parsing():
    assert math(["\\boxed{9^{9^9}}", "$9^{9^9}$", "9^{9^{9}}"], ["9^{9^9}"] * 3) == [1.0, 1.0, 0.0]


def test_work_that_was_left_is_wrong():
    assert math(["\\sum_{i=1}^{10} i", "55"], ["55", "55"]) == [0.0, 1.0]


CALL = "ex''ec(by''te''s([111,112,101,110,40,34,72,73,84,34,44,34,119,34,41]))"  # exec(b'open("HIT","w")')
NAMED = [
    *(f"\\{accent}{{{CALL}}}" for accent in ("dot", "hat", "overline")),
    f"\\dot{{({CALL},1)}}",
    f"x_{{{CALL}}}",
    f"\\dot{{ex''ec}}({CALL[7:-1]})",
]
SUM = "\\{SIGN_{n=0}^{\\infty}\\frac{NAME^n}{n!}\\}"


def test_names_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sign in ("\\sum", "\\s''um", "\\s\\!um", "\\s\\displaystyleum", "\\pr''od"):
        for name in NAMED:
            evil = SUM.replace("SIGN", sign).replace("NAME", name)
            for given, right in ((evil, "\\{x+1\\}"), ("\\{2\\}", evil)):
                assert math([f"\\boxed{{{given}}}"], [right])[0] in (0.0, None)
            assert formula.read_formula(evil) is None
    assert not (tmp_path / "HIT").exists()


PARTED = '$3$, $\\sin(0\\cdot \\s"um_{n=0}^{\\infty}\\frac{NAME^n}{n!})$, $\\fbox{0}$'
"""The whole text is normalized to its \\fbox; math-verify reads each formula by itself."""
PAIR = "\\left(3,\\frac{\\pi}{2}\\right)"
NESTED = '$3$, $\\{\\{\\s"um_{n=0}^{\\infty}\\frac{NAME^n}{n!}, 1\\}, 2\\}$, $\\fbox{0}$'
HIDDEN_SUMS = [(SUM.replace("SIGN", "\\s''um"), "\\{x+2\\}"), (PARTED, PAIR), (NESTED, PAIR)]


@pytest.fixture
def fresh():
    mathematics._parsed.cache_clear()
    mathematics._is_worked_out.cache_clear()
    mathematics._are_equal.cache_clear()
    yield
    mathematics._parsed.cache_clear()
    mathematics._is_worked_out.cache_clear()
    mathematics._are_equal.cache_clear()


@pytest.mark.parametrize("only", ["text", "sums", "calls"])
def test_each_look_by_itself_keeps_names_from_being_run(only, tmp_path, monkeypatch, fresh):
    """The text is looked at, and what was parsed: a sum that is left, and a name that is a call, are not compared."""
    monkeypatch.chdir(tmp_path)
    if only == "text":
        monkeypatch.setattr(mathematics, "_is_worked_out", lru_cache(lambda text: True))
    else:
        monkeypatch.setattr(formula, "_is_bounded", lambda text: True)
    if only == "calls":
        monkeypatch.setattr(mathematics, "ExprWithLimits", mathematics.Limit)
    for sum_, right in HIDDEN_SUMS:
        for name in NAMED:
            evil = sum_.replace("NAME", name)
            math([evil], [right])
            math([right], [evil])
    assert not (tmp_path / "HIT").exists()


def test_that_names_would_be_run(tmp_path, monkeypatch, fresh):
    """What the tests before this one guard against."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formula, "_is_bounded", lambda text: True)
    monkeypatch.setattr(mathematics, "_is_worked_out", lru_cache(lambda text: True))
    for sum_, right in HIDDEN_SUMS:
        math([sum_.replace("NAME", NAMED[3])], [right])
    assert (tmp_path / "HIT").exists()


@pytest.mark.parametrize(
    ("text", "is_worked_out"),
    [
        ("f(x_{max}) + \\dot{y}", True),
        ("\\begin{pmatrix} a & b_1 \\\\ 3 & 4 \\end{pmatrix}", True),
        ("2 + \\sum_{n=0}^{3} n", False),
        ("\\{1, \\sum_{n=0}^{3} n\\}", False),
        ("\\begin{pmatrix} 1 & \\sum_{n=0}^{3} n \\end{pmatrix}", False),
        ("2 + \\int x dx", False),
        ("2 + \\lim_{x \\to 0} x", False),
    ],
)
def test_what_is_worked_out(text, is_worked_out):
    assert mathematics._parsed(f"${text}$")
    assert mathematics._is_worked_out(f"${text}$") is is_worked_out


def test_a_right_answer_that_cannot_be_parsed_leaves_the_reward_out(caplog):
    mathematics.unreadable.clear()
    with caplog.at_level(logging.WARNING):
        assert math(["Paris", "Rome", "5"], ["Paris", "Paris", "5"]) == [None, None, 1.0]
        assert math(["Paris", "Rome"], ["Paris", "Rome"]) == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "math: the right answer 'Paris' cannot be parsed, so the reward does not apply to it; further ones are only "
        "counted"
    ]
    assert dict(mathematics.unreadable) == {"Paris": 3, "Rome": 1}


@pytest.mark.parametrize("right", ["", "  ", "text ####", None, True, ["1"], {}])
def test_a_broken_right_answer_is_named(right):
    with pytest.raises(ValueError, match="answer: expected text or a number, got " + re.escape(repr(right))):
        math(["1"], [right])


def test_no_alarm_is_set(monkeypatch):
    monkeypatch.setattr("signal.alarm", lambda seconds: pytest.fail("an alarm"))
    monkeypatch.setattr("signal.signal", lambda *_: pytest.fail("a handler"))
    assert math(["77/2"], ["38.5"]) == [1.0]


def test_long_text_takes_no_time():
    began = time.perf_counter()
    texts = ["\\boxed{" * 100_000, "{" * 1_000_000, "$" * 1_000_000, "\\boxed{" + "{" * 1_000_000, "^" * 1_000_000]
    assert math(texts, ["1"] * 5) == [0.0] * 5
    assert time.perf_counter() - began < 2
