"""mode=preflight: its estimates are right, and it leaves nothing behind."""

import itertools
import json
import math
import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.config import ConfigError, check_config
from grpo_lightning.preflight.groups import teaching_share
from grpo_lightning.preflight.look import best_size, look, step_seconds
from grpo_lightning.preflight.verdict import page, verdict
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
        share = teaching_share(torch.tensor(rewards, dtype=torch.float64), size)
        assert share == pytest.approx(expected, abs=1e-12)


def test_up_to_the_sampled_size_it_is_the_mean_over_all_subsets():
    draw = random.Random(0)
    for _ in range(40):
        row = [draw.choice([0.0, 0.5, 1.0, NAN]) for _ in range(7)]
        for size in (2, 3, 5, 7):
            subsets = list(itertools.combinations(row, size))
            differing = sum(len({value for value in subset if value == value}) > 1 for subset in subsets)
            share = teaching_share(torch.tensor([row]), size)
            assert share == pytest.approx(differing / len(subsets), abs=1e-9)


def test_beyond_the_sampled_size_prompts_differ_by_a_beta_distribution():
    generator = torch.Generator().manual_seed(0)
    # p ~ Beta(1/2, 1/2) is the squared sine of an angle drawn evenly
    rate = (torch.rand(4000, 1, generator=generator) * math.pi / 2).sin() ** 2
    rewards = (torch.rand(4000, 8, generator=generator) < rate).float()
    beta = math.lgamma(32.5) + math.lgamma(0.5) - math.lgamma(33) - 2 * math.lgamma(0.5)
    assert teaching_share(rewards, 32) == pytest.approx(1 - 2 * math.exp(beta), abs=0.01)  # 0.80
    independent = 1 - (rewards.mean() ** 32 + (1 - rewards.mean()) ** 32)
    assert independent > 0.99  # what one rate for all prompts would promise
    same = (torch.rand(4000, 4, generator=generator) < 0.9).float()
    assert teaching_share(same, 16) == pytest.approx(1 - 0.9**16, abs=0.01)  # 0.81
    assert teaching_share(torch.tensor([[1.0, 1.0], [0.0, 0.0]] * 20), 32) < 0.01  # certain of each


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

        def noted(prompts, run=run, shares=shares, fit_step=fit_step):
            scored = fit_step(prompts)["scored"]
            right = scored.right.view(len(prompts), -1).float().mean(-1)
            shares.append(((right > 0) & (right < 1)).float().mean().item())

        run.module.training_step = noted
        run.fit()
        predicted, seen = facts["groups"][str(size)]["mixed"], sum(shares) / len(shares)
        # three standard deviations of the run's share and of the prediction's, each of 64 prompts
        assert abs(predicted - seen) < 3 * math.sqrt(2 * predicted * (1 - predicted) / 64) + 1e-9, (size, seen)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.slow
