"""The fast code against the papers' formulas in NumPy float64: values, and gradients by finite differences."""

from functools import partial

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from grpo_lightning import loss
from grpo_lightning.types import Rollout
from tests.support import formulas
from tests.support.composed import CONF, build

TOLERANCE = 1e-6
PROMPTS, GROUP, TOKENS = 3, 4, 9
ROWS = PROMPTS * GROUP


@pytest.fixture(params=[0, 1])
def batch(request):
    """Ragged rows, ratios on both sides of every bound, a group without differences, everything else random."""
    random = np.random.default_rng(request.param)
    lengths = random.integers(1, TOKENS + 1, ROWS)
    lengths[0], lengths[1] = 1, TOKENS
    mask = np.arange(TOKENS) < lengths[:, None]
    logprobs = random.normal(-2.0, 0.8, (ROWS, TOKENS)) * mask
    rewards = random.normal(0.3, 1.0, (PROMPTS, GROUP)).round(3)
    rewards[1] = 0.6
    return {
        "logprobs": logprobs,
        "old_logprobs": (logprobs - random.normal(0.0, 0.5, mask.shape)) * mask,
        "ref_logprobs": (logprobs - random.normal(0.0, 0.5, mask.shape)) * mask,
        "rewards": rewards,
        "mask": mask,
    }


def per_token(batch):
    """log-ratio, advantages and mask."""
    advantages = np.random.default_rng(9).normal(0.0, 1.0, (ROWS, 1)) * batch["mask"]
    return batch["logprobs"] - batch["old_logprobs"], advantages, batch["mask"]


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=TOLERANCE, atol=TOLERANCE)


