"""Demonstrations: of files, with GRPO from the export of their supervised stage, and synthetic ones."""

import json
import random
import re
from itertools import pairwise

import pytest
import reasoning_gym

from grpo_lightning.data.demonstrations import (
    FileDemonstrations,
    GuessingGames,
    ReasoningDemonstrations,
    arithmetic,
    demonstrate,
)
from grpo_lightning.environment.builtin import guess
from grpo_lightning.reward.accuracy import demonstrated
from grpo_lightning.run import Run
from tests.support.composed import build, composed


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def message(role, content):
    return {"role": role, "content": content}


def test_completions_stand_in_a_column_a_message_or_at_the_end_of_a_conversation(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        [
            {"prompt": "one", "completion": "1", "answer": "1"},
            {"prompt": [message("user", "two")], "completion": [message("assistant", "2")], "answer": "2"},
        ],
    )
    rows = FileDemonstrations(path, "prompt", "completion")
    assert [rows[i] for i in range(len(rows))] == [
        ("one", {"answer": "1", "completion": "1"}),
        ([message("user", "two")], {"answer": "2", "completion": "2"}),
    ]
    talk = [message("system", "s"), message("user", "u"), message("assistant", "a")]
    path = write(tmp_path / "b.jsonl", [{"messages": talk}])
    assert FileDemonstrations(path, "messages", "completion")[0] == (talk[:2], {"completion": "a"})


def test_right_is_what_the_demonstration_answers():
    texts = ["<think>7</think><answer>3</answer>", "3", "<answer>4</answer>"]
    assert demonstrated(texts, ["<think>1 2</think><answer>3</answer>"] * 3) == [1.0, 1.0, 0.0]
    assert demonstrated(texts, [""] * 3, answer=["4", "3", "4"]) == [0.0, 1.0, 1.0]
    metadata = [{"word": "ab", "word_len": 2, "source_dataset": "spell_backward", "source_index": 0}]
    assert demonstrated(["<answer>ba</answer>"], ["x"], ["ba"], ["spell_backward"], metadata) == [1.0]


