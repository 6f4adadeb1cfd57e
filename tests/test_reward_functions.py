"""Every reward function by hand: what scores, what does not, and what raises."""

import inspect
import json
import os
import re
import time
from fractions import Fraction

import pytest

from grpo_lightning.reward import accuracy
from grpo_lightning.reward.accuracy import (
    answer_text,
    demonstrated,
    exact,
    is_harmless,
    last_number,
    may_be_verified,
    numeric,
    of_environment,
    reasoning_gym,
    tag,
)
from grpo_lightning.reward.countdown import countdown
from grpo_lightning.reward.format import format as format_reward
from grpo_lightning.reward.format import json_schema, keyword, pattern, reasoning_steps, tag_count
from grpo_lightning.reward.length import cosine_length, length, repetition, soft_overlong, word_variety
from grpo_lightning.reward.spec import Failure


def test_the_last_complete_tag_counts():
    for text, content in (
        ("<a>1</a>", "1"),
        ("<a> 1 </a> and <a>\n2\t</a>", "2"),
        ("<a>1</a> <a>2", "1"),
        ("<a>1<a>2</a>", "2"),
        ("</a>1<a>", None),
    ):
        assert tag(text, "a") == content, text


def test_the_answer_is_what_stands_outside_of_thoughts():
    for completion, answer in (
        ("<think>3</think><answer> 4 </answer>", "4"),
        ("<think>3</think> 4 ", "4"),
        ("1<think>2</think>3<think>4</think>5", "135"),
        ("1 <think> 2, or", "1"),  # cut off while thinking
        ("<answer>4", "<answer>4"),
        ("", ""),
    ):
        assert answer_text(completion) == answer, completion


# --- the right answer


def test_exact_compares_stripped_text():
    completions = ["<answer> cat </answer>", "cat", "<answer>Cat</answer>", "<answer>cat.</answer>"]
    assert exact(completions, [" cat\n"] * 4, level=[1] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert exact(["7", "7.5"], [7, 7.5]) == [1.0, 1.0]
    for answer in ("", True, ["1", "2"]):
        with pytest.raises(ValueError, match="answer: expected text or a number, got"):
            exact(["1"], [answer])


def test_the_last_number_of_a_text():
    for text, value in (
        ("so it is 1,234.", 1234),
        ("3, 4, 5", 5),
        ("1,2345", 2345),
        ("\u22123", -3),
        ("-$1,000", -1000),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("50%", 50),
        ("1.5e3", 1500),
        ("1e50", 10**50),
        *((text, None) for text in ("1/0", "1e51", "1e999999999", "9" * 51, "1/" + "9" * 51, "none")),
    ):
        assert last_number(text) == value, text


def test_the_tolerance_of_numbers_is_absolute():
    completions = ["1000001", "about 1000000.5", "999999.5", "999999", "no"]
    assert numeric(completions, ["1,000,000"] * 5, tolerance=0.5) == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert numeric(["1/3", "0.333333"], ["0.3333333", "1/3"], tolerance=1e-6) == [1.0, 1.0]
    assert numeric(["9007199254740993"], ["9007199254740992"], tolerance=1e-6) == [0.0]  # equal as floats
    with pytest.raises(ValueError, match="expected one number, got 'seven'.*reward=.exact."):
        numeric(["7"], ["seven"], tolerance=0.0)


def test_the_answer_of_a_demonstration_and_the_scores_of_an_environment():
    shown = [
        "<think>1</think><answer>7</answer>",
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}],
    ]
    assert demonstrated(["<answer>7</answer>", "7"], shown) == [1.0, 0.0]
    assert demonstrated(["<answer>7</answer>", "7"], shown, ["9", "7"]) == [0.0, 1.0]
    assert demonstrated(["7", "7"], [None, "7"]) == [None, 1.0]
    assert of_environment([[(0, 0.25), (2, 1.0)], []]) == [1.25, 0.0]


def reached(text, numbers=(2, 3, 4), target=24, use_all=True):
    return countdown([f"<answer>{text}</answer>"], [list(numbers)], [target], use_all=use_all)[0]