def test_it_leaves_nothing_that_a_run_could_notice(tmp_path, monkeypatch):
    def drawing(*given, **more):
        random.random(), torch.rand(1)  # as a policy or a reward may
        return look(*given, **more)

    monkeypatch.setattr(import_module("grpo_lightning.preflight.conduct"), "look", drawing)
    run = made(tmp_path, "steps=2", "loss.kl_coef=0.1", "preflight.prompts=4")
    before, drawn = weights(run.module), (torch.get_rng_state(), random.getstate())
    facts = run.preflight()
    assert all(torch.equal(before[name], value) for name, value in run.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert all(parameter.grad is None for parameter in run.module.parameters())
    assert run.module.completed_steps == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["preflight.json", "summary_preflight.json"]
    assert json.loads((tmp_path / "preflight.json").read_text()) == facts
    assert json.loads((tmp_path / "summary_preflight.json").read_text())["status"] == "finished"

    run.fit()  # the same objects, in the same directory
    alone = made(tmp_path / "alone", "steps=2", "loss.kl_coef=0.1")
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
    assert (facts["run"]["steps"], facts["run"]["validations"]) == (6, 3)  # before, after 4 and 6
    step = facts["step"]
    assert step["total"] == pytest.approx(
        sum(step[name] for name in ("rollout", "reward", "score", "update")), rel=1e-4
    )
    assert facts["run"]["seconds"] == pytest.approx(
        6 * step["total"] + 3 * facts["run"]["validation_seconds"], rel=1e-4
    )
    assert facts["memory_gib"]["measured"] > 0.05
    said = " ".join(facts["verdict"])
    assert "raise rollout.max_new_tokens=4" in said
    assert "reward format is 0 for all completions: it teaches nothing." in said


@pytest.mark.slow
def test_what_an_environment_takes_is_part_of_sampling(tmp_path):
    environment = (
        "environment=custom",
        "environment.function._target_=tests.support.games.slow",
        "reward=[environment]",
    )
    own = [word for word in SMALL if not word.startswith("reward")]
    more = ("environment.max_turns=2", "rollout.max_new_tokens=60", "preflight.prompts=2")
    arguments = [*own, *environment, *more, f"run_dir={tmp_path}"]
    facts: Any = Run(composed(*arguments), build(*arguments), overrides=arguments, directory_given=True).preflight()
    # Of 2 prompts with 4 completions each, that have 1 or 2 turns; all but a few end before the limit.
    assert facts["step"]["rollout"] > 6 * 0.05
    assert facts["completions"]["truncated"] > 0.5
    said = " ".join(facts["verdict"])
    assert "raise rollout.max_new_tokens=60, or environment.max_turns=2 if episodes" in said
    assert "cut at rollout.max_new_tokens or environment.max_turns" in "\n".join(page(facts))


@pytest.mark.slow
def test_a_checkpoint_is_looked_at_as_it_is(tmp_path):
    made(tmp_path, "steps=2").fit()
    run = made(tmp_path, "steps=5", "mode=preflight", "checkpoint=last", "preflight.prompts=4")
    assert run.preflight()["run"]["steps"] == 3
    assert run.module.completed_steps == 2


@pytest.mark.parametrize(
    "more, said",
    [
        (["preflight.prompts=0"], r"preflight.prompts=0: allowed is an integer >= 1"),
        (["schedule=linear", "schedule.warmup_steps=9"], r"schedule.warmup_steps=9: allowed is at most steps=1"),
    ],
)
def test_what_it_cannot_do_is_refused_early(tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, "mode=preflight", *more)


def test_supervised_training_has_no_preflight(tmp_path):
    config = composed("module=sft", "data=demonstrations", "data.path=x.jsonl", "mode=preflight", f"run_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"mode=preflight: allowed with module=sft are fit, validate and export"):
        check_config(config)


def group(teaching, mixed, seconds, size):
    return {"teaching": teaching, "mixed": mixed, "seconds": seconds, "teaching_per_second": teaching * size / seconds}


FACTS: dict[str, Any] = {
    "prompts": 64,
    "group_size": 8,
    "outcome": "accuracy",
    "right": 0.4,
    "rewards": {"accuracy": {"none": 0.0, "failed": None, "mean": 0.4, "std": 0.5, "min": 0.0, "max": 1.0}},
    "completions": {
        "length_mean": 20.0,
        "length_p95": 30.0,
        "length_max": 32.0,
        "max_new_tokens": 32,
        "truncated": 0.05,
    },
    "groups": {"4": group(0.4, 0.4, 1.0, 4), "8": group(0.6, 0.6, 1.5, 8)},
    "pays": 8,
    "step": {"rollout": 1.0, "reward": 0.1, "score": 0.1, "update": 0.3, "total": 1.5},
    "memory_gib": {"measured": 1.5, "predicted": 1.25},
    "run": {"steps": 100, "validations": 3, "validation_seconds": 10.0, "seconds": 180.0},
}


def changed(**more):
    return {**FACTS, **more}


def test_a_healthy_verdict_is_two_sentences():
    assert verdict(FACTS) == [
        "60% of the groups of 8 teach: their rewards differ; 40% of completions are right.",
        "100 steps would take about 3 min.",
    ]


def test_verdicts_name_what_to_change():
    for facts, said in (
        (changed(right=0.0), "No completion is right by accuracy: easier prompts"),
        (changed(groups=FACTS["groups"] | {"8": group(0.1, 0.1, 1.5, 8)}), "Few groups teach: easier prompts"),
        (changed(right=0.9, groups={"8": group(0.1, 0.1, 1.5, 8)}), "Few groups teach: harder prompts"),
        (changed(groups=FACTS["groups"] | {"8": group(0.9, 0.1, 1.5, 8)}), "Only 10% of the groups differ in accuracy"),
        (
            changed(pays=4),
            "rollout.group_size=4 would do: 40% of its groups teach, and a step takes 1 s instead of 1.5 s.",
        ),
        (changed(group_size=4, pays=8), "rollout.group_size=8 pays: 60% of its groups would teach, and 3.2 "),
        (changed(completions=FACTS["completions"] | {"truncated": 0.3}), "cut in 30% of cases: raise rollout.max_new"),
        (changed(rewards={"a": FACTS["rewards"]["accuracy"] | {"failed": 0.02}}), "reward a failed on 2.0% of"),
        (changed(rewards={"a": FACTS["rewards"]["accuracy"] | {"none": 0.25}}), "says nothing (None) of 25.0%"),
        (changed(rewards={"a": FACTS["rewards"]["accuracy"] | {"std": 0.0}}), "reward a is 0.4 for all completions"),
    ):
        assert sum(said in sentence for sentence in verdict(facts)) == 1
        assert not any(said in sentence for sentence in verdict(FACTS))


def test_the_page_fits_into_80_columns():
    wide = FACTS["rewards"]["accuracy"] | {
        "mean": -1234.56,
        "std": 0.00123,
        "min": -1234.5,
        "max": -0.00123,
        "none": 1.0,
    }
    wide["failed"] = 0.123
    lines = page(changed(rewards={"a_reward_with_a_rather_long_name": wide, **FACTS["rewards"]}))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "reward/accuracy: None 0.0%\n              mean 0.4 ± 0.5, from 0 to 1\n" in text
    assert "         4       40%               40%      1.00            1.6\n" in text
    assert "         8       60%               60%      1.50            3.2   now, pays\n" in text
    assert "the run       100 steps and 3 validations: about 3 min" in text


def test_collecting_has_a_fixed_part_and_an_update_has_none():
    # groups of 2 took 1.4 s and groups of 8 2.0 s: 0.1 s for each member and 1.2 s for any
    phases = {"rollout": 1.5, "reward": 0.2, "score": 0.3, "update": 1.0}
    measured: Any = SimpleNamespace(scored=SimpleNamespace(group_size=8), phases=phases, small_group=(2, 1.4))
    assert step_seconds(measured, 8) == pytest.approx(3.0)
    assert step_seconds(measured, 16) == pytest.approx(1.2 + 1.6 + 2.0)
    measured.small_group = None
    assert step_seconds(measured, 16) == pytest.approx(6.0)


def test_the_smallest_size_that_does_pays():
    def sizes(*rates):
        return {str(4 * 2**i): {"teaching_per_second": rate} for i, rate in enumerate(rates)}

    assert best_size(sizes(10.0, 15.9, 20.0)) == 16
    assert best_size(sizes(10.0, 16.0, 20.0)) == 8  # four fifths of the most
    assert best_size(sizes(0.0, 0.0)) is None


def test_all_completions_are_looked_at_whatever_is_trained_on(tmp_path):
    facts = made(tmp_path, "rollout=max_variance", "rollout.downsample.size=2", "preflight.prompts=2").preflight()
    assert facts["group_size"] == 4


def test_a_step_of_more_prompts_than_were_asked_takes_longer(tmp_path):
    facts = made(tmp_path, "data.prompts_per_step=8", "preflight.prompts=2").preflight()
    assert facts["prompts"] == 2
    assert facts["groups"]["4"]["seconds"] == pytest.approx(facts["step"]["total"], rel=1e-4)
    assert facts["run"]["validation_seconds"] == pytest.approx(
        # 4 held-out prompts x 4 samples, and 8 x 4 completions of a step
        (facts["step"]["rollout"] + facts["step"]["reward"]) * 16 / 32,
        rel=1e-4,
    )


def test_an_update_that_does_not_fit_names_what_needs_less(tmp_path, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(import_module("grpo_lightning.preflight.measure"), "_update", too_large)
    with pytest.raises(RuntimeError, match="a smaller module.microbatch_tokens"):
        made(tmp_path, "mode=preflight").execute()
