"""Equal as mathematics, within bounds of work, and without running what a model wrote."""

import re
from functools import lru_cache

import pytest

from grpo_lightning.reward import mathematics
from grpo_lightning.reward.mathematics import math, read_formula


@pytest.fixture(autouse=True)
def fresh():
    yield
    for cached in (mathematics._parse_latex, mathematics._is_worked_out, mathematics._are_equal):
        getattr(cached, "cache_clear", int)()


def scored(given, right):
    return math([f"<think>0</think><answer>{given}</answer>"], [right])[0]


def test_equal_and_unequal_as_mathematics():
    for given, right in (
        ("1/2", "0.5"),
        ("\\frac12", 0.5),
        ("0.333333", "1/3"),
        ("1,234", "1234"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("10^{-3}", "0.001"),
        ("\u03c0/2", "\\frac{\\pi}{2}"),
        ("\u22123", "-3"),
        ("e^{-x^2}", "\\exp(-x^2)"),
        ("\\{2, 1\\}", "1, 2"),
        ("The answer is 72.", "48 + 24 = 72 #### 72"),
        ("5 \\text{ cm}", "5"),
        ("\u221a(2)/2", "\\frac{\\sqrt2}{2}"),
        ("La r\u00e9ponse est 72", "72"),
        ("\\boxed{\\text{Evelyn}}", "$\\text{ Evelyn }$"),
        ("$3$ and $4$", "\\{3, 4\\}"),
        ("\\boxed{3} or \\boxed{4}", "4"),
        ("\\boxed{1 + \\boxed{3}}", "3"),
    ):
        assert scored(given, right) == 1.0, given
    for given, right in (
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
        ("$3$ and $4$", "4"),
        ("\\boxed{3} or \\boxed{4}", "3"),
        ("$3$ \\boxed{3} \\boxed{4", "3"),
        ("\\sum_{i=1}^{10} i", "55"),  # work that was left
    ):
        assert scored(given, right) == 0.0, given
    for completion in (
        "\\boxed{\\frac{1}{2}}",
        "<think>\\boxed{3}</think>So it is $\\boxed{ \\frac{1}{2} }$.",
        "word " * 1_000 + "\\boxed{0.5}",  # the box counts, however long the text before it
        "\\(\\frac{1}{2}\\)",
        "The sum is $\\frac{1}{2}$",
    ):
        assert math([completion, "1"], ["1/2", "1/2"]) == [1.0, 0.0], completion


HUGE = [
    *("9**9**9", "9^{9^{9}}", "9^{{{{9999}}}}", "201!", "(9!)!", "1" * 51, "1+" * 150 + "1"),
    *("\\prod_{i=1}^{10} i", "\\lim_{x \\to 0} x", "\\int x dx"),
]


def test_what_is_too_large_is_not_parsed(monkeypatch):
    given = []
    original = mathematics.parse
    monkeypatch.setattr(mathematics, "parse", lambda text, *rest, **named: given.append(text) or original("$1$"))
    for huge in HUGE:
        assert scored(huge, "7") == 0.0, huge
        assert scored(huge, huge) == 1.0  # a right answer to the letter needs no parsing
        assert scored("7", huge) == 0.0
    assert set(given) <= {"$7$"}
    monkeypatch.undo()
    for text in ("x^{1000}", "2^{500}", "1" * 50, "e^{2x}+e^{3x}+e^{4x}", "x^{10}+x^9+x^8", "1+" * 149 + "11"):
        mathematics._parse_latex.cache_clear()
        assert mathematics._parse_latex(read_formula(text)), text


CALL = "ex''ec(by''te''s([111,112,101,110,40,34,72,73,84,34,44,34,119,34,41]))"  # exec(b'open("HIT","w")')
NAMED = [
    *(f"\\{accent}{{{CALL}}}" for accent in ("dot", "hat", "overline")),
    f"\\dot{{({CALL},1)}}",
    f"x_{{{CALL}}}",
    f"\\dot{{ex''ec}}({CALL[7:-1]})",
]
SUM = "\\{SIGN_{n=0}^{\\infty}\\frac{NAME^n}{n!}\\}"
PARTED = '$3$, $\\sin(0\\cdot \\s"um_{n=0}^{\\infty}\\frac{NAME^n}{n!})$, $\\fbox{0}$'
"""The whole text is normalized to its \\fbox; math-verify reads each formula by itself."""
PAIR = "\\left(3,\\frac{\\pi}{2}\\right)"
NESTED = '$3$, $\\{\\{\\s"um_{n=0}^{\\infty}\\frac{NAME^n}{n!}, 1\\}, 2\\}$, $\\fbox{0}$'
HIDDEN_SUMS = [(SUM.replace("SIGN", "\\s''um"), "\\{x+2\\}"), (PARTED, PAIR), (NESTED, PAIR)]


@pytest.mark.parametrize("check", ["_is_worked_out", "_is_bounded", None])
def test_either_check_by_itself_keeps_names_from_being_run(check, tmp_path, monkeypatch):
    """Checked are the text and what was parsed: a sum that is left, and a name that is a call, are not compared."""
    monkeypatch.chdir(tmp_path)
    for off in {"_is_worked_out", "_is_bounded"} - {check}:
        monkeypatch.setattr(mathematics, off, lru_cache(lambda text: True))
    for sum_, right in HIDDEN_SUMS:
        for name in NAMED:
            math([sum_.replace("NAME", name)], [right])
            math([right], [sum_.replace("NAME", name)])
    assert (tmp_path / "HIT").exists() is (check is None)  # unchecked, they are run


def test_a_right_answer_that_cannot_be_parsed_or_is_broken(caplog, monkeypatch):
    monkeypatch.setattr(mathematics, "_is_warned", False)
    monkeypatch.setattr("signal.alarm", lambda seconds: pytest.fail("an alarm, which worker processes need"))
    assert math(["Paris", "Rome", "5"], ["Paris", "Paris", "5"]) == [None, None, 1.0]
    assert math(["Paris", "Rome"], ["Paris", "Rome"]) == [None, None]
    assert len(caplog.records) == 1
    assert "the right answer 'Paris' cannot be parsed" in caplog.text
    for right in ("", "  ", "text ####", True, ["1", "2"], {}):
        with pytest.raises(ValueError, match="answer: expected text or a number, got " + re.escape(repr(right))):
            math(["1"], [right])
