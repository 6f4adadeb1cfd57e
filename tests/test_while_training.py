"""What a run says while it trains: that nothing is learned, that weights are damaged, and which settings changed."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.callbacks.health import HealthMonitor
from grpo_lightning.checkpoint.resume import config_diff
from tests import test_sense
from tests.support.composed import composed
from tests.support.running import small_module, small_run

TEACHING = {"advantage/std": 0.9, "advantage/mean": 1e-9, "reward/total": 0.5, "optim/grad_norm": 0.1}
EQUAL = {"advantage/std": 0.0, "advantage/mean": 0.0, "reward/std": 6e-8, "reward/total": 0.6, "optim/grad_norm": 0.02}
FLAT = TEACHING | {"optim/grad_norm": 0.0}


def warnings(caplog, name="health"):
    return [record.getMessage() for record in caplog.records if record.name.endswith(name)]


def follow(directory, rollouts, *, first=True):
    callback = HealthMonitor(str(directory), rollouts=3, stop=False)
    for number, metrics in enumerate(rollouts, 1):
        module = SimpleNamespace(metrics=metrics, completed_steps=number)
        callback.on_train_batch_end(SimpleNamespace(is_global_zero=first), module)


@pytest.mark.slow
def test_constant_rewards_are_said_once(tmp_path, caplog):
    constant = "reward.custom.function._target_=tests.support.rewards.same"
    small_run(tmp_path, constant, "reward=[custom]", "steps=7", "callbacks.doctor.rollouts=3", "validation.every=7")
    (said,) = warnings(caplog)
    assert said.startswith("step 3: in each of the last 3 rollouts all completions of a prompt had the same reward (")
    for remedy in ("reward/total is 1)", "finer differences", "harder or easier prompts", "rollout.temperature"):
        assert remedy in said


@pytest.mark.parametrize(
    "rollouts, expected",
    [
        ([EQUAL, EQUAL], None),
        ([EQUAL, EQUAL, TEACHING, EQUAL, EQUAL], None),
        ([EQUAL, EQUAL, TEACHING, EQUAL, EQUAL, EQUAL, TEACHING, EQUAL, EQUAL, EQUAL], "step 6: in each of the last 3"),
        ([EQUAL | {"optim/grad_norm": 0.0}] * 4, "step 3: in each of the last 3 rollouts all completions"),
        ([FLAT, FLAT, TEACHING, FLAT, FLAT], None),
        ([FLAT, FLAT, EQUAL | {"optim/grad_norm": 0.0}, FLAT, FLAT], None),
        ([FLAT] * 8, "step 3: the gradient was exactly 0 in each of the last 3 rollouts although rewards differ"),
        ([{"optim/grad_norm": 0.3}] * 5, None),  # supervised training has no rewards
        ([EQUAL | {"advantage/mean": 0.1}] * 5, None),  # the same for all, and yet it teaches
        ([EQUAL | {"reward/std": 0.1}] * 5, None),  # the tokens that would teach are masked
    ],
)
def test_a_rollout_with_a_difference_starts_the_count_anew(rollouts, expected, tmp_path, caplog):
    follow(tmp_path, rollouts)
    said = warnings(caplog)
    assert len(said) == (expected is not None)
    if expected:
        assert said[0].startswith(expected)


def test_only_the_first_process_speaks(tmp_path, caplog):
    follow(tmp_path, [EQUAL] * 5, first=False)
    assert not warnings(caplog)
    assert not list(tmp_path.iterdir())


def test_a_count_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"callbacks.doctor.rollouts=0: must be an integer >= 1"):
        HealthMonitor(str(tmp_path), rollouts=0, stop=False)


@pytest.mark.slow
def test_a_gradient_of_zero_is_said_once(tmp_path, caplog):
    still = ["rollout.mask_truncated=true", "rollout.max_new_tokens=8", "rollout.stop=[]", "loss.kl_coef=0"]
    small_run(tmp_path, *still, "steps=5", "callbacks.doctor.rollouts=2", "validation.every=5")
    (said,) = warnings(caplog)
    assert said.startswith("step 2: the gradient was exactly 0 in each of the last 2 rollouts although rewards differ")


@pytest.mark.slow
def test_damaged_weights_name_the_step_and_what_to_try(tmp_path):
    with pytest.raises(FloatingPointError, match="logits are not finite") as error:
        small_run(tmp_path, "optimizer.lr=1e38", "steps=9", "validation.every=9", "module.max_grad_norm=1.5")
    said = str(error.value)
    assert said.startswith("in the rollout after step ")
    for remedy in ("a lower optimizer.lr", "module.max_grad_norm below 1.5", "trainer.precision=32-true"):
        assert remedy in said


def test_weights_that_are_damaged_from_the_start_say_so(tmp_path):
    module = small_module()
    with torch.no_grad():
        next(module.policy.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"in the rollout before any step, .* not finite; .*policy.path"):
        module.train_step(["a", "b"])


@pytest.mark.slow
def test_changed_settings_are_listed_once_each(tmp_path, caplog):
    small_run(tmp_path)
    changed = ["trainer.precision=bf16-mixed", "reward.format.weight=0.3", "seed=3", "optimizer.lr=0.5", "steps=2"]
    caplog.clear()
    small_run(tmp_path, *changed, "checkpoint=last")
    (said,) = warnings(caplog, "resume")
    assert said.splitlines() == [
        "settings that have changed since the checkpoint was written:",
        "  optimizer.lr was 0.001 and is 0.5 now, which is ignored: a continued run keeps its optimizer",
        "  reward.format.weight was 0.1 and is 0.3 now",
        "  seed was 0 and is 3 now",
        "  trainer.precision was 32-true and is bf16-mixed now",
    ]


@pytest.mark.slow
def test_changed_data_are_said_where_no_setting_changed(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"{number} a", "answer": str(number)}) for number in range(60)]
    own = ("data=jsonl", f"data.path={file}", "validation.every=1")
    for name, now, count in (("same", rows, 0), ("fewer", rows[:40], 36), ("other", [*rows[1:], rows[0]], 56)):
        file.write_text("\n".join(rows))
        test_sense.small_run(tmp_path / name, *own)
        file.write_text("\n".join(now))
        caplog.clear()
        test_sense.small_run(tmp_path / name, *own, "steps=2", "checkpoint=last")
        said = f"checkpoint: 56 training and 4 held-out prompts then, {count} and 4 now, or other rows; from here on"
        assert [said in one for one in warnings(caplog, "resume")] == [True] * (now is not rows)


def test_settings_that_follow_others_are_not_listed():
    before = composed()
    may_change = composed("steps=9", "run_dir=/elsewhere", "callbacks.checkpoint.every=3", "logger=csv")
    assert config_diff(before, composed()) == config_diff(before, may_change) == []
    after = composed("validation.every=7", "rollout.max_new_tokens=9", "advantage=centered")
    changed = config_diff(before, after)
    assert {"advantage.eps", "rollout.max_new_tokens", "validation.every"} <= {key for key, *_ in changed}
