"""What people feed to rewards for the right answer: floats, missing values, lists, dates, solutions, opened tags."""

import math as python_math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import grpo_lightning as grpo
from grpo_lightning.reward import PerCompletion, RewardError, RewardSpec, check_rows
from grpo_lightning.reward.accuracy import exact, numeric, prefill, reasoning_gym
from grpo_lightning.reward.code import code
from grpo_lightning.reward.countdown import countdown
from grpo_lightning.reward.format import format as format_reward
from grpo_lightning.reward.format import json_schema, tag_count
from grpo_lightning.reward.length import cosine_length, repetition
from grpo_lightning.reward.mathematics import math
from grpo_lightning.rollout.scoring import Scorer
from tests.support.composed import ROOT
from tests.support.rewards import of_messages, score
from tests.support.running import SMALL
from tests.support.sampling import context as make_context
from tests.test_chat import made
from tests.test_rollout import PROMPTS, SAMPLING, Fixed

TABLE = Path(ROOT, "tests", "support", "answers.tsv")
MISSING = [None, python_math.nan, np.float64("nan"), np.float32("nan")]


def verdict(function, completion, answer) -> str:
    try:
        found = function([completion], [answer])[0]
    except ValueError:
        return "!"
    return "-" if found is None else str(int(found))


def test_the_table_of_answers():
    rows = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    assert len(rows) >= 200
    wrong = []
    for completion, answer, expected in rows:
        right = {"=nan": python_math.nan, "=None": None}.get(answer, answer.replace("⏎", "\n"))
        if isinstance(right, str) and right.startswith("="):
            right = float(right[1:]) if "." in right else int(right[1:])
        text = completion.replace("⏎", "\n")
        found = "".join(verdict(function, text, right) for function in (exact, numeric, math))
        if found != expected:
            wrong.append((completion, answer, expected, found))
    assert wrong == []


def test_a_missing_answer_means_that_no_reward_applies():
    limits = {"seconds": 1.0, "cpu_seconds": 1, "seconds_in_all": 1.0, "memory_mb": 64, "all_or_nothing": False}
    cosine = {"outcome": exact, "max_length": 9, "right": [1, 0], "wrong": [-1, 0]}
    for missing in MISSING:
        one = [missing]
        assert exact(["7"], one) == numeric(["7"], one) == math(["7"], one) == [None]
        assert countdown(["7"], one, [7], use_all=True) == countdown(["7"], [[7]], one, use_all=True) == [None]
        assert code(["```\npass\n```"], one, **limits) == [None]
        assert cosine_length(["7"], [[1]], answer=one, **cosine) == [None]
        assert reasoning_gym(["7"], ["7"], one, [{}]) == reasoning_gym(["7"], ["7"], ["chain_sum"], one) == [None]
    assert exact(["7", "8"], [7.0, None]) == [1.0, None]


def test_tags_that_the_prompt_has_opened_count_as_written():
    opening = "<think>\n"  # at the end of prompts of DeepSeek-R1's distillations
    rest = "2 + 2 = 4\n</think>\n<answer>4</answer>"
    assert prefill("Let me solve this.\n<think>") == "<think>"
    assert prefill("Sure: ") == ""
    assert format_reward([rest, "<think>" + rest], prefills=[opening] * 2) == [1.0, 0.0]
    assert tag_count([rest, "<think>" + rest], prefills=[opening] * 2) == [1.0, 0.75]
    assert format_reward([rest]) == [0.0]
    # What was still being thought when the completion was cut off is no answer.
    assert numeric(["2 + 2 = 4, or", rest], [4, 4], prefills=[opening] * 2) == [0.0, 1.0]
    for function in (exact, numeric, math):
        assert function(["4</answer>", "5</answer>"], ["4", "4"], prefills=["<answer>"] * 2) == [1.0, 0.0]
    assert countdown(["2*3</answer>"], [[2, 3]], [6], use_all=True, prefills=["<answer>"]) == [1.0]
    assert json_schema(["4</answer>"], schema={"type": "integer"}, prefills=["<answer>"]) == [1.0]