SURROGATES = {
    "clipped": ("clipped", {"epsilon_low": 0.2, "epsilon_high": 0.28}),
    "dual_clip": ("clipped", {"epsilon_low": 0.2, "epsilon_high": 0.2, "dual_clip": 1.7}),
    "delta": ("clipped", {"epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 1.8}),
    "both": ("clipped", {"epsilon_low": 0.1, "epsilon_high": 0.3, "dual_clip": 1.9, "delta": 1.6}),
    "gspo": ("gspo", {"epsilon_low": 0.1, "epsilon_high": 0.15}),
    "response_clipped": ("response_clipped", {"epsilon_low": 0.3, "epsilon_high": 0.5}),
    "cispo": ("cispo", {"ratio_max": 1.4}),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.7}),
    "gmpo": ("gmpo", {"epsilon_low": 0.4, "epsilon_high": 0.3}),
    "reinforce": ("reinforce", {}),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates(name, batch):
    function, settings = SURROGATES[name]
    log_ratio, advantages, mask = per_token(batch)
    given = torch.tensor(log_ratio, requires_grad=True)
    found, bounded = getattr(loss, function)(given, torch.tensor(advantages), torch.tensor(mask), **settings)
    reference = partial(getattr(formulas, function), advantages=advantages, mask=mask, **settings)
    close(found.detach()[torch.tensor(mask)], reference(log_ratio)[mask])
    if name not in ("sapo", "reinforce"):
        assert 0 < bounded.sum() < mask.sum()
    shares = mask / mask.sum(-1, keepdims=True)  # those that gspo, gmpo and response_clipped are meant for
    (found * torch.tensor(shares)).sum().backward()
    if name == "cispo":
        expected = formulas.cispo_gradient(log_ratio, advantages, mask, **settings) * shares
    else:
        expected = formulas.finite_difference(lambda x: float((reference(x) * shares).sum()), log_ratio)
    close(given.grad, expected)
    flat = {"clipped", "response_clipped"}
    if function in flat:  # where the bound is active, and only there, a token has no gradient
        assert torch.equal(bounded[torch.tensor(mask)], (given.grad == 0)[torch.tensor(mask)])


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_the_gradient_of_a_token_whose_weight_is_held(name, batch):
    function, settings = SURROGATES[name]
    log_ratio, advantages, mask = per_token(batch)
    given = torch.tensor(log_ratio, requires_grad=True)
    found, _ = getattr(loss, function)(given, torch.tensor(advantages), torch.tensor(mask), **settings)
    weights = np.random.default_rng(5).uniform(0.1, 1.0, mask.shape) * mask  # other ones on each token
    (found * torch.tensor(weights)).sum().backward()
    close(given.grad, getattr(formulas, f"{function}_gradient")(log_ratio, advantages, mask, **settings) * weights)


CORRECTIONS = {
    "token_truncation": {"cap": 1.3},
    "token_mask": {"low": 0.7, "high": 1.6},
    "sequence_truncation": {"cap": 1.4},
    "sequence_mask": {"low": 0.4, "high": 2.2},
    "geometric_mask": {"low": 0.8, "high": 1.2},
}


@pytest.mark.parametrize("batch", [1], indirect=True)
@pytest.mark.parametrize("is_only_update", [True, False])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_loss_under_another_sampler(name, is_only_update, batch):
    sampler, mask = batch["old_logprobs"], batch["mask"]
    factor = getattr(formulas, name)(batch["logprobs"] - sampler, mask, **CORRECTIONS[name])
    close(getattr(loss, name)(*map(torch.tensor, (batch["logprobs"] - sampler, mask)), **CORRECTIONS[name]), factor)
    assert len(np.unique(factor[mask])) > 1
    whole = loss.PolicyLoss(
        surrogate=partial(loss.clipped, epsilon_low=0.2, epsilon_high=0.2),
        kl=loss.k3,
        weights=loss.token_mean,
        kl_coef=0.3,
        entropy_coef=0.1,
        correction=partial(getattr(loss, name), **CORRECTIONS[name]),
    )
    advantages, entropy = per_token(batch)[1], np.random.default_rng(3).uniform(0.1, 1.0, mask.shape)
    old = batch["logprobs"] if is_only_update else sampler
    rows = Rollout(
        ids=torch.zeros(ROWS, TOKENS + 1, dtype=torch.long),
        attention_mask=torch.ones(ROWS, TOKENS + 1, dtype=torch.bool),
        **{name: torch.tensor(value) for name, value in zip(RATED, (mask, old, batch["ref_logprobs"], advantages))},
    )
    given, bonus = (torch.tensor(values, requires_grad=True) for values in (batch["logprobs"], entropy))
    of_tokens = whole.correct(given.detach() - torch.tensor(sampler), rows.mask, on_policy=is_only_update)
    value, _ = whole(given, bonus, rows, whole.weights(rows.mask) * of_tokens)
    value.backward()
    held = factor if is_only_update else (factor > 0).astype(float)  # the ratio to the sampler is in the surrogate

    def reference(x, h=entropy):
        settings = {"epsilon": 0.2, "kl_coef": 0.3, "bonus": 0.1}
        return formulas.corrected_loss(x, h, old, batch["ref_logprobs"], advantages, mask, held, **settings)

    close(value.item(), reference(batch["logprobs"]))
    close(given.grad, formulas.finite_difference(reference, batch["logprobs"]))
    close(bonus.grad, formulas.finite_difference(lambda h: reference(batch["logprobs"], h), entropy))


RATED = ("mask", "old_logprobs", "ref_logprobs", "advantages")


PAPERS = {
    "grpo": (formulas.paper_grpo, {"epsilon": 0.2, "kl_coef": 0.04, "eps": 1e-4, "correction": 1}),
    "dr_grpo": (formulas.paper_dr_grpo, {"epsilon": 0.2, "length": 36}),
    "dapo": (formulas.paper_dapo, {"epsilon_low": 0.2, "epsilon_high": 0.28, "eps": 1e-4, "correction": 1}),
    "gspo": (formulas.paper_gspo, {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "eps": 1e-4, "correction": 1}),
    "cispo": (formulas.paper_cispo, {"ratio_max": 5.0, "eps": 1e-4, "correction": 1}),
    "rloo": (formulas.paper_rloo, {"kl_coef": 0.0}),
    "sapo": (formulas.paper_sapo, {"tau_positive": 1.0, "tau_negative": 1.05, "eps": 1e-4, "correction": 1}),
    "gmpo": (formulas.paper_gmpo, {"epsilon_low": 0.4, "epsilon_high": 0.4, "eps": 1e-4, "correction": 1}),
    "reinforce_pp": (formulas.paper_reinforce_pp, {"epsilon": 0.2, "kl_coef": 1e-3, "eps": 1e-4, "correction": 1}),
}


def test_every_preset_has_its_paper_here():
    presets = {path.stem: OmegaConf.load(path).defaults for path in (CONF / "algorithm").glob("*.yaml")}
    assert PAPERS.keys() | {"distillation"} == presets.keys()  # which test_collector.py has by hand
    chosen = {entry["override /loss"] for preset in presets.values() for entry in preset if "override /loss" in entry}
    assert chosen | {"response_ratio"} == {path.stem for path in (CONF / "loss").glob("*.yaml")} - {"base"}


@pytest.mark.parametrize("batch", [1], indirect=True)
@pytest.mark.parametrize("name", PAPERS)
def test_the_composed_objective_is_the_papers(name, batch):
    paper, constants = PAPERS[name]
    parts = build(f"algorithm={name}")
    compare, objective = parts("advantage"), parts("loss")
    given = {key: torch.tensor(value) for key, value in batch.items()}
    logprobs = given["logprobs"].requires_grad_()
    width = torch.zeros(ROWS, 1)
    rows = Rollout(
        ids=torch.zeros(ROWS, TOKENS + 1, dtype=torch.long),
        attention_mask=torch.cat([width == 0, given["mask"]], 1),
        mask=given["mask"],
        old_logprobs=given["old_logprobs"],
        ref_logprobs=given["ref_logprobs"],
        advantages=compare(rewards=given["rewards"]).view(-1, 1) * given["mask"],
    )
    weights = objective.weights(rows.mask)
    total, _ = objective(logprobs, torch.zeros_like(logprobs), rows, weights)
    total.backward()

    def value(x, **more):
        return paper(
            x, batch["old_logprobs"], batch["ref_logprobs"], batch["rewards"], batch["mask"], **constants, **more
        )

    # the weight of CISPO is held while its log pi moves
    held = {"held": batch["logprobs"]} if name == "cispo" else {}
    found = formulas.finite_difference(lambda x: value(x, **held), batch["logprobs"])
    close(-logprobs.grad, found)
    assert np.abs(found).max() > 1e-3
    shift = 0.0
    if name in ("cispo", "rloo"):  # log pi - log pi_old stands for log pi: a constant apart
        shift = value(batch["old_logprobs"], **held)
    close(-total.item(), value(batch["logprobs"], **held) - shift)
