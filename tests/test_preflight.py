"""mode=preflight: its estimates are right, and it leaves nothing behind."""

import json
import math
import random
from typing import Any

import pytest
import torch

import grpo_lightning.preflight as package
from grpo_lightning.preflight import advice, signal_fraction
from grpo_lightning.run import Run
from tests.support.composed import build, composed
from tests.support.running import SMALL

NAN = math.nan


def made(directory, *overrides) -> Any:
    arguments = [*SMALL, f"run_dir={directory}", *overrides]
    return Run(composed(*arguments), build(*arguments), overrides=list(overrides), directory_given=True)


def test_groups_with_signal_by_hand():
    # equal; different; equal but for rounding; one that is unknown differs from nothing; none is known
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.1 + 0.2, 0.3], [-1.0, NAN], [NAN, NAN]]
    assert signal_fraction(torch.tensor(rewards, dtype=torch.float64)) == pytest.approx(1 / 5)


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
    facts = made(tmp_path, *more, "module.ppo_epochs=2", "module.minibatch_size=4").preflight()
    assert (facts["prompts"], facts["group_size"]) == (6, 4)  # two rollouts of three prompts
    assert facts["completions"]["truncated"] > 0.5
    assert facts["completions"]["length_max"] == facts["completions"]["max_new_tokens"] == 4
    assert list(facts["rewards"]) == ["custom", "format", "total"]
    for reward in facts["rewards"].values():
        assert reward["min"] <= reward["mean"] <= reward["max"]
    step = facts["step"]
    assert step["total"] == pytest.approx(sum(step[name] for name in ("rollout", "reward", "score", "update")))
    assert facts["run"] == {"steps": 6, "seconds": pytest.approx(6 * step["total"])}
    assert facts["memory_gib"]["measured"] > 0.05
    text = " ".join(facts["verdict"])
    assert "raise rollout.max_new_tokens=4" in text
    assert "reward format is 0 for all completions: it has no signal." in text
    # all completions count, whatever is trained on and however many prompts a step has
    sampled = made(tmp_path / "some", "rollout=max_variance", "rollout.downsample.size=2", "preflight.prompts=2")
    assert sampled.preflight()["group_size"] == 4
    assert made(tmp_path / "more", "data.prompts_per_step=8", "preflight.prompts=2").preflight()["prompts"] == 2


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


@pytest.mark.slow
def test_a_checkpoint_is_measured_as_it_is(tmp_path):
    made(tmp_path, "steps=2").fit()
    run = made(tmp_path, "steps=5", "mode=preflight", "checkpoint=last", "preflight.prompts=4")
    assert run.preflight()["run"]["steps"] == 3
    assert run.module.completed_steps == 2


ACCURACY = {"none": 0.0, "failed": None, "mean": 0.4, "std": 0.5, "min": 0.0, "max": 1.0}
UNSCORED = ACCURACY | {"none": 1.0, **dict.fromkeys(("mean", "std", "min", "max"))}
LENGTHS = {"length_mean": 20.0, "length_p95": 30.0, "length_max": 32.0, "max_new_tokens": 32, "truncated": 0.05}
FACTS: dict[str, Any] = {
    **{"prompts": 64, "group_size": 8, "outcome": "accuracy", "right": 0.4, "signal": 0.6, "mixed": 0.6},
    "rewards": {"accuracy": ACCURACY},
    "columns": {"accuracy": ["answer"]},
    "completions": LENGTHS,
    "step": {"rollout": 1.0, "reward": 0.1, "score": 0.1, "update": 0.3, "total": 1.5},
    "memory_gib": {"measured": 1.5, "predicted": 1.25},
    "run": {"steps": 100, "seconds": 180.0},
}


def test_advice_names_what_to_change():
    healthy = [
        "60% of the groups of 8 have signal (their rewards differ); 40% are right.",
        "100 steps would take about 3 min.",
    ]
    assert list(advice(FACTS)) == healthy
    for changed, part in (
        ({"right": 0.0}, "No completion is right by accuracy: easier prompts"),
        ({"signal": 0.1, "mixed": 0.1}, "Few groups have signal: easier prompts"),
        ({"right": 0.9, "signal": 0.1, "mixed": 0.1}, "Few groups have signal: harder prompts"),
        ({"signal": 0.9, "mixed": 0.1}, "Only 10% of the groups differ in accuracy"),
        ({"completions": LENGTHS | {"truncated": 0.3}}, "30% of completions are truncated: raise rollout.max_new"),
        ({"completions": LENGTHS | {"truncated": 1.0}}, "rollout.stop=[TEXT]"),
        (
            {"rewards": {"accuracy": UNSCORED}, "right": 0.0},
            "100.0% of completions: look at the columns that it reads (answer)",
        ),
        ({"rewards": {"a": ACCURACY | {"failed": 0.02}}}, "reward a failed on 2.0% of"),
        ({"rewards": {"a": ACCURACY | {"none": 0.25}}}, "reward a is None for 25.0%"),
        ({"rewards": {"a": ACCURACY | {"std": 0.0}}}, "reward a is 0.4 for all completions"),
    ):
        assert sum(part in sentence for sentence in advice(FACTS | changed)) == 1, part
    unscored = " ".join(advice(FACTS | {"rewards": {"accuracy": UNSCORED}, "right": 0.0}))
    assert "easier prompts" not in unscored


def test_an_update_that_does_not_fit_names_what_needs_less(tmp_path):
    run = made(tmp_path, "mode=preflight")

    def too_large(*_, **__):
        raise torch.OutOfMemoryError

    run.module.update = too_large
    with pytest.raises(RuntimeError, match="a smaller module.microbatch_tokens"):
        run.execute()
