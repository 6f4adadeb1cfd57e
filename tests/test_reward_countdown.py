import time

import pytest

from grpo_lightning.reward.countdown import countdown


def scored(text, numbers=(2, 3, 4), target=24, use_all=True):
    return countdown([f"<answer>{text}</answer>"], [list(numbers)], [target], use_all=use_all)[0]


@pytest.mark.parametrize(
    "text",
    [
        "2*3*4",
        " ( 4 * 3 ) * 2 ",
        "2 \u00d7 3 \u00d7 4",
        "2 \\times 3 \\cdot 4",
        "$\\left(2*3\\right)*4$",
        "[2*3]*4",
        "2*3*4 = 24",
        "2*3*4 = 48/2",
    ],
)
def test_reaches_the_target(text):
    assert scored(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "2*3*5",
        "2*12",
        "2*3*4*1",
        "2*3*4 = 25",
        "2*3*4 = 24 = 24",
        "24",
        "2*3**4",
        "2*3*4.0",
        "0x2*3*4",
    ],
)
def test_does_not(text):
    assert scored(text) == 0.0


def test_a_number_counts_as_often_as_it_is_given():
    assert scored("4*(3+3)", (3, 3, 4)) == 1.0  # 4 * 6
    assert scored("4*(3+3)", (3, 4)) == 0.0
    assert scored("4*(3+3)", (3, 3, 3, 4)) == 0.0
    assert scored("4*(3+3)", (3, 3, 3, 4), use_all=False) == 1.0
    assert scored("4*(3+3)", (3, 4, 4), use_all=False) == 0.0


def test_arithmetic_is_exact():
    assert scored("8/(3-8/3)", (3, 3, 8, 8)) == 1.0  # 8 / (1/3)
    assert scored("1/3+1/3+1/3", (1, 1, 1, 3, 3, 3), 1) == 1.0
    assert scored("99999999999/99999999998", (99999999999, 99999999998), 1) == 0.0
    assert scored("1/2", (1, 2), 0.5) == scored("1/2", (1, 2), "1/2") == 1.0
    assert scored("3-5", (3, 5), -2) == scored("-(5-3)", (3, 5), -2) == scored("+3-5", (3, 5), -2) == 1.0
    assert scored("6\u00f73", (6, 3), 2) == scored("6 \\div 3", (6, 3), 2) == scored("5\u22123", (5, 3), 2) == 1.0
    assert scored("3/6", (6, 3), 2) == 0.0
    assert scored("6/0", (6, 0), 2) == 0.0


def test_long_text_takes_no_time():
    texts = ["(" * 1_000_000, "-" * 500 + "1", "-" * 450, "(" * 250 + "1" + ")" * 249, "9" * 500, "1+" * 249 + "1"]
    texts += ["1=" * 500_000, "\\times" * 200_000]
    began = time.perf_counter()
    assert countdown(texts, [[1]] * len(texts), [1] * len(texts), use_all=True)[2:] == [0.0] * (len(texts) - 2)
    assert time.perf_counter() - began < 2