def test_a_scorer_passes_what_the_template_of_deepseeks_distillations_opens():
    policy = Fixed()
    policy.chat = made("deepseek_r1_distill")
    policy.texts = (
        "a</think><answer>4</answer>",
        "<think>a</think><answer>4</answer>",
        "4",
        "",
        "a</think>4",
        "4</think>",
    )
    scored, _ = Scorer(
        {"format": RewardSpec(format_reward, 1.0), "tags": RewardSpec(tag_count, 1.0)}, None, 1.0
    ).generate_and_score(policy, PROMPTS, group_size=3, sampling=SAMPLING, context=make_context(seed=11))
    assert scored.rewards["format"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert scored.rewards["tags"].tolist() == [1.0, 0.75, 0.25, 0.25, 0.5, 0.5]


# --- before a run


def rows(*columns):
    return [(f"prompt {number}", row) for number, row in enumerate(columns)]


def test_answers_and_settings_of_no_use_are_refused_before_a_run():
    for function, row, message in (
        (
            numeric,
            {"answer": "1, 2"},
            r"'mine' cannot score 1 of 2 rows, .* expected one number, got '1, 2'; .*reward=\[math\]",
        ),
        (exact, {"answer": True}, "answer: expected text or a number, got True .data.map_row"),
        (exact, {"answer": ["4", "5"]}, r"got \['4', '5'\] .data.map_row.*reward=\[code\]"),
        (partial(repetition, n=0, max_penalty=-1.0), {"answer": ""}, "n=0, max_penalty=-1.0: expected n >= 1"),
    ):
        with pytest.raises(RewardError, match=message) as error:
            check_rows({"mine": RewardSpec(function, 1.0)}, rows({"answer": "1"}, row))
        check_rows({"mine": RewardSpec(function, 1.0)}, [])  # rows that are made on access are not read
        assert "timeout" not in str(error.value)  # which is no remedy


def test_right_answers_that_no_completion_can_equal_are_counted_before_a_run(caplog):
    words = rows({"answer": "Paris"}, {"answer": "no solution"})
    with pytest.raises(RewardError, match=r"'a' cannot score 2 of 2 rows.*'Paris' .*reward=\[exact\]") as error:
        check_rows({"a": RewardSpec(math, 1.0)}, words)
    assert error.value.row == 0
    readable = [{"answer": answer} for answer in ("2024-01-03", None, r"\text{even}", "4")]
    check_rows({"a": RewardSpec(math, 1.0)}, rows(*readable))
    assert caplog.text == ""
    check_rows({"a": RewardSpec(math, 1.0)}, rows(*readable, {"answer": "Rome"}))  # None for some is as documented
    assert re.search(r"1 of 4 rows.*'Rome'.*'prompt 4'", caplog.text)


def test_a_list_of_one_and_an_answer_in_tags_are_that_answer():
    for right in (["4"], [["4"]], [4.0], "<answer>4</answer>", "<think>1 + 3</think>\n<answer> 4 </answer>"):
        for function in (exact, numeric, math):
            assert function(["<answer>4</answer>", "5"], [right, right]) == [1.0, 0.0], (function, right)


@pytest.mark.slow
def test_a_run_names_the_row_of_the_file(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [f'{{"prompt": "What is {i} + 1?", "answer": "{i + 1}"}}' for i in range(12)]
    words = [word for word in SMALL if not word.startswith(("reward", "data"))]
    words += ["data=jsonl", f"data.path={path}", "data.validation_size=2", "data.prompts_per_step=10"]
    path.write_text("\n".join([*lines[:9], '{"prompt": "Which two?", "answer": "1, 2"}', *lines[9:]]))
    with pytest.raises(RewardError, match="own.jsonl, line 10.*expected one number, got '1, 2'"):
        grpo.compose(*words, "reward=[numeric]", run_dir=tmp_path / "one").fit()
    path.write_text("\n".join(lines))
    own = ["reward=[custom]", "reward.custom.function._target_=tests.support.rewards.fails_on_six"]
    with pytest.raises(RewardError, match=r"own.jsonl, line 6: reward 'custom' raised .*on row \d"):
        grpo.compose(*words, *own, run_dir=tmp_path / "three").fit()


# --- chat messages


def test_functions_for_chat_messages_are_recognised_or_named():
    def annotated(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    def either(completions: list[str] | list[list[dict[str, str]]]) -> list[float]:
        return [float(isinstance(text, str)) for text in completions]

    def bare(completions):
        return [float(len(completion[0]["content"])) for completion in completions]

    def one(completion: list[dict[str, str]]) -> float:
        return float(len(completion[0]["content"]))

    for function, scores in ((annotated, [2.0, 3.0]), (either, [1.0, 1.0]), (PerCompletion(one), [2.0, 3.0])):
        assert score({"mine": RewardSpec(function, 1.0)}, ["p", "q"], ["ab", "abc"], {}) == {"mine": scores}
    with pytest.raises(RewardError, match="string indices must be.* set reward.mine.messages=true") as error:
        score({"mine": RewardSpec(bare, 1.0)}, ["p"], ["ab"], {})
    assert "timeout" not in str(error.value)
    workers = {"mine": RewardSpec(of_messages, 1.0, timeout=20.0, max_failed=0.0)}
    with pytest.raises(RewardError, match="set reward.mine.messages=true"):
        score(workers, ["p"], ["ab"], {})
