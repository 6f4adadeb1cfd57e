"""What an optimizer step is made of: equal under any cut into micro-batches, and safe against bad numbers."""

import json

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.module.base import StepModule
from grpo_lightning.module.update import Update, mean_metrics
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.types import Rollout
from tests.support.composed import CONF, build
from tests.support.mismatch import ragged
from tests.support.running import same, small_module, small_run, weights

ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))


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


def test_gradients_and_metrics_do_not_depend_on_the_microbatch_budget(gradients, tmp_path):
    metrics = [
        small_run(tmp_path / str(tokens), "algorithm=gspo", f"module.microbatch_tokens={tokens}").metrics
        for tokens in (16384, 150, 1)
    ]
    for name in (name for name in metrics[0] if name.startswith(("loss/", "policy/", "optim/", "completion/"))):
        assert [m[name] for m in metrics[1:]] == pytest.approx([metrics[0][name]] * 2, rel=1e-4, abs=1e-6), name
    whole, some, single = gradients
    assert whole.abs().max() > 1e-3
    scale = float(whole.abs().max())
    assert_close(some, whole, rtol=0, atol=1e-6 * max(1.0, scale))
    assert_close(single, whole, rtol=0, atol=1e-6 * max(1.0, scale))


@pytest.fixture(scope="module")
def drawn():
    return ragged(torch.float64, 0.15)


def gradient(policy, loss, rows, *, order=None, pieces=8, left=0, right=0):
    """Of the loss, with the rows in another order, cut into micro-batches, and padded on either side."""
    pad = torch.nn.functional.pad
    padded = {
        name: pad(value, (left if name in ("ids", "attention_mask") else 0, right))
        for name, value in vars(rows).items()
        if isinstance(value, torch.Tensor)
    }
    rows = Rollout(**padded)[torch.arange(8) if order is None else torch.tensor(order)]
    weights = loss.weights(rows.mask)
    policy.zero_grad()
    for index in torch.arange(8).split(pieces):
        part = rows[index]
        logprobs, entropy = policy.logprobs_and_entropy(part, temperature=1.0, entropy=True)
        loss(logprobs, entropy, part, weights[index])[0].backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_do_not_depend_on_order_padding_and_pieces(algorithm, drawn):
    loss = build(f"algorithm={algorithm}", "loss.entropy_coef=0.01")("loss")
    whole = gradient(*drawn[:1], loss, drawn[1])
    assert whole.abs().max() > 1e-3
    tolerance = 1e-6 * float(whole.abs().max())
    for changed in (
        {"order": [7, 2, 5, 0, 3, 6, 1, 4]},
        {"pieces": 3},
        {"pieces": 1},
        {"left": 4, "right": 6},
        {"order": [3, 1, 0, 2, 7, 6, 5, 4], "pieces": 2, "left": 1, "right": 2},
    ):
        assert_close(gradient(*drawn[:1], loss, drawn[1], **changed), whole, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_completions_that_teach_nothing_are_left_out_at_no_cost(algorithm, gradients, tmp_path, monkeypatch):
    scored = []
    plain = HFPolicy.logprobs_and_entropy

    def counting(policy, rows, **arguments):
        scored.append(len(rows))
        return plain(policy, rows, **arguments)

    monkeypatch.setattr(HFPolicy, "logprobs_and_entropy", counting)
    overrides = [
        f"algorithm={algorithm}",
        "reward.custom.function._target_=tests.support.rewards.second_half",
        "reward=[custom]",
    ]
    overrides += ["~reward.soft_overlong"] if algorithm == "dapo" else []
    overrides += ["module.self_check=false", "module.microbatch_tokens=60"]
    small_run(tmp_path / "all", *overrides, "module.skip_dead=false")
    everything = sum(scored)
    scored.clear()
    small_run(tmp_path / "some", *overrides)
    assert gradients[0].abs().max() > 1e-4
    assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6 * max(1.0, float(gradients[0].abs().max())))
    # of two groups of four one is dead; with a KL term every completion has a gradient
    has_reference = algorithm in ("grpo", "reinforce_pp")
    assert sum(scored) == everything - (0 if has_reference or algorithm == "dapo" else 4)


def test_a_rollout_without_any_difference_moves_the_weights_by_momentum_only(gradients, tmp_path):
    overrides = ["algorithm=dr_grpo", "reward.custom.function._target_=tests.support.rewards.same", "reward=[custom]"]
    module = small_run(tmp_path, *overrides)
    assert gradients[0].count_nonzero() == 0
    assert module.metrics["optim/skipped"] == 0
    assert {int(state["step"]) for state in module.trainer.optimizers[0].state.values()} == {1}


@pytest.fixture
def steps(monkeypatch):
    """The metrics of every training step, in order."""
    found = []
    plain = StepModule.complete_step

    def recording(module, values):
        found.append({name: float(value) for name, value in values.items()})
        return plain(module, values)

    monkeypatch.setattr(StepModule, "complete_step", recording)
    return found


CARRYING = (
    *("algorithm=dapo", "~reward.soft_overlong", "reward=[custom]", "data.prompts_per_step=3", "optimizer.lr=0.02"),
    "reward.custom.function._target_=tests.support.rewards.every_other_prompt",
)


