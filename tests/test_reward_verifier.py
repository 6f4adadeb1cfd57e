import inspect
import os
import re
import time

import pytest

from grpo_lightning.reward import verifier
from grpo_lightning.reward.accuracy import reasoning_gym, verifier_failures
from grpo_lightning.reward.verifier import (
    GATES,
    is_harmless,
    is_literal,
    make_scorer,
    may_be_verified,
)
from tests.test_reward_pool import SlowVerifier


def verified(task, text, answer, metadata=None, **columns):
    columns = {name: [value] for name, value in columns.items()}
    return reasoning_gym([f"<answer>{text}</answer>"], [answer], [task], [metadata or {}], **columns)[0]


def test_the_tasks_own_verifier_scores_the_answer():
    rows = [("<think>5</think><answer>-7</answer>", "-7", "chain_sum", {}), ("-7", "12", "chain_sum", {})]
    rows += [("<answer>2 * 3 + 4</answer>", "4 + 2*3", "countdown", {"numbers": [2, 3, 4], "target": 10})]
    rows += [("<answer>2 * 3 - 4</answer>", "4 + 2*3", "countdown", {"numbers": [2, 3, 4], "target": 10})]
    assert reasoning_gym(*zip(*rows, strict=True), prompts=[]) == [1.0, 0.0, 1.0, 0.05]


def test_a_verifier_knows_the_settings_of_its_data_set():
    solution, metadata = "(8 - 2) * (2 + 2)", {"numbers": [8, 2, 2, 2]}  # 24, of numbers from 1 to 10
    assert verified("puzzle24", solution, None, metadata) == 1.0
    assert verified("puzzle24", solution, None, metadata, task_config=None) == 1.0
    assert verified("puzzle24", solution, None, metadata, task_config={"min_value": 3}) == 0.01


def test_a_verifier_that_raises_on_the_models_text_scores_0_and_is_counted(caplog):
    verifier_failures.clear()
    metadata = {"factors": [2, 3]}
    assert verified("prime_factorization", "2 \u00d7 3", "2 \u00d7 3", metadata) == 1.0
    assert verified("prime_factorization", "two", "2 \u00d7 3", metadata) == 0.0
    assert verified("prime_factorization", "three", "2 \u00d7 3", metadata) == 0.0
    assert dict(verifier_failures) == {"prime_factorization": 2}
    assert len(caplog.records) == 1
    assert "'prime_factorization': its verifier raised ValueError: invalid literal" in caplog.text


def test_a_verifier_that_raises_on_the_right_answer_too_means_broken_data():
    with pytest.raises(ValueError, match=r"'prime_factorization'.*on the data set's own answer 'six'"):
        verified("prime_factorization", "two", "six")


def test_unknown_tasks_and_broken_metadata_raise():
    with pytest.raises(ValueError, match="'no_such_task' not registered"):
        verified("no_such_task", "5", "5")
    with pytest.raises(ValueError, match=r"metadata: expected a mapping for the task 'chain_sum', got '\{\}'"):
        verified("chain_sum", "5", "5", "{}")


# --- what is not given to a verifier


def evaluating_tasks():
    """Tasks whose verifier evaluates text, by its source."""
    factory = pytest.importorskip("reasoning_gym.factory")
    code = {name: inspect.getsource(made.score_answer) for name, (made, _) in factory.DATASETS.items()}
    own = {"number_sorting"}, {"propositional_logic"}  # evaluates the data's answer; parse_expr is its own parser
    found = {name for name, text in code.items() if re.search(r"\b(eval|exec|parse_expr|sympify|Fraction)\(", text)}
    return sorted(found - set().union(*own))


def test_every_verifier_that_evaluates_text_has_a_gate():
    tasks = evaluating_tasks()
    assert len(tasks) == 10
    assert set(tasks) <= set(GATES)
    assert all(isinstance(make_scorer(task, {}), verifier._Timed) for task in GATES)
    assert set(GATES) <= set(pytest.importorskip("reasoning_gym.factory").DATASETS)


@pytest.mark.parametrize("task", [task for task in evaluating_tasks() if task != "coin_flip"])
def test_text_cannot_run_code(task, monkeypatch):
    reached = []
    monkeypatch.setattr(os, "system", lambda command: reached.append(command) or 0)
    monkeypatch.setattr("grpo_lightning.reward.accuracy.verifier_failures", {})
    scorer = lambda answer, entry: reached.append(answer) or 1.0  # noqa: E731
    monkeypatch.setattr("grpo_lightning.reward.accuracy._scorer", lambda task, config: scorer)
    code = [
        "9" * 10_001,
        "__import__('os').system('true')",
        "().__class__.__base__",
        "[x for x in (1,)]",
        "'a' * 10**10",
        "[1] * 10**10",
        "(lambda: 1)()",
        "f'{1}'",
        "exit()",
    ]
    for text in code:
        assert verified(task, text, "1") == 0.0
    assert reached == []
    assert verified(task, "1", "1") == 1.0


