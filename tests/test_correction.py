"""What corrects for a sampler that is not the policy, worked by hand on two completions, and staged.

row  rho = policy / sampler    product   geometric mean
0    1.5   4.0   0.25          1.5       1.1447 = 1.5^(1/3)
1    0.5   1.0   pad           0.5       0.7071 = 0.5^(1/2)
"""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from grpo_lightning import loss
from grpo_lightning.config import config_warnings
from grpo_lightning.distributed.ranks import SINGLE_PROCESS
from grpo_lightning.loss import PolicyLoss, clipped, corrections, k3, mismatch, token_mean
from grpo_lightning.module.update import accumulate
from grpo_lightning.transformer import lm_head
from tests.support.composed import composed
from tests.support.mismatch import NOISE, ragged
from tests.support.running import small_run

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
LOG_RATIO = torch.tensor([[1.5, 4.0, 0.25], [0.5, 1.0, 7.0]]).log()
CHOICES = ["token_truncation", "token_mask", "sequence_truncation", "sequence_mask", "geometric_mask"]
TIGHT = {
    "token_truncation": partial(loss.token_truncation, cap=1.2),
    "token_mask": partial(loss.token_mask, low=0.8, high=1.3),
    "sequence_truncation": partial(loss.sequence_truncation, cap=1.2),
    "sequence_mask": partial(loss.sequence_mask, low=0.7, high=1.6),
    "geometric_mask": partial(loss.geometric_mask, low=0.94, high=1.06),
}
"""Bounds that some of the tokens and completions of `drawn` are beyond."""


def test_what_stands_behind_a_completion_does_not_count():
    for name in CHOICES:
        wide = torch.nn.functional.pad(LOG_RATIO, (0, 2), value=math.nan)
        counts = torch.nn.functional.pad(MASK, (0, 2))
        expected = torch.nn.functional.pad(TIGHT[name](LOG_RATIO, MASK), (0, 2))
        assert torch.equal(TIGHT[name](wide, counts), expected)
        assert not TIGHT[name](LOG_RATIO, torch.zeros_like(MASK)).any()


def test_statistics_by_hand():
    found = mismatch(torch.tensor([[0.5, -1.0, 0.0], [0.25, 0.0, 9.0]]), MASK)
    assert_close(found["mismatch_mean"].item(), 0.5 + 1.0 + 0.25)
    assert_close(found["mismatch_max"].item(), 1.0)
    # e^.5 - 1 - .5, e^-1 - 1 + 1, e^.25 - 1 - .25
    assert_close(found["mismatch_kl"].item(), 0.1487213 + 0.3678794 + 0.0340254, rtol=1e-6, atol=0)
    found = corrections(torch.tensor([[1.5, 0.0, 0.25], [0.5, 0.0, 3.0]]), MASK)
    assert {name: value.item() for name, value in found.items()} == {
        "correction_mean": 2.25,
        "correction_max": 1.5,
        "correction_masked": 2.0,
    }
    sums = {
        "tokens": torch.tensor(5.0),
        **found,
        "mismatch_mean": torch.tensor(10.0),
        "mismatch_max": torch.tensor(4.0),
    }
    logged = PolicyLoss.metrics({}, sums)
    assert {name: round(value.item(), 6) for name, value in logged.items()} == {
        "correction/mean": 0.45,
        "correction/max": 1.5,
        "correction/masked": 0.4,
        "policy/mismatch_mean": 2.0,
        "policy/mismatch_max": 4.0,
    }


@pytest.fixture(scope="module")
def drawn():
    return ragged(torch.float64, 0.2)


