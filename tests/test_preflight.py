"""mode=preflight: its estimates are right, and it leaves nothing behind."""

import itertools
import json
import math
import random
from typing import Any

import pytest
import torch

import grpo_lightning.preflight as package
from grpo_lightning.config import ConfigError
from grpo_lightning.preflight import advice, page, signal_share
from grpo_lightning.run import Run
from tests.support.composed import build, composed
from tests.support.running import SMALL

NAN = math.nan


def made(directory, *overrides) -> Any:
    arguments = [*SMALL, f"run_dir={directory}", *overrides]
    return Run(composed(*arguments), build(*arguments), overrides=list(overrides), directory_given=True)


def test_shares_by_hand():
    for rewards, size, expected in (
        ([[1, 1, 0, 0]], 2, 4 / 6),  # of six pairs two are equal
        ([[1, 1, 1, 0]], 3, 3 / 4),  # of four triples one is equal
        ([[1, NAN, 0, 0]], 2, 2 / 6),  # 1 differs from each 0; the unknown one from nothing
        ([[NAN] * 4], 2, 0.0),
        ([[0.1 + 0.2, 0.3]], 2, 0.0),  # equal but for rounding
        ([[1, 1, 0, 0], [1, 1, 1, 1]], 2, 2 / 6),  # the mean over prompts
    ):
        share = signal_share(torch.tensor(rewards, dtype=torch.float64), size)
        assert share == pytest.approx(expected, abs=1e-12)


def test_up_to_the_sampled_size_it_is_the_mean_over_all_subsets():
    draw = random.Random(0)
    for _ in range(40):
        row = [draw.choice([0.0, 0.5, 1.0, NAN]) for _ in range(7)]
        for size in (2, 3, 5, 7):
            subsets = list(itertools.combinations(row, size))
            differing = sum(len({value for value in subset if value == value}) > 1 for subset in subsets)
            share = signal_share(torch.tensor([row]), size)
            assert share == pytest.approx(differing / len(subsets), abs=1e-9)


def test_beyond_the_sampled_size_prompts_differ_by_a_beta_distribution():
    generator = torch.Generator().manual_seed(0)
    # p ~ Beta(1/2, 1/2) is the squared sine of an angle drawn evenly
    rate = (torch.rand(4000, 1, generator=generator) * math.pi / 2).sin() ** 2
    rewards = (torch.rand(4000, 8, generator=generator) < rate).float()
    beta = math.lgamma(32.5) + math.lgamma(0.5) - math.lgamma(33) - 2 * math.lgamma(0.5)
    assert signal_share(rewards, 32) == pytest.approx(1 - 2 * math.exp(beta), abs=0.01)  # 0.80
    independent = 1 - (rewards.mean() ** 32 + (1 - rewards.mean()) ** 32)
    assert independent > 0.99  # what one rate for all prompts would promise
    same = (torch.rand(4000, 4, generator=generator) < 0.9).float()
    assert signal_share(same, 16) == pytest.approx(1 - 0.9**16, abs=0.01)  # 0.81
    assert signal_share(torch.tensor([[1.0, 1.0], [0.0, 0.0]] * 20), 32) < 0.01  # certain of each


WORDS = ("data.prompts_per_step=16", "rollout.threshold=0.32", "reward=[custom]", "data.train_size=2000")
"""With it about a tenth of a random policy's completions are right."""


@pytest.mark.slow
def test_a_real_run_has_the_share_that_was_predicted(tmp_path):
    facts = made(tmp_path / "preflight", *WORDS, "rollout.group_size=8", "preflight.prompts=64").preflight()
    assert facts["prompts"] == 64
    assert 0.02 < facts["right"] < 0.3
    for size in (4, 8, 16, 32):
        run = made(
            tmp_path / str(size),
            *WORDS,
            f"rollout.group_size={size}",
            "steps=4",
            "seed=1",  # other prompts and completions
            "optimizer.lr=0",
            "validation.every=100",
            "~callbacks.export",
            "logger=none",
        )
        shares = []
        fit_step = run.module.training_step

        def counted(prompts, run=run, shares=shares, fit_step=fit_step):
            scored = fit_step(prompts)["scored"]
            right = scored.right.view(len(prompts), -1).float().mean(-1)
            shares.append(((right > 0) & (right < 1)).float().mean().item())

        run.module.training_step = counted
        run.fit()
        predicted, seen = facts["groups"][str(size)]["mixed"], sum(shares) / len(shares)
        # three standard deviations of the run's share and of the prediction's, each of 64 prompts
        assert abs(predicted - seen) < 3 * math.sqrt(2 * predicted * (1 - predicted) / 64) + 1e-9, (size, seen)