@pytest.mark.parametrize(
    ("check", "text", "allowed"),
    [
        (is_literal, "[[1, -2], ('a', 'b')]", True),
        (is_literal, "[[1, -2], ('a', b)]", False),
        (is_literal, "_ Q", True),
        (is_literal, " \ta.b", False),  # eval ignores the space before it
        (is_literal, "-" * 9_000 + "1", False),
        (is_harmless, "2*(2 - 8*x)**(3/2)/3 + C", True),
        (is_harmless, "log(cos(x)) / sqrt(x)", True),
        (is_harmless, "exec(x)", False),
        (is_harmless, "exp(x, evaluate=1)", False),
        (is_harmless, "log(*x)", False),
        (is_harmless, "'exec(x)'", False),  # sympy evaluates a text once more
        (is_harmless, "x.y", False),
        (is_harmless, "(" * 9_000 + "1", False),
        (GATES["coin_flip"], "3/1024", True),
        (GATES["propositional_logic"], "P" * 1000, True),
    ],
)
def test_gates(check, text, allowed):
    start = time.process_time()
    assert check(text) is allowed
    assert time.process_time() - start < 0.5


def test_rows_that_a_verifier_would_evaluate_run_no_code(tmp_path):
    mark = tmp_path / "ran"
    evil, x = f"__import__('os').system('touch {mark}')", {"variable": "x"}
    rows = [
        ("bitwise_arithmetic", "0x1", {"problem": evil}, "0x1"),
        ("simple_integration", "x + C", x | {"integrand": evil}, "x**2"),
        ("intermediate_integration", "x + C", x | {"integrand": f"x - {evil!r}"}, "x**2"),
        ("polynomial_multiplication", evil, {}, "x"),
        ("number_sorting", evil, {"direction": "ascending"}, "[1]"),
        ("composite", "1", {"source_dataset": "bitwise_arithmetic", "problem": evil}, "0x1"),
    ]
    for task, answer, metadata, text in rows:
        with pytest.raises(ValueError, match="the task's verifier would evaluate it; allowed are") as error:
            verified(task, text, answer, metadata)
        assert "\n" not in str(error.value)
        assert not mark.exists()
    make_scorer("number_sorting", {})(answer="[1]", entry={"answer": evil, "metadata": {}})
    assert mark.exists()  # the verifier does evaluate it, so that the test above proves something


@pytest.mark.slow
def test_rows_that_reasoning_gym_makes_are_scored():
    for task in ("bitwise_arithmetic", "number_sorting", "polynomial_multiplication", "simple_integration"):
        for entry in pytest.importorskip("reasoning_gym").create_dataset(task, size=10, seed=3):
            assert reasoning_gym([entry["answer"]], [entry["answer"]], [task], [entry["metadata"]]) == [1.0]


def test_the_right_answer_is_right_though_no_verifier_may_be_given_it():
    assert not may_be_verified("intermediate_integration", "Integral(x, x) + C", " Integral(x, x) + C\n")
    assert verified("intermediate_integration", "Integral(x, x) + C", " Integral(x, x) + C\n") == 1.0
    assert verified("intermediate_integration", "Integral(x, x)", " Integral(x, x) + C\n") == 0.0
    assert may_be_verified("tower_of_hanoi", "a" * 10_000, "a")
    assert not may_be_verified("tower_of_hanoi", "a" * 10_001, "a")
    assert may_be_verified("tower_of_hanoi", "b" * 12_000, "a" * 3_000)
    assert not may_be_verified("tower_of_hanoi", "b" * 12_001, "a" * 3_000)


def test_a_verifier_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(verifier, "_MOST_SECONDS", 0.5)
    timed = verifier._Timed(SlowVerifier())
    assert timed(answer="0", entry={"metadata": {"value": 4}}) == 0.25
    with pytest.raises(TimeoutError, match=r"took longer than 0.5 s"):
        timed(answer="60", entry={"metadata": {"value": 4}})
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError: division by zero$"):
        timed(answer="0", entry={"metadata": {"value": 0}})


@pytest.mark.slow
def test_a_timed_verifier_scores_and_a_timeout_blames_no_data(monkeypatch, caplog):
    metadata = {"variable": "x", "integrand": "2*x"}
    assert verified("simple_integration", "x**2 + 5", "x**2 + C", metadata) == 1.0
    assert verified("simple_integration", "x**3", "x**2 + C", metadata) == 0.0

    def late(answer, entry):
        raise TimeoutError("took longer than 5 s")

    monkeypatch.setattr("grpo_lightning.reward.accuracy._scorer", lambda task, config: late)
    assert verified("late", "x", "x**2 + C", metadata) == 0.0
    assert "TimeoutError" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "text", "metadata"),
    [
        ("countdown", "9**9**9**9", {"numbers": [9, 9, 9, 9], "target": 9}),
        ("coin_flip", "1e99999999", {}),
        ("rubiks_cube", "F " + "F999999999", {"cube_size": 3, "scramble_moves": "F"}),
    ],
)
def test_huge_numbers_score_little_and_end(task, text, metadata, monkeypatch):
    monkeypatch.setattr(verifier, "_MOST_SECONDS", 0.5)
    assert verified(task, text, "1/2", metadata) <= 0.05