def updated(policy, rows, chosen, *, tokens=10**6, on_policy=True, entropy_coef=0.0):
    """The gradient of an optimizer step and its metrics."""
    surrogate = partial(clipped, epsilon_low=0.1, epsilon_high=0.15)
    policy.zero_grad()
    update = accumulate(
        policy,
        PolicyLoss(surrogate, k3, token_mean, 0.3, entropy_coef, chosen),
        rows,
        temperature=1.0,
        microbatch_tokens=tokens,
        skip_dead=True,
        on_policy_step=on_policy,
        is_first=True,
        ranks=SINGLE_PROCESS,
        backward=lambda loss, last: loss.backward(),
    )
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]), update.metrics


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_micro_batches_change_nothing(name, on_policy, drawn):
    whole, metrics = updated(*drawn, TIGHT[name], on_policy=on_policy)
    plain, _ = updated(*drawn, None, on_policy=on_policy)
    if on_policy or name.endswith("mask"):
        assert (whole - plain).abs().max() > 1e-3
    else:  # the ratio to the sampler has it already
        assert torch.equal(whole, plain)
    for tokens in (40, 1):
        parts, same = updated(*drawn, TIGHT[name], tokens=tokens, on_policy=on_policy)
        assert_close(parts, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))
        assert {key: float(value) for key, value in same.items()} == pytest.approx(
            {key: float(value) for key, value in metrics.items()}, rel=1e-5, abs=1e-6
        )
    is_cut = name.endswith("mask")
    assert 0 < metrics["correction/masked"] < 1 if is_cut else metrics["correction/masked"] == 0
    if on_policy:
        assert metrics["correction/max"] == pytest.approx(
            {"token_truncation": 1.2, "sequence_truncation": 1.2, "geometric_mask": 1.0}.get(
                name, metrics["correction/max"]
            )
        )
    assert metrics["policy/mismatch_mean"] == pytest.approx(0.16, abs=0.03)  # .2 sqrt(2 / pi)
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.02, abs=0.006)  # .2^2 / 2


@pytest.mark.parametrize(("name", "on_policy"), [("token_truncation", True), ("token_mask", False)])
def test_the_gradient_made_in_the_head_is_that_of_the_long_way(name, on_policy, monkeypatch):
    passes = []
    plain = lm_head._Gradients.add

    def counting(*arguments):
        passes.append(1)
        return plain(*arguments)

    monkeypatch.setattr(lm_head._Gradients, "add", counting)
    monkeypatch.setattr(lm_head, "CHUNK", 90 * 11)  # about eleven tokens at a time
    policy, rows = ragged(torch.float32, 0.2)
    early, _ = updated(policy, rows, TIGHT[name], on_policy=on_policy)
    # Were the head's gradient not that of the loss, bit for bit, it would have been made a second time.
    count = len(passes)
    passes.clear()
    monkeypatch.setattr(PolicyLoss, "gradient_by_logprobs", lambda *_, **__: None)
    late, _ = updated(policy, rows, TIGHT[name], on_policy=on_policy)
    assert count == len(passes) > 2
    assert_close(early, late, rtol=0, atol=1e-7 * float(late.abs().max()))
    assert early.abs().max() > 1e-3


DISTURBED = ("rollout._target_=tests.support.mismatch.Disturbed", "module.self_check=false")


@pytest.mark.slow
def test_a_run_with_another_sampler(tmp_path):
    plain = small_run(tmp_path / "plain", *DISTURBED, "steps=2")
    assert 0.5 * NOISE < plain.metrics["policy/mismatch_mean"] < 0.8 * NOISE  # 2 / pi of it
    assert 0.9 * NOISE < plain.metrics["policy/mismatch_max"] < 1.0001 * NOISE
    assert plain.metrics["policy/ratio_max"] == 1.0
    assert not any(name.startswith("correction/") for name in plain.metrics)
    module = small_run(tmp_path / "corrected", *DISTURBED, "correction=token_truncation", "correction.cap=1.1")
    assert module.metrics["correction/max"] == pytest.approx(1.1)
    assert 0.8 < module.metrics["correction/mean"] < 1.0
    assert module.metrics["correction/masked"] == 0
    gaps = [(a - b).abs().max() for a, b in zip(plain.policy.parameters(), module.policy.parameters(), strict=True)]
    assert max(gaps) > 1e-5


def test_a_truncation_that_does_nothing_is_told():
    several = ("module.ppo_epochs=2", "correction=token_truncation")
    [told] = config_warnings(composed(*several))
    assert "token_truncation has no effect with several optimizer steps per rollout" in told
    for words in (("module.ppo_epochs=2", "correction=token_mask"), several[1:], several[:1]):
        assert config_warnings(composed(*words)) == []