@pytest.mark.slow
def test_the_supervised_stage_teaches_ones_own_demonstrations_and_grpo_goes_on_from_its_export(tmp_path):
    """Words are to be written in capitals, which the shipped policy was never shown."""
    words = ["south", "river", "plant", "stone", "cloud", "light", "horse", "table"]
    rows = [{"prompt": f"capital letters: {word}", "completion": f"<answer>{word.upper()}</answer>"} for word in words]
    path = write(tmp_path / "demonstrations.jsonl", rows)

    def run(*overrides):
        made = Run(composed(*overrides), build(*overrides), overrides=overrides, directory_given=True)
        made.execute()
        return made.metrics

    supervised = ["module=sft", "data=demonstrations", f"data.path={path}", f"data.validation_path={path}"]
    common = ["trainer=cpu", "optimizer.lr=2e-3", "data.prompts_per_step=8", "validation.every=80", "steps=80"]
    learned = run(*supervised, *common, f"run_dir={tmp_path / 'sft'}")
    assert learned["val/pass@1"] > 0.5
    asked = [{"prompt": row["prompt"], "answer": word.upper()} for row, word in zip(rows, words, strict=True)]
    path = write(tmp_path / "prompts.jsonl", asked)
    grpo = ["policy=hf", f"policy.path={tmp_path / 'sft' / 'export'}", "data=jsonl", f"data.path={path}"]
    sizes = ["steps=1", "data.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "trainer=cpu"]
    metrics = run(*grpo, *sizes, f"data.validation_path={path}", f"run_dir={tmp_path / 'grpo'}")
    assert metrics["val/pass@1"] == pytest.approx(learned["val/pass@1"], abs=0.25)


# Synthetic ones

TASKS = {
    "basic_arithmetic": {"max_terms": 4, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "simple_equations": {"max_terms": 3, "max_value": 30, "operators": ["+", "-"], "operators_weights": [0.5, 0.5]},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
}
SHAPE = re.compile(r"<think>([^<>]+)</think><answer>([^<>\s]+)</answer>")


def test_right_demonstration_is_worked_by_hand():
    for task, metadata, answer, expected in [
        ("chain_sum", {"expression": "45 + 38 - 12"}, "71", "45+38=83 83-12=71"),
        ("simple_equations", {"equation": "x + 57 = 12", "variable": "x"}, "-45", "12-57=-45"),
        ("simple_equations", {"equation": "e - 57 = 12", "variable": "e"}, "69", "12+57=69"),
        ("simple_equations", {"equation": "57 - x = 12", "variable": "x"}, "45", "57-12=45"),
        ("simple_equations", {"equation": "56 - 98*e = -1218", "variable": "e"}, "13", "56--1218=1274 1274/98=13"),
        ("spell_backward", {"word": "culla"}, "alluc", "c u l l a"),
    ]:
        text = demonstrate(task, {"metadata": metadata, "answer": answer}, random.Random(0), slip_rate=0.0)
        assert text == f"<think>{expected}</think><answer>{answer}</answer>"


def test_without_errors_every_demonstration_is_right_and_follows():
    for task, config in TASKS.items():
        judge = reasoning_gym.create_dataset(task, size=100, seed=5, **config)
        demonstrations = ReasoningDemonstrations({task: config}, size=100, seed=5, slip_rate=0.0)
        for index in range(100):
            question, columns = demonstrations[index]
            reasoning, answer = SHAPE.fullmatch(columns["completion"]).groups()
            assert (question, columns["task"]) == (judge[index]["question"], task)
            assert judge.score_answer(answer, {"answer": columns["answer"], "metadata": columns["metadata"]}) == 1.0
            if task != "spell_backward":
                results = [equation.split("=") for equation in reasoning.split(" ")]
                assert results[-1][1] == answer
                assert all(left.startswith(before) for (_, before), (left, _) in pairwise(results))


def test_the_same_item_whatever_was_read_before_and_another_with_another_seed():
    one, two = (ReasoningDemonstrations(TASKS, size=60, seed=3, slip_rate=0.5) for _ in range(2))
    forward = [one[index] for index in range(60)]
    assert forward == [two[index] for index in reversed(range(60))][::-1]
    assert [columns["task"] for _, columns in forward] == list(TASKS) * 15
    later = ReasoningDemonstrations(TASKS, size=60, seed=3 + 56, slip_rate=0.5)
    assert [later[0][0], later[0][1]["completion"]] == [forward[56][0], forward[56][1]["completion"]]  # from seed + i
    with pytest.raises(IndexError, match="out of range"):
        one[60]


def test_demonstrated_games_are_replied_to_as_demonstrated():
    won = 0.363  # 0.3 * 0.856 (careful, measured with 12,400 games) + 0.7 * 0.151
    right = 0
    for _, columns in GuessingGames(4030, seed=5, highest=31, guesses=5, careful_rate=0.3):
        assert columns["answer"] == str(columns["number"])
        roles, texts = zip(*((message["role"], message["content"]) for message in columns["completion"]))
        assert roles == tuple(("assistant", "user")[i % 2] for i in range(len(roles)))
        turns, replies = texts[::2], texts[1::2]
        assert len(turns) == len(replies) + 1 <= 5
        played = [
            guess(turns[:n], columns["number"], random.Random(0), guesses=5, highest=31)
            for n in range(1, len(turns) + 1)
        ]
        assert played[:-1] == list(replies)
        assert played[-1] == 1.0 or (played[-1], len(turns)) == (0.0, 5)
        right += played[-1]
    assert abs(right / 4030 - won) < 4 * (won * (1 - won) / 4030) ** 0.5


def test_held_out_pairs_of_numbers_are_in_no_training_question():
    train, held_out = (arithmetic(2, 12, ["+", "*"], 26, validation) for validation in (False, True))
    pairs = [{frozenset(re.findall(r"\d+", rows[i][0])) for i in range(len(rows))} for rows in (train, held_out)]
    assert [*map(len, (train, held_out, *pairs))] == [146, 96, 40, 26]  # 11 * 11 pairs in order, two questions each
    assert not pairs[0] & pairs[1]
    answers = dict(rows[i] for rows in (train, held_out) for i in range(len(rows)))
    assert answers["What is 7 * 8? Answer with the number only."] == {"answer": "56"}
    with pytest.raises(ValueError, match="held_out=66: expected 1 to 65"):
        arithmetic(2, 12, ["+"], 66, False)
