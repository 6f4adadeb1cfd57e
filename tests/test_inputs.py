"""What a user sees of a run: what the model reads and writes, rows that no reward scores, and a run in a notebook."""

import logging
import signal

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.notebook import to_html
from grpo_lightning.reward import RewardSpec
from grpo_lightning.reward.accuracy import exact, numeric
from grpo_lightning.reward.format import tag_count
from grpo_lightning.rollout.scoring import describe_examples, describe_prompt, unscored_rows
from grpo_lightning.types import Prompts, Scored
from tests.support.running import SMALL, letters, small_run
from tests.test_recording import SCORED

NAN = float("nan")


class Spelling:
    """A policy whose token n is the n-th letter; 0 is a special token."""

    tokenizer = None

    def __init__(self):
        self.tokenizer = self

    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join("<s>\n" if one == 0 else chr(96 + one) for one in ids)


def test_a_prompt_shows_its_end_with_special_tokens_on_one_line():
    assert describe_prompt(Spelling(), [0, 8, 9]) == r"prompt, 3 tokens: <s>\nhi"
    assert describe_prompt(Spelling(), [1] * 10 + [2] * 300) == f"prompt, 310 tokens: …{'b' * 300}"


def test_examples_are_one_completion_of_each_group_with_its_rewards():
    assert list(describe_examples(Spelling(), SCORED, 3)) == [
        "prompt, 2 tokens: ef",
        "completion, 2 tokens: gb",
        "rewards: right 1, short 0.1, total 1.05",
        "prompt, 1 tokens: d",  # padded on the left
        "completion, 1 tokens: b",
        "rewards: right 0, short 0.3, total 0.15",
    ]
    last = SCORED.rows(torch.tensor([3]))
    last = Scored(
        Prompts(("ask",), {}), *[getattr(last, n) for n in ("sampled", "rewards", "right", "scores", "steps")]
    )
    assert list(describe_examples(Spelling(), last, 1))[1:] == [
        "completion, 3 tokens, truncated: ccb",
        "rewards: right None, short 0.4, total 0.2",
    ]


def shown(caplog):
    records = [one for one in caplog.records if one.name == "grpo_lightning.rollout.scoring"]
    assert all(one.printed for one in records)  # not on the terminal
    return [one.getMessage() for one in records]


def test_a_run_shows_a_prompt_before_its_first_step_and_then_one_completion(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="grpo_lightning"):
        small_run(tmp_path, "steps=2")
    form, first, prompt, completion, rewards = shown(caplog)
    assert form == "prompts are written by the chat template"
    assert first.startswith("prompt, ")
    assert prompt.startswith("prompt, ")
    assert completion.startswith("completion, ")
    assert rewards.startswith("rewards: custom ")


def test_a_preflight_shows_three(tmp_path, capfd):
    small_run(tmp_path, "mode=preflight", "preflight.prompts=4", "data.prompts_per_step=4")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("loading ")] == [
        "loading data",
        "loading policy",
    ]
    assert [line.partition(",")[0].partition(":")[0] for line in lines if line[:6] in ("prompt", "comple", "reward")][
        :9
    ] == 3 * ["prompt", "completion", "rewards"]


def rows(*answers):
    return [("ask", {"answer": answer, "other": None}) for answer in answers]


def test_rows_that_no_reward_scores_are_counted_before_the_first_step():
    given = rows("1", None, NAN, "2", 3.0)
    answers = {"accuracy": RewardSpec(exact, 1.0), "number": RewardSpec(numeric, 1.0)}
    assert unscored_rows(answers, given) == [
        "reward accuracy does not apply to 2 of 5 training prompts, without answer",
        "reward number does not apply to 2 of 5 training prompts, without answer",
        "no reward applies to 2 of 5 training prompts, which teach nothing: leave them out, or add a reward that "
        "applies",
    ]
    assert len(unscored_rows(answers | {"tags": RewardSpec(tag_count, 1.0)}, given)) == 2  # it applies to all
    assert unscored_rows(answers, rows("1", "2")) == []

    def own(completions, answer):  # may do without
        return [0.0] * len(completions)

    assert unscored_rows({"own": RewardSpec(own, 1.0)}, given) == []


def test_a_run_is_told_of_them(tmp_path, caplog):
    data = [{"prompt": f"{number} + 1", "answer": None if number % 2 else str(number + 1)} for number in range(12)]
    own = [word for word in SMALL if not word.startswith(("reward", "data.t", "data.v"))]
    grpo.compose(*own, "reward=[accuracy]", "loss.kl_coef=0", "logger=none", data=data, run_dir=tmp_path).fit()
    assert "training prompts, which teach nothing" in caplog.text


def composed(tmp_path, **more):
    own = [word for word in SMALL if not word.startswith(("reward", "data.t", "data.v", "steps"))]
    data = [{"prompt": f"Say {number}"} for number in range(8)]
    settings = ("steps=3", "validation.every=1", "data.validation_size=2", "logger=none")
    return grpo.compose(*own, *settings, data=data, run_dir=tmp_path, **more)


def test_a_run_in_a_notebook(tmp_path):
    assert {"compose", "GRPOLightningModule", "Prompts", "Run"} <= {*dir(grpo)} - {"Any"} == {*dir(grpo)}
    run = composed(tmp_path, reward=letters)
    assert repr(run) == f"Run(not loaded, 3 steps, {tmp_path})"
    run.fit()
    assert repr(run) == f"Run(finished, 3 steps, pass@1 {run.metrics['val/pass@1']:.3f}, {tmp_path})".replace("0.", ".")
    page = to_html(run)
    assert page == run._repr_html_()
    assert page.count("<svg ") == 1
    assert len(page.partition('points="')[2].partition('"')[0].split()) == 4  # before the first step and after each
    assert "<td>reward/total</td>" in page
    assert "time/" not in page


def test_ctrl_c_in_a_cell_says_how_to_go_on(tmp_path):
    calls = []

    def pressed(completions, **_):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return letters(completions)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        run = composed(tmp_path, reward=pressed)
        with pytest.raises(Preempted, match=r"^interrupted: .*; run.fit\(\) goes on$"):
            run.fit()
        assert repr(run).startswith(f"Run(step {run.module.completed_steps}, 3 steps")
        run.fit()
        assert run.module.completed_steps == 3
    finally:
        signal.signal(signal.SIGINT, before)