@pytest.mark.slow
def test_groups_carried_over_are_trained_on_off_policy_and_kept_by_a_continued_run(steps, tmp_path):
    whole = small_run(tmp_path / "whole", *CARRYING, "steps=6")
    unbroken = list(steps)
    carried = [step for step in steps if step["group/carried"] > 0]
    fresh = [step for step in steps if step["group/carried"] == 0]
    assert carried
    assert fresh
    assert all(abs(step["policy/ratio_max"] - 1) > 1e-3 for step in carried)
    assert all(step["policy/ratio_max"] == step["policy/ratio_mean"] == 1.0 for step in fresh)
    last = next(number for number, step in enumerate(unbroken) if step["group/carried"] > 0)
    steps.clear()
    small_run(tmp_path / "broken", *CARRYING, f"steps={last}")
    continued = small_run(tmp_path / "broken", *CARRYING, "steps=6", "checkpoint=last")
    for name, parameter in whole.policy.named_parameters():
        assert torch.equal(dict(continued.policy.named_parameters())[name], parameter)
    timed = ("time/", "perf/")
    assert [{k: v for k, v in step.items() if not k.startswith(timed)} for step in steps] == [
        {k: v for k, v in step.items() if not k.startswith(timed)} for step in unbroken
    ]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A module after two steps of the default, and the seeds with which it was asked to sample."""
    seeds, plain = [], NativeSampler.generate

    def recording(*where, **arguments):
        seeds.append(arguments["seed"])
        return plain(*where, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeSampler, "generate", recording)
        words = ("steps=2", "optimizer.lr=0.01", "validation.every=1")
        return small_run(tmp_path_factory.mktemp("two_steps"), *words), seeds


def test_a_single_update_is_exactly_on_policy(two_steps):
    metrics = two_steps[0].metrics
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0
    assert abs(metrics["loss/policy"]) < 1e-6


def test_the_reference_is_no_part_of_the_module_and_never_moves(two_steps):
    module = two_steps[0]
    assert not any("reference" in name for name in module.state_dict())
    start = dict(small_module().policy.named_parameters())
    for name, parameter in module.reference.named_parameters():
        assert torch.equal(parameter, start[name])
        assert not parameter.requires_grad
    assert module.metrics["policy/kl_divergence"] > 0


def test_every_rollout_has_random_numbers_of_its_own_and_every_validation_the_same(two_steps):
    validation, rollout, again, second, last = two_steps[1]
    assert validation == again == last
    assert len({validation, rollout, second}) == 3


def test_several_minibatches_move_the_ratio_use_every_row_each_epoch_and_need_no_reference(gradients, tmp_path):
    module = small_run(
        tmp_path, "module.ppo_epochs=3", "module.minibatch_size=4", "optimizer.lr=0.05", "loss.kl_coef=0"
    )
    assert len(gradients) == 6  # 3 epochs x 8 completions / 4
    assert module.metrics["policy/ratio_max"] > 1.05
    assert module.metrics["policy/mismatch_max"] < 1e-4  # of the first update, where the policy is the sampler's
    assert module.metrics["policy/clip_fraction"] > 0
    assert module.completed_steps == 1
    assert module.trainer.global_step == 6
    assert module.reference is None
    assert "policy/kl_divergence" not in module.metrics


def test_the_first_of_several_updates_has_the_gradient_of_a_single_one(gradients, tmp_path):
    small_run(tmp_path / "one", "loss.kl_coef=0")
    two = small_run(tmp_path / "two", "loss.kl_coef=0", "module.ppo_epochs=2")
    assert two.metrics["policy/ratio_max"] > 1.001  # the second update is measured against the sampler
    assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)  # old log-probabilities by the sampler
    assert (gradients[2] - gradients[0]).abs().max() > 1e-4


def test_what_is_trained_is_scored_at_the_temperature_it_was_sampled_at(tmp_path):
    module = small_run(
        tmp_path, "rollout.temperature=0.5", "module.ppo_epochs=2", "optimizer.lr=0", "policy.hidden_size=32"
    )
    assert module.metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_metrics_of_several_updates_are_averaged_and_of_maxima_the_largest_counts():
    updates = [
        Update(metrics={"a": torch.tensor(a), "b_max": torch.tensor(b)}, ratio=torch.ones(0), flops=0.0)
        for a, b in ((1.0, 5.0), (4.0, 3.0))
    ]
    assert mean_metrics(updates) == {"a": 2.5, "b_max": 5.0}


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


def test_a_policy_learns_from_a_teacher_that_it_is_not_and_continues_exactly(tmp_path):
    one, other = (
        small_run(tmp_path / str(seed), "steps=0", f"seed={seed}") and tmp_path / f"{seed}/export" for seed in (0, 1)
    )

    def distilled(name, teacher, *words):
        settings = ["algorithm=distillation", "policy=hf", f"policy.path={one}", f"reference.path={teacher}"]
        return small_run(tmp_path / name, *settings, *words)

    assert distilled("by_itself", one).metrics["optim/grad_norm"] == pytest.approx(0, abs=1e-6)
    whole = distilled("whole", other, "steps=3")
    assert whole.metrics["optim/grad_norm"] > 1e-3
    distilled("broken", other, "steps=2")
    assert same(weights(distilled("broken", other, "steps=3", "checkpoint=last")), weights(whole))


@pytest.mark.slow
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
    before = dict(small_module().policy.named_parameters())
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


def test_the_learning_rate_follows_its_schedule_once_per_rollout(tmp_path, monkeypatch):
    seen = []
    plain = StepModule.apply_gradients

    def recording(module):
        seen.append(module.optimizers().param_groups[0]["lr"])
        return plain(module)

    monkeypatch.setattr(StepModule, "apply_gradients", recording)
    small_run(
        tmp_path, "schedule=linear", "schedule.warmup_steps=2", "steps=4", "optimizer.lr=1e-3", "module.ppo_epochs=2"
    )
    assert seen[::2] == seen[1::2] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])