@pytest.mark.slow
def test_it_leaves_nothing_that_a_run_could_notice(tmp_path, monkeypatch):
    measure = package.measure

    def drawing(*given, **more):
        random.random(), torch.rand(1)  # as a policy or a reward may
        return measure(*given, **more)

    monkeypatch.setattr(package, "measure", drawing)
    run = made(tmp_path, "steps=2", "loss.kl_coef=0.1", "preflight.prompts=4", "module.minibatch_size=4")
    before = {name: value.clone() for name, value in run.module.state_dict().items()}
    states = (torch.get_rng_state(), random.getstate())
    facts = run.preflight()
    assert all(torch.equal(before[name], value) for name, value in run.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(parameter.grad is None for parameter in run.module.parameters())
    assert run.module.completed_steps == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["preflight.json", "summary_preflight.json"]
    assert json.loads((tmp_path / "preflight.json").read_text()) == facts
    assert json.loads((tmp_path / "summary_preflight.json").read_text())["status"] == "finished"

    run.fit()  # the same objects, in the same directory
    alone = made(tmp_path / "alone", "steps=2", "loss.kl_coef=0.1", "module.minibatch_size=4")
    alone.fit()
    assert all(torch.equal(value, run.module.state_dict()[name]) for name, value in alone.module.state_dict().items())
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_facts_follow_the_settings(tmp_path):
    more = ("preflight.prompts=5", "data.prompts_per_step=3", "rollout.max_new_tokens=4", "rollout.stop=[]", "steps=6")
    facts = made(tmp_path, *more, "module.ppo_epochs=2", "module.minibatch_size=4", "validation.every=4").preflight()
    assert (facts["prompts"], facts["group_size"]) == (6, 4)  # two rollouts of three prompts
    assert facts["completions"]["truncated"] > 0.5
    assert facts["completions"]["length_max"] == facts["completions"]["max_new_tokens"] == 4
    assert sorted(facts["groups"], key=int) == ["4", "8", "16", "32"]
    assert list(facts["rewards"]) == ["custom", "format", "total"]
    for reward in facts["rewards"].values():
        assert reward["min"] <= reward["mean"] <= reward["max"]
    run, step = facts["run"], facts["step"]
    assert (run["steps"], run["validations"]) == (6, 3)  # before, after 4 and 6
    assert step["total"] == pytest.approx(sum(step[name] for name in ("rollout", "reward", "score", "update")))
    assert run["seconds"] == pytest.approx(6 * step["total"] + 3 * run["validation_seconds"])
    assert facts["memory_gib"]["measured"] > 0.05
    text = " ".join(facts["verdict"])
    assert "raise rollout.max_new_tokens=4" in text
    assert "reward format is 0 for all completions: it has no signal." in text


@pytest.mark.slow
def test_what_an_environment_takes_is_part_of_sampling(tmp_path):
    environment = ("environment=custom", "environment.function._target_=tests.support.games.slow")
    own = [word for word in SMALL if not word.startswith("reward")]
    more = ("environment.max_turns=2", "rollout.max_new_tokens=60", "preflight.prompts=2")
    arguments = [*own, *environment, "reward=[environment]", *more, f"run_dir={tmp_path}"]
    facts: Any = Run(composed(*arguments), build(*arguments), overrides=arguments, directory_given=True).preflight()
    # Of 2 prompts with 4 completions each, that have 1 or 2 turns; all but a few end before the limit.
    assert facts["step"]["rollout"] > 6 * 0.05
    assert facts["completions"]["truncated"] > 0.5
    assert "rollout.max_new_tokens=60, or environment.max_turns=2 if episodes" in " ".join(facts["verdict"])
    assert "truncated at rollout.max_new_tokens or environment.max_turns" in "\n".join(page(facts))


@pytest.mark.slow
def test_a_checkpoint_is_measured_as_it_is(tmp_path):
    made(tmp_path, "steps=2").fit()
    run = made(tmp_path, "steps=5", "mode=preflight", "checkpoint=last", "preflight.prompts=4")
    assert run.preflight()["run"]["steps"] == 3
    assert run.module.completed_steps == 2


def test_what_it_cannot_do_is_refused_early(tmp_path):
    for more, message in ((["preflight.prompts=0"], r"preflight.prompts=0: must be an integer >= 1"),):
        with pytest.raises(ConfigError, match=message):
            made(tmp_path, "mode=preflight", *more)


def group(signal, mixed, seconds):
    return {"signal": signal, "mixed": mixed, "seconds": seconds}


ACCURACY = {"none": 0.0, "failed": None, "mean": 0.4, "std": 0.5, "min": 0.0, "max": 1.0}
LENGTHS = {"length_mean": 20.0, "length_p95": 30.0, "length_max": 32.0, "max_new_tokens": 32, "truncated": 0.05}
FACTS: dict[str, Any] = {
    "prompts": 64,
    "group_size": 8,
    "outcome": "accuracy",
    "right": 0.4,
    "rewards": {"accuracy": ACCURACY},
    "completions": LENGTHS,
    "groups": {"4": group(0.4, 0.4, 1.0), "8": group(0.6, 0.6, 1.5)},
    "pays": 8,
    "step": {"rollout": 1.0, "reward": 0.1, "score": 0.1, "update": 0.3, "total": 1.5},
    "memory_gib": {"measured": 1.5, "predicted": 1.25},
    "run": {"steps": 100, "validations": 3, "validation_seconds": 10.0, "seconds": 180.0},
}


def test_advice_names_what_to_change():
    healthy = [
        "60% of the groups of 8 have signal (their rewards differ); 40% are right.",
        "100 steps would take about 3 min.",
    ]
    assert list(advice(FACTS)) == healthy
    groups = FACTS["groups"]
    for changed, part in (
        ({"right": 0.0}, "No completion is right by accuracy: easier prompts"),
        ({"groups": groups | {"8": group(0.1, 0.1, 1.5)}}, "Few groups have signal: easier prompts"),
        ({"right": 0.9, "groups": {"8": group(0.1, 0.1, 1.5)}}, "Few groups have signal: harder prompts"),
        ({"groups": groups | {"8": group(0.9, 0.1, 1.5)}}, "Only 10% of the groups differ in accuracy"),
        ({"pays": 4}, "rollout.group_size=4 pays: 40% of its groups have signal, a step takes 1 s instead of 1.5 s."),
        ({"completions": LENGTHS | {"truncated": 0.3}}, "30% of completions are truncated: raise rollout.max_new"),
        ({"rewards": {"a": ACCURACY | {"failed": 0.02}}}, "reward a failed on 2.0% of"),
        ({"rewards": {"a": ACCURACY | {"none": 0.25}}}, "reward a is None for 25.0%"),
        ({"rewards": {"a": ACCURACY | {"std": 0.0}}}, "reward a is 0.4 for all completions"),
    ):
        assert sum(part in sentence for sentence in advice(FACTS | changed)) == 1, part


def test_the_page_fits_into_80_columns():
    wide = {"mean": -1234.56, "std": 0.00123, "min": -1234.5, "max": -0.00123, "none": 1.0, "failed": 0.123}
    lines = list(page(FACTS | {"rewards": {"a_reward_with_a_rather_long_name": wide, "accuracy": ACCURACY}}))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "reward/accuracy: None 0.0%\n              mean 0.4 ± 0.5, from 0 to 1\n" in text
    assert "         8       60%               60%      1.50   now, pays\n" in text


def test_all_completions_count_whatever_is_trained_on_and_however_many_prompts_a_step_has(tmp_path):
    facts = made(tmp_path, "rollout=max_variance", "rollout.downsample.size=2", "preflight.prompts=2").preflight()
    assert facts["group_size"] == 4
    facts = made(tmp_path / "more", "data.prompts_per_step=8", "preflight.prompts=2").preflight()
    assert facts["prompts"] == 2
    step = facts["step"]
    assert facts["groups"]["4"]["seconds"] == pytest.approx(step["total"])
    # 4 held-out prompts x 4 samples, and 8 x 4 completions of a step
    assert facts["run"]["validation_seconds"] == pytest.approx((step["rollout"] + step["reward"]) * 16 / 32)


def test_an_update_that_does_not_fit_names_what_needs_less(tmp_path):
    run = made(tmp_path, "mode=preflight")

    def too_large(*_, **__):
        raise torch.OutOfMemoryError

    run.module.update = too_large
    with pytest.raises(RuntimeError, match="a smaller module.microbatch_tokens"):
        run.execute()
