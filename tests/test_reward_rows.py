"""Rows of a data set run no code in the verifiers of their tasks."""

import time

import pytest

from grpo_lightning.data.demonstrations import OwnDemonstrations
from grpo_lightning.reward.accuracy import _scorer, demonstrated, reasoning_gym, verifier_failures
from grpo_lightning.reward.verifier import begin, check_row, is_bitwise, is_formula
from tests.support.provocations import provocation
from tests.test_demonstrations import write

REFUSED = "the task's verifier would evaluate it; allowed is"
X = {"variable": "x", "integrand": "2*x"}


@provocation(
    "a model that answers a task of reasoning_gym with a name of the verifier's own, such as `[oracle_answer]`",
    "the name is not looked up: the answer is wrong",
)
@pytest.mark.parametrize(
    ("task", "text", "metadata"),
    [
        ("spiral_matrix", "[oracle_answer]", {}),
        ("string_insertion", "oracle_answer", {}),
        ("binary_matrix", "[[oracle_answer]]", {}),
        ("n_queens", "valid_solutions", {"valid_answers": ["Q"]}),
    ],
)
def test_a_name_of_the_verifiers_own_is_no_answer(task, text, metadata):
    assert reasoning_gym([text], ["Q _"], [task], [metadata]) == [0.0]


@pytest.fixture
def mark(tmp_path):
    """A file that code in a row makes; the test fails where there is one at its end."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


def code(mark):
    return f"__import__('os').system('touch {mark}')"


def rows_with(evil):
    """Task, its right answer, its metadata, and what the model answers: the verifier evaluates ``evil``."""
    return {
        "a problem": ("bitwise_arithmetic", "0x1", {"problem": evil}, "0x1"),
        "an integrand": ("simple_integration", "x + C", X | {"integrand": evil}, "x**2"),
        "another integrand": ("intermediate_integration", "x + C", X | {"integrand": evil}, "x**2"),
        "the answer to compare with": ("polynomial_multiplication", evil, {}, "x"),
        "a list to sort": ("number_sorting", evil, {"direction": "ascending"}, "[1]"),
        "a list behind a space": ("number_sorting", f" \t{evil}", {"direction": "ascending"}, "[1]"),
        "bytes": ("number_sorting", evil.encode(), {"direction": "ascending"}, "[1]"),
        "of another task": ("chain_sum", "1", {"source_dataset": "bitwise_arithmetic", "problem": evil}, "0x1"),
    }


@provocation(
    "a data set whose rows name a task of reasoning_gym and hold Python code in `answer` or `metadata`",
    "refused in one sentence before anything is evaluated",
)
@pytest.mark.parametrize("name", rows_with(""))
def test_rows_that_a_verifier_would_evaluate_are_refused(name, mark, tmp_path):
    task, answer, metadata, text = rows_with(code(mark))[name]
    with pytest.raises(ValueError, match=f"^task '{metadata.get('source_dataset', task)}', .*{REFUSED}") as error:
        reasoning_gym([f"<answer>{text}</answer>"], [answer], [task], [metadata])
    assert "\n" not in str(error.value)
    if isinstance(answer, str):
        row = {"prompt": "say", "completion": text, "answer": answer, "task": task, "metadata": metadata}
        _, columns = OwnDemonstrations(write(tmp_path / "a.jsonl", [row]), "prompt", "completion")[0]
        with pytest.raises(ValueError, match=REFUSED):
            demonstrated([text], **{key: [value] for key, value in columns.items()})


@pytest.mark.parametrize("name", rows_with(""))
def test_these_rows_would_run_code(name, tmp_path):
    """The verifiers do evaluate them, so that the test above proves something."""
    task, answer, metadata, text = rows_with(code(tmp_path / "ran"))[name]
    entry = {"question": "", "answer": answer, "metadata": metadata}
    begin(_scorer(metadata.get("source_dataset", task), {}), answer=text, entry=entry)()
    assert (tmp_path / "ran").exists()


@provocation(
    "a data set whose right `answer` is Python code, and a model that answers the same text",
    "the texts are compared; nothing is evaluated",
)
@pytest.mark.parametrize(
    "task", ["countdown", "puzzle24", "simple_integration", "string_insertion", "n_queens", "binary_matrix"]
)
def test_the_rows_own_answer_is_not_evaluated(task, mark, monkeypatch):
    evil, metadata = code(mark), X | {"numbers": [1], "target": 1, "valid_answers": []}
    rows = [f"<answer>{text}</answer>" for text in (evil, "no")], [evil] * 2, [task] * 2, [metadata] * 2
    assert reasoning_gym(*rows)[0] == 1.0

    def broken(answer, entry):
        assert answer != evil
        raise KeyError("broken")

    monkeypatch.setattr("grpo_lightning.reward.accuracy._scorer", lambda task, config: broken)
    monkeypatch.setattr("grpo_lightning.reward.accuracy.verifier_failures", verifier_failures.copy())
    assert reasoning_gym(["1", "[1]"], [evil] * 2, [task] * 2, [metadata] * 2) == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        *("bitwise_arithmetic", "coin_flip", "countdown", "number_sorting", "polynomial_multiplication"),
        *("simple_integration", "intermediate_integration"),
    ],
)
def test_rows_that_reasoning_gym_makes_are_scored(task):
    made = pytest.importorskip("reasoning_gym").create_dataset(task, size=40, seed=3)
    for entry in made:
        check_row(task, entry["answer"], entry["metadata"])
    entry = made[0]
    assert reasoning_gym([entry["answer"]], [entry["answer"]], [task], [entry["metadata"]]) == [1.0]


@pytest.mark.parametrize(
    ("check", "text", "allowed"),
    [
        (is_bitwise, "((0x7d65 >> 0x2) << 0x1) - -3 * 4", True),
        (is_bitwise, "1 << 65", False),
        (is_bitwise, "1 << (1 << 60)", False),
        (is_bitwise, "9**9**9", False),
        (is_bitwise, "abs(1)", False),
        (is_bitwise, "abc", False),
        (is_bitwise, "'a' * 9", False),
        (is_bitwise, "1 / 2", False),
        (is_bitwise, "~1", False),
        (is_bitwise, "1 +" * 40_000 + "1", False),
        (is_formula, "9999999999999999*x**400 - y", True),
        (is_formula, "x + " * 300 + "x", True),
        (is_formula, "x**500", False),
        (is_formula, "9**9**9", False),
        (is_formula, "1e400 * x", False),
        (is_formula, "exec(x)", False),
        (is_formula, "x.y", False),
        (is_formula, "[x for x in y]", False),
        (is_formula, "+" * 9_000 + "x", False),
    ],
)
def test_gates_of_rows(check, text, allowed):
    start = time.process_time()
    assert check(text) is allowed
    assert time.process_time() - start < 0.5