def test_countdown():
    right = ["2*3*4", " ( 4 * 3 ) * 2 ", "2 \u00d7 3 \u00d7 4", "2 \\times 3 \\cdot 4", "$\\left(2*3\\right)*4$"]
    right += ["[2*3]*4", "2*3*4 = 24", "2*3*4 = 48/2"]
    wrong = ["2*3*5", "2*12", "2*3*4*1", "2*3*4 = 25", "2*3*4 = 24 = 24", "24", "2*3**4", "2*3*4.0", "0x2*3*4"]
    assert {text for text in right + wrong if reached(text)} == set(right)
    for text, numbers, target, score, at_most_once in (
        ("4*(3+3)", (3, 3, 4), 24, 1.0, 1.0),  # 4 * 6
        ("4*(3+3)", (3, 3, 3, 4), 24, 0.0, 1.0),
        ("8/(3-8/3)", (3, 3, 8, 8), 24, 1.0, 1.0),  # 8 / (1/3)
        ("99999999999/99999999998", (99999999999, 99999999998), 1, 0.0, 0.0),
        ("1/2", (1, 2), "1/2", 1.0, 1.0),
        ("-(5-3)", (3, 5), -2, 1.0, 1.0),
        ("6/0", (6, 0), 2, 0.0, 0.0),
    ):
        assert (reached(text, numbers, target), reached(text, numbers, target, use_all=False)) == (score, at_most_once)


# --- form


