"""A reference that follows the policy, by hand and over a restart."""

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.callbacks.reference import ReferenceRefresh
from tests.support.running import small_module, small_run

REFRESHED = ("callbacks=reference_refresh", "optimizer.lr=0.02", "loss.kl_coef=0.5")


@pytest.fixture
def weights(monkeypatch):
    """(policy, reference) before and after every call of the callback."""
    seen = []
    plain = ReferenceRefresh.on_train_batch_end

    def both(module):
        return [
            torch.cat([p.detach().flatten().clone() for p in model.parameters()])
            for model in (module.policy, module.reference)
        ]

    def recording(callback, trainer, module, *rest):
        before = both(module)
        plain(callback, trainer, module, *rest)
        seen.append((before, both(module)))

    monkeypatch.setattr(ReferenceRefresh, "on_train_batch_end", recording)
    return seen


@pytest.mark.slow
def test_a_hard_refresh_makes_the_reference_the_policy(weights, tmp_path):
    module = small_run(tmp_path, *REFRESHED, "callbacks.reference.every=2", "steps=4")
    for step, ((_, before), (policy, after)) in enumerate(weights, 1):
        assert torch.equal(after, policy if step % 2 == 0 else before)
        assert not torch.equal(before, policy)
    assert not any(p.requires_grad for p in module.reference.parameters())


def test_an_average_moves_by_alpha(weights, tmp_path):
    small_run(tmp_path, *REFRESHED, "callbacks.reference.every=1", "callbacks.reference.alpha=0.25", "steps=3")
    for (policy, before), (_, after) in weights:
        assert_close(after, 0.25 * policy + 0.75 * before, rtol=1e-6, atol=1e-7)
        assert (after - before).abs().max() > 1e-4


@pytest.mark.slow
def test_a_continued_run_has_the_reference_it_had(tmp_path):
    overrides = (*REFRESHED, "callbacks.reference.every=2", "callbacks.reference.alpha=0.6")
    whole = small_run(tmp_path / "whole", *overrides, "steps=5")
    small_run(tmp_path / "broken", *overrides, "steps=3")
    continued = small_run(tmp_path / "broken", *overrides, "steps=5", "checkpoint=last")
    for model in ("policy", "reference"):
        for name, parameter in getattr(whole, model).named_parameters():
            assert torch.equal(dict(getattr(continued, model).named_parameters())[name], parameter), name


@pytest.mark.slow
def test_a_reference_that_never_moved_is_no_part_of_a_checkpoint(tmp_path):
    small_run(tmp_path, *REFRESHED, "callbacks.reference.every=9", "steps=2")
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert "ReferenceRefresh" not in saved["callbacks"]


def test_impossible_settings_are_refused():
    for settings in ({"every": 0, "alpha": 1.0}, {"every": 1, "alpha": 0.0}, {"every": 1, "alpha": 1.5}):
        with pytest.raises(ValueError, match="use every >= 1 and 0 < alpha <= 1"):
            ReferenceRefresh(**settings)


def test_without_a_reference_there_is_nothing_to_refresh():
    with pytest.raises(ValueError, match=r"no reference to refresh; set loss.kl_coef or rollout.kl_penalty"):
        ReferenceRefresh(every=1, alpha=1.0).on_fit_start(None, small_module("loss.kl_coef=0"))
