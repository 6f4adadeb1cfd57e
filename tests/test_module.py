"""What an optimizer step is made of: equal under any cut into micro-batches, and safe against bad numbers."""

import json

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.reward import RewardError
from grpo_lightning.step import StepModule, mean_of_updates
from tests.running import small_run

ALGORITHMS = ["grpo", "dr_grpo", "dapo"]


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of every optimizer step, in order."""
    found = []
    plain = StepModule.apply_gradients

    def recording(module):
        found.append(torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()]))
        return plain(module)

    monkeypatch.setattr(StepModule, "apply_gradients", recording)
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_do_not_depend_on_the_microbatch_budget(algorithm, gradients, tmp_path):
    metrics = [
        small_run(tmp_path / str(tokens), f"algorithm={algorithm}", f"module.microbatch_tokens={tokens}").metrics
        for tokens in (16384, 150, 1)
    ]
    for name in (name for name in metrics[0] if name.startswith(("loss/", "policy/", "optim/", "completion/"))):
        assert [m[name] for m in metrics[1:]] == pytest.approx([metrics[0][name]] * 2, rel=1e-4, abs=1e-6), name
    if algorithm == "dapo":  # the others' loss is zero on-policy
        assert abs(metrics[0]["loss/policy"]) > 1e-3
    whole, some, single = gradients
    assert whole.abs().max() > 1e-3
    scale = float(whole.abs().max())
    assert_close(some, whole, rtol=0, atol=1e-6 * max(1.0, scale))
    assert_close(single, whole, rtol=0, atol=1e-6 * max(1.0, scale))


def test_a_single_update_is_exactly_on_policy(tmp_path):
    module = small_run(tmp_path, "steps=2")
    metrics = module.metrics
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0
    assert abs(metrics["loss/policy"]) < 1e-6


def test_several_updates_move_the_ratio_and_use_every_row_each_epoch(gradients, tmp_path):
    module = small_run(
        tmp_path, "module.ppo_epochs=3", "module.minibatch_size=4", "optimizer.lr=0.05", "loss.kl_coef=0"
    )
    assert len(gradients) == 6  # 3 epochs x 8 completions / 4
    assert module.metrics["policy/ratio_max"] > 1.05
    assert module.metrics["policy/clip_fraction"] > 0
    assert module.completed_steps == 1
    assert module.trainer.global_step == 6


def test_the_first_of_several_updates_has_the_gradient_of_a_single_one(gradients, tmp_path):
    small_run(tmp_path / "one", "loss.kl_coef=0")
    two = small_run(tmp_path / "two", "loss.kl_coef=0", "module.ppo_epochs=2")
    assert two.metrics["policy/ratio_max"] > 1.001  # the second update is measured against the sampler
    assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)  # old log-probabilities by the sampler
    assert (gradients[2] - gradients[0]).abs().max() > 1e-4


def test_the_second_minibatch_of_an_epoch_is_measured_against_the_sampler(tmp_path):
    module = small_run(tmp_path, "module.minibatch_size=4", "optimizer.lr=0.05", "loss.kl_coef=0")
    assert module.metrics["policy/ratio_max"] > 1.01


def test_what_is_trained_is_scored_at_the_temperature_it_was_sampled_at(tmp_path):
    module = small_run(
        tmp_path, "rollout.temperature=0.5", "module.ppo_epochs=2", "optimizer.lr=0", "policy.hidden_size=32"
    )
    assert module.metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_metrics_of_several_updates_are_averaged_and_of_maxima_the_largest_counts():
    updates = [
        {"a": torch.tensor(1.0), "b_max": torch.tensor(5.0)},
        {"a": torch.tensor(4.0), "b_max": torch.tensor(3.0)},
    ]
    assert mean_of_updates(updates) == {"a": 2.5, "b_max": 5.0}


def test_every_rollout_has_random_numbers_of_its_own_and_every_validation_the_same(tmp_path, monkeypatch):
    seeds = []
    plain = HFPolicy.sample

    def recording(policy, prompts, **arguments):
        seeds.append(arguments["seed"])
        return plain(policy, prompts, **arguments)

    monkeypatch.setattr(HFPolicy, "sample", recording)
    small_run(tmp_path, "steps=2", "validation.every=1")
    validation, rollout, again, second, last = seeds
    assert validation == again == last
    assert len({validation, rollout, second}) == 3


def test_the_reference_is_no_part_of_the_module_and_never_moves(tmp_path):
    module = small_run(tmp_path, "steps=2", "optimizer.lr=0.01")
    assert not any("reference" in name for name in module.state_dict())
    assert module.reference is not None
    start = dict(small_run(tmp_path / "fresh", "optimizer.lr=0").policy.named_parameters())
    for name, parameter in module.reference.named_parameters():
        assert torch.equal(parameter, start[name])
        assert not parameter.requires_grad
    assert module.metrics["policy/kl_divergence"] > 0


def test_without_kl_no_reference_is_made(tmp_path):
    module = small_run(tmp_path, "loss.kl_coef=0")
    assert module.reference is None
    assert "policy/kl_divergence" not in module.metrics


def test_kl_is_zero_while_policy_and_reference_agree(tmp_path):
    module = small_run(tmp_path)
    assert abs(module.metrics["policy/kl_divergence"]) < 1e-6
    assert abs(module.metrics["loss/kl"]) < 1e-6


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch):
    plain = StepModule.apply_gradients

    def poisoned(module):
        if module.completed_steps == 1:
            next(iter(module.policy.parameters())).grad.fill_(float("nan"))
        return plain(module)

    monkeypatch.setattr(StepModule, "apply_gradients", poisoned)
    module = small_run(tmp_path, "steps=3", "optimizer.lr=0.01")
    assert module.metrics["optim/skipped"] == 1.0
    assert all(parameter.isfinite().all() for parameter in module.policy.parameters())
    state = module.trainer.optimizers[0].state
    assert {int(values["step"]) for values in state.values()} == {2}


def test_too_many_skipped_steps_end_the_run_with_the_cause(tmp_path, monkeypatch):
    plain = StepModule.apply_gradients

    def poisoned(module):
        next(iter(module.policy.parameters())).grad.fill_(float("inf"))
        return plain(module)

    monkeypatch.setattr(StepModule, "apply_gradients", poisoned)
    with pytest.raises(FloatingPointError, match=r"step 3: 3 optimizer steps in a row.*module.max_skipped=2"):
        small_run(tmp_path, "steps=9", "module.max_skipped=2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)


def test_clipping_bounds_the_update(tmp_path):
    before = dict(small_run(tmp_path / "still", "optimizer.lr=0").policy.named_parameters())
    module = small_run(
        tmp_path / "moved",
        "optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 1.0}",
        "module.max_grad_norm=0.01",
        "~optimizer.betas",
        "~optimizer.weight_decay",
        "~optimizer.fused",
    )
    moved = torch.cat([(p - before[n]).flatten() for n, p in module.policy.named_parameters()]).norm()
    assert module.metrics["optim/grad_norm"] > 0.011
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "schedule, rates",
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.5]), ("cosine", [0.5, 1.0, 1.0, 0.5])],
)
def test_the_learning_rate_follows_its_schedule_once_per_rollout(schedule, rates, tmp_path, monkeypatch):
    seen = []
    plain = StepModule.apply_gradients

    def recording(module):
        seen.append(module.optimizers().param_groups[0]["lr"])
        return plain(module)

    monkeypatch.setattr(StepModule, "apply_gradients", recording)
    small_run(
        tmp_path,
        f"schedule={schedule}",
        "schedule.warmup_steps=2",
        "steps=4",
        "optimizer.lr=1e-3",
        "module.ppo_epochs=2",
    )
    assert seen[::2] == seen[1::2] == pytest.approx([1e-3 * rate for rate in rates])


@pytest.mark.parametrize(
    "function, message",
    [
        ("too_few", "custom"),
        ("not_a_number", "custom"),
        ("raising", "judge is out"),
    ],
)
def test_a_broken_reward_function_ends_the_run_and_is_named(function, message, tmp_path):
    with pytest.raises(RewardError, match=message):
        small_run(tmp_path, f"reward.custom.function._target_=tests.rewards.{function}")
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_rewards_that_do_not_apply_are_left_out(tmp_path, caplog):
    module = small_run(tmp_path / "some", "reward.custom.function._target_=tests.rewards.sometimes", "reward=[custom]")
    assert "reward/custom" in module.metrics
    small_run(
        tmp_path / "none", "reward.custom.function._target_=tests.rewards.never", "reward=[custom]", "loss.kl_coef=0"
    )
    assert "8 completions got None from every reward" in caplog.text
