"""The supervised stage on demonstrations of one's own, and GRPO from its export."""

import json

import pytest

from grpo_lightning.data.demonstrations import FileDemonstrations
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
    path = write(tmp_path / "c.jsonl", [{"question": "q", "solution": "s"}])
    assert FileDemonstrations(path, "question", "solution")[0] == ("q", {"completion": "s"})


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
