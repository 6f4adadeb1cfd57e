"""Progress lines and the bar: what they name, and that they fit."""

import io
from itertools import product
from types import SimpleNamespace

from rich.console import Console

from grpo_lightning.callbacks.progress import describe_metrics, outcome_metric, progress_bar
from grpo_lightning.console import format_number
from tests.support.running import small_run

TRAINING = {
    "reward/accuracy": 0.4512,
    "reward/total": 0.548,
    "policy/kl_divergence": 0.00812,
    "reward/format": 0.98,
    "advantage/mean": -1e-9,
    "advantage/std": 0.3219,
    "perf/tokens_per_second": 812.4,
}


def module(metrics, *, right="accuracy", done=10, validated=0, steps=500):
    scorer = SimpleNamespace(rewards={right: None} if right else {}, outcome_name=right)
    return SimpleNamespace(
        metrics=metrics,
        validation=SimpleNamespace(scorer=scorer, every=20),
        completed_steps=done,
        validated_at=validated,
        steps=steps,
        clock=SimpleNamespace(phase="rollout"),
    )


def test_numbers_are_short():
    for value, digits, shown in (
        *(
            (0.979, 3, ".979"),
            (0.98, 2, ".98"),
            (1.0, 2, "1.00"),
            (0.0, 2, ".00"),
            (-0.05, 2, "-.05"),
            (0.996, 2, "1.00"),
        ),
        *(
            (0.0083, 2, ".01"),
            (0.0031, 2, ".0031"),
            (12.345, 2, "12.3"),
            (-1234567.0, 2, "-1.23e+06"),
            (10.04, 2, "10"),
        ),
    ):
        assert format_number(value, digits) == shown


def test_a_line_shows_what_is_known_the_outcome_first():
    assert describe_metrics(module({}), room=80) == ""
    assert describe_metrics(module({"val/pass@1": 0.2612}, done=0), room=80) == "pass@1 .26"
    whole = "accuracy .45  reward .55  kl .0081  format .98  advantage ±.32  tok/s 812"
    assert describe_metrics(module(TRAINING), room=len(whole)) == whole
    assert describe_metrics(module(TRAINING), room=len(whole) - 1) == whole.removesuffix("  tok/s 812")
    assert describe_metrics(module(TRAINING), room=12) == "accuracy .45"
    assert describe_metrics(module(TRAINING), room=10) == "accura .45"
    assert describe_metrics(module(TRAINING), room=3) == ".45"
    assert describe_metrics(module(TRAINING), room=2) == ""


def test_the_outcome_is_the_reward_that_says_what_is_right():
    assert outcome_metric(module(TRAINING)) == "reward/accuracy"
    assert outcome_metric(module({"reward/sums": 0.1, **TRAINING}, right="sums")) == "reward/sums"
    assert outcome_metric(module({"reward/total": 1.0}, right="absent")) == "reward/total"
    assert outcome_metric(module({"reward/total": 1.0}, right="")) == "reward/total"
    assert outcome_metric(module({"loss/total": 2.3})) == "loss/total"
    assert outcome_metric(module({"val/pass@1": 0.2})) is None
    assert (
        describe_metrics(module({"loss/total": 2.345, "val/pass@1": 0.5}, validated=10), room=80)
        == "loss 2.35  pass@1 .50"
    )


def test_an_old_validation_is_shown_with_its_step_or_not_at_all():
    metrics = {"reward/accuracy": 0.98, "val/pass@1": 0.26}
    assert describe_metrics(module(metrics, done=10, validated=0), room=80) == "accuracy .98"
    assert (
        describe_metrics(module(metrics, done=10, validated=0), room=80, keep_old=True)
        == "accuracy .98  pass@1 .26 (step 0)"
    )
    assert describe_metrics(module(metrics, done=20, validated=20), room=80) == "accuracy .98  pass@1 .26"


WILD = {
    "reward/accuracy": (0.5, -1234.5678, 1e-12),
    "reward/total": (-99999.0,),
    "val/pass@1": (0.97,),
    "policy/kl_divergence": (1.23e-11,),
    "reward/format": (-0.123,),
    "advantage/std": (1e9,),
    "perf/tokens_per_second": (1234567.0,),
    "loss/total": (-1e-30,),
}
COMBINATIONS = [
    {name: value for name, value in zip(WILD, values, strict=True) if value is not None}
    for values in product(*((None, *numbers) for numbers in WILD.values()))
]


def test_every_combination_fits_the_bar_and_the_line():
    trainer, long = SimpleNamespace(validating=False, sanity_checking=False), "a_reward_with_a_long_name" * 4
    for columns, right in product((40, 80, 140), ("accuracy", long)):
        console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None)
        for metrics in COMBINATIONS[::7]:
            renamed = {name.replace("accuracy", right): value for name, value in metrics.items()}
            one = module(renamed, right=right, done=99_000, validated=98_000, steps=100_000)
            bar = progress_bar(one, trainer, console)
            bar.add_task("fit", total=one.steps, completed=one.completed_steps)
            [line] = console.render_lines(bar.get_renderable(), pad=False)
            text = "".join(segment.text for segment in line)
            assert len(text.rstrip("\n")) <= columns
            assert "100000" in text
            if columns > 40 and (name := outcome_metric(one)):
                assert {"reward/total": " reward ", "loss/total": " loss "}.get(name, f" {right[:8]}") in text
    for metrics, room, keep_old in product(COMBINATIONS[::5], (20, 55, 75), (False, True)):
        assert len(describe_metrics(module(metrics), room=room, keep_old=keep_old)) <= room


def test_lines_fit_into_80_columns(tmp_path, capsys):
    long = "a_reward_whose_name_is_longer_than_a_line_of_a_terminal"
    function = "{_target_: tests.support.rewards.vowels, _partial_: true}"
    reward = f"+reward.{long}={{_target_: grpo_lightning.reward.RewardSpec, function: {function}, weight: 1.0}}"
    own = (reward, f"rollout.outcome={long}")
    small_run(tmp_path, "steps=3", "callbacks.progress.every=1", "validation.every=2", *own)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/3", "1/3", "2/3", "3/3"]
    assert all(len(line) <= 80 for line in lines)
    assert ["pass@1" in line for line in lines] == [True, False, True, True]
    assert all(long[:24] in line and "reward" in line for line in lines[1:])


def test_a_validation_alone_has_the_checkpoints_step(tmp_path, capsys):
    small_run(tmp_path, "steps=2", "validation.every=2")
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")][-1] == "2/2"
    small_run(tmp_path, "mode=validate", "checkpoint=last", "steps=1")
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")] == ["2"]