def test_format_and_tag_count():
    for completion, formatted, tags in (
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        (" \n<think>\na</think>\n\t<answer>b\n</answer>\n", 1.0, 1.0),
        ("Hm <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0),
        ("<think><answer></think></answer>", 0.0, 1.0),
        ("<think><think>a</think><answer>b</answer>", 0.0, 0.75),
    ):
        assert format_reward([completion, "x"], answer=["7", "7"]) == [formatted, 0.0]
        assert tag_count([completion], answer=["7"]) == [tags]


def test_reasoning_steps():
    for text, markers in (
        ("", 0),
        ("Step 1: a Step 22: b", 2),
        ("1. a\n2. b\n  10. c\n1.5 d", 3),
        ("- a\n* b\n• c\n-d\n--", 3),
        ("First, a. Second, b. Next, c. Finally, d.", 4),
        ("1. First, a", 2),  # Open R1 counts both too
    ):
        assert reasoning_steps([text], target=8) == [markers / 8], text
    assert reasoning_steps(["First, ", "First, Next, Second, "], target=2) == [0.5, 1.0]


def test_keyword_and_pattern(caplog):
    texts = ["Because it is, THEREFORE", "because", "thereforebecause", "the re", ""]
    assert keyword(texts, words=["because", "Therefore", "so it is", "it is"]) == [0.75, 0.25, 0.5, 0.0, 0.0]
    assert pattern(["a1", "1b", "b22", ""], expression=r"[ab]\d+$", seconds=1.0) == [1.0, 0.0, 1.0, 0.0]
    assert pattern(["x\nABC"], expression=r"(?im)^abc", seconds=1.0) == [1.0]
    began = time.perf_counter()
    texts = ["a" * 100 + "b", "a" * 100 + "b", "aa"]
    assert pattern(texts, expression=r"^(a|aa|aaa)+$", seconds=0.05) == [0.0, 0.0, 1.0]
    assert time.perf_counter() - began < 2
    assert len(caplog.records) == 1


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


def test_json_schema(tmp_path):
    for text, expected in (
        ('{"name": "a", "age": 3}', 1.0),
        ('<think>{}</think><answer>{"name": "a"}</answer>', 1.0),
        ('```json\n{"name": "a"}\n```', 1.0),
        ('{"name": "a", "age": -1}', 0.0),
        ('{"name": "a", "x": NaN}', 0.0),
        ('{"name": "a", "age": 1' + "0" * 5_000 + "}", 0.0),
        ('{"name": "' + "a" * 20_000 + '"}', 0.0),
        ("", 0.0),
    ):
        assert json_schema([text], schema=SCHEMA) == [expected], text[:50]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert json_schema(['{"name": "a"}', "{}"], schema=str(path)) == [1.0, 0.0]
    recursive = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema(["[[[]]]", "[[1]]", "[" * 900 + "]" * 900], schema=recursive) == [1.0, 0.0, 0.0]


# --- length and words


def test_length_falls_from_the_target_to_twice_it():
    completions = ["", "a" * 3, "a" * 4, "a" * 5, "a" * 7, "a" * 8, "a" * 9, "  é\n"]
    assert length(completions, target=4, answer=[]) == [1.0, 1.0, 1.0, 0.75, 0.25, 0.0, 0.0, 1.0]
    assert word_variety(["a b A", "", "a b c d"]) == [2 / 3, 0.0, 1.0]


def by_cosine(tokens, right=(1.0, 0.5), wrong=(-1.0, -0.5), answers=("1", "2")):
    settings = {"outcome": exact, "max_length": 12, "right": right, "wrong": wrong}
    ids = [[7] * n for n in tokens]
    return cosine_length(["1"] * len(answers), ids, **settings, prompts=["p"] * len(answers), answer=list(answers))


def test_cosine_length_rewards_short_right_and_long_wrong_completions():
    assert by_cosine([0, 0]) == pytest.approx([1.0, -1.0])
    assert by_cosine([12, 12]) == by_cosine([13, 24]) == pytest.approx([0.5, -0.5])
    # cos(pi / 3) = 0.5, (1 + 0.5) / 2 = 0.75:  0.5 + 0.5 * 0.75 and -0.5 - 0.5 * 0.75
    assert by_cosine([4, 4]) == pytest.approx([0.875, -0.875])
    # cos(2 pi / 3) = -0.5, (1 - 0.5) / 2 = 0.25:  3 + (2 - 3) * 0.25 and 7 + (-1 - 7) * 0.25
    assert by_cosine([8, 8], right=[2, 3], wrong=[-1, 7]) == pytest.approx([2.75, 5.0])
    scores = [1.0, 0.99, 2.0, None, ((1, 1.0), (2, 0.0)), ()]
    settings = {"max_length": 4, "right": [1.0, 0.5], "wrong": [-1.0, -0.5]}
    found = cosine_length(["ab"] * 6, [[]] * 6, outcome=lambda completions: scores, **settings)
    assert found == [1.0, -1.0, 1.0, None, -1.0, None]  # of steps the mean, 0.5


def test_soft_overlong_falls_over_the_buffer():
    ids = [[1] * n for n in (0, 80, 85, 90, 100, 120)]  # 100 - 20 = 80;  (80 - 85) / 20 = -0.25
    assert soft_overlong(ids, max_length=100, buffer=0.2) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert soft_overlong([[1] * 25], max_length=100, buffer=1.0) == [-0.25]
    assert soft_overlong([[1]], [90], max_length=100, buffer=0.2) == [-0.5]  # tokens of the episode


def test_repetition():
    for text, n, penalty in (
        ("a b c", 3, 0.0),
        ("", 1, 0.0),
        ("a a A a", 1, -1.5),  # 1 of 4 is distinct: (1 - 1/4) * -2
        ("a b a b a", 2, -1.0),  # ab ba ab ba: (1 - 2/4) * -2
        ("a\tb \n a  b", 2, -2 / 3),  # ab ba ab
    ):
        assert repetition([text], n=n, max_penalty=-2.0) == pytest.approx([penalty])


def test_settings_that_cannot_be_meant_are_refused():
    ids = [[1]]
    for function, columns, settings in (
        (length, {}, {"target": 0}),
        (repetition, {}, {"n": 0, "max_penalty": -1.0}),
        (repetition, {}, {"n": 3, "max_penalty": 1.0}),
        (soft_overlong, {"completion_ids": ids}, {"max_length": 100, "buffer": 20.0}),
        (keyword, {}, {"words": "because"}),
    ):
        with pytest.raises(ValueError, match=": expected "):
            function(**{"completions": ["a"], **columns, **settings})


# --- reasoning_gym's verifiers


def verified(task, text, answer, metadata=None, **columns):
    columns = {name: [value] for name, value in columns.items()}
    return reasoning_gym([f"<answer>{text}</answer>"], [answer], [task], [metadata or {}], **columns)[0]


def test_the_tasks_own_verifier_scores_the_answer():
    rows = [("<think>5</think><answer>-7</answer>", "-7", "chain_sum", {}), ("-7", "12", "chain_sum", {})]
    rows += [("<answer>2 * 3 + 4</answer>", "4 + 2*3", "countdown", {"numbers": [2, 3, 4], "target": 10})]
    rows += [("<answer>2 * 3 - 4</answer>", "4 + 2*3", "countdown", {"numbers": [2, 3, 4], "target": 10})]
    assert reasoning_gym(*zip(*rows, strict=True), prompts=[]) == [1.0, 0.0, 1.0, 0.05]
    solution, metadata = "(8 - 2) * (2 + 2)", {"numbers": [8, 2, 2, 2]}  # 24, of numbers from 1 to 10
    assert verified("puzzle24", solution, None, metadata, task_config=None) == 1.0
    assert verified("puzzle24", solution, None, metadata, task_config={"min_value": 3}) == 0.01
    metadata = {"variable": "x", "integrand": "2*x"}
    assert verified("simple_integration", "x**2 + 5", "x**2 + C", metadata) == 1.0
    assert verified("simple_integration", "x**3", "x**2 + C", metadata) == 0.0


def test_a_verifier_that_raises_blames_the_text_or_the_data(caplog):
    accuracy._warned.clear()
    metadata = {"factors": [2, 3]}
    assert verified("prime_factorization", "2 \u00d7 3", "2 \u00d7 3", metadata) == 1.0
    for text in ("two", "three"):
        assert verified("prime_factorization", text, "2 \u00d7 3", metadata) == 0.0
    assert len(caplog.records) == 1
    assert "'prime_factorization': its verifier failed" in caplog.text
    with pytest.raises(ValueError, match=r"'prime_factorization'.*on the data set's own answer 'six'"):
        verified("prime_factorization", "two", "six")
    with pytest.raises(ValueError, match="'no_such_task' not registered"):
        verified("no_such_task", "5", "5")


CODE = [
    *("9" * 10_001, "__import__('os').system('true')", "().__class__.__base__", "[x for x in (1,)]", "exit()"),
    *("(lambda: 1)()", "exec(x)", "exp(x, evaluate=1)", "x.y", "S('e''x''e''c''(1)')", "'\\x65xec'", "\uff45xec(1)"),
]


def test_every_verifier_that_evaluates_text_is_given_no_code(monkeypatch):
    factory = pytest.importorskip("reasoning_gym.factory")
    sources = {name: inspect.getsource(made.score_answer) for name, (made, _) in factory.DATASETS.items()}
    tasks = {name for name, text in sources.items() if re.search(r"\b(eval|exec|parse_expr|sympify)\(", text)}
    # number_sorting evaluates the data's answer; parse_expr of propositional_logic is its own parser
    assert tasks - {"number_sorting", "propositional_logic"} == accuracy._EVALUATING
    reached = []
    monkeypatch.setattr(os, "system", lambda command: reached.append(command) or 0)
    monkeypatch.setattr(accuracy, "_start", lambda scorer, task, text, entry: lambda: reached.append(text) or 1.0)
    for task in accuracy._EVALUATING:
        assert [verified(task, text, "1") for text in CODE] == [0.0] * len(CODE)
        assert verified(task, "1", "1") == 1.0
    assert set(reached) == {"1"}
    for text in ("[[1, -2], ('a')]", "[['Q', '_'], ['_', 'Q']]", "2*(2 - 8*x)**(3/2)/3 + C", "0x5f + 1e5", "exp(2*x)"):
        assert is_harmless(text) == (text[-3:] != "')]"), text  # a text in quotes beside a bracket could be passed on
    integral = "Integral(x, x) + C"
    assert not may_be_verified("intermediate_integration", integral, integral)
    assert verified("intermediate_integration", integral, f" {integral}\n") == 1.0  # right, though no verifier gets it
    for text, answer, allowed in (("a" * 10_001, "a", False), ("b" * 12_000, "a" * 3_000, True)):
        assert may_be_verified("tower_of_hanoi", text, answer) is allowed


def test_rows_that_a_verifier_would_evaluate_run_no_code(tmp_path):
    mark = tmp_path / "ran"
    evil, x = f"__import__('os').system('touch {mark}')", {"variable": "x"}
    for task, answer, metadata, text in (
        ("bitwise_arithmetic", "0x1", {"problem": evil}, "0x1"),
        ("simple_integration", "x + C", x | {"integrand": evil}, "x**2"),
        ("number_sorting", evil, {"direction": "ascending"}, "[1]"),
        ("composite", "1", {"source_dataset": "bitwise_arithmetic", "problem": evil}, "0x1"),
    ):
        with pytest.raises(ValueError, match="the task's verifier would evaluate it; expected"):
            verified(task, text, answer, metadata)
        assert not mark.exists()
    accuracy.Verifier("number_sorting", {})(answer="[1]", entry={"answer": evil, "metadata": {}})
    assert mark.exists()  # the verifier does evaluate it, so that the test above proves something


@pytest.mark.slow
def test_verifiers_score_what_reasoning_gym_makes_and_end_on_huge_numbers(monkeypatch):
    for task in (*accuracy._EVALUATED, *accuracy._EVALUATING - {"intermediate_integration"}):
        for entry in pytest.importorskip("reasoning_gym").create_dataset(task, size=5, seed=3):
            right = entry["metadata"].get("solution", entry["answer"]) if task == "puzzle24" else entry["answer"]
            assert reasoning_gym([right], [entry["answer"]], [task], [entry["metadata"]]) == [1.0], task
    monkeypatch.setattr(accuracy, "MAX_SECONDS", 0.5)
    for task, text, metadata in (
        ("countdown", "9**9**9**9", {"numbers": [9, 9, 9, 9], "target": 9}),
        ("coin_flip", "1e99999999", {}),
        ("rubiks_cube", "F " + "F999999999", {"cube_size": 3, "scramble_moves": "F"}),
    ):
        assert verified(task, text, "1/2", metadata) <= 0.05
    monkeypatch.setattr(accuracy, "_start", lambda *_: lambda: Failure("timeout", "took longer than 5 s"))
    assert verified("simple_integration", "x", "x**2 + C", {"integrand": "2*x"}) == 0.0
