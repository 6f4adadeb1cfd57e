"""What holds for every engine, shown on a stand-in for vLLM; tests/vllm has the real one."""

import copy
import os
import random
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from grpo_lightning.config import ConfigError, check_config
from grpo_lightning.sampler.vllm.colocated import VLLM
from tests.support import stand_in
from tests.support.composed import composed
from tests.support.episodes import FakeResponder, chatty
from tests.support.running import small_run
from tests.support.sampling import generate
from tests.vllm.support import PROMPTS, disturb, engine, gap, ready, sample, sampling, tiny

NAMES = {*dict(tiny().model.named_parameters()), "lm_head.weight"}
"""Of the shipped policy, whose head is tied to its embedding."""


@pytest.fixture
def vllm(monkeypatch):
    stand_in.install(monkeypatch)
    return engine()


def problems(*overrides):
    try:
        check_config(composed(*overrides))
    except ConfigError as error:
        return error.problems
    return ()


def test_an_engine_draws_from_the_distribution_that_is_trained(vllm):
    policy = tiny()
    for version in (0, 1):
        found = sample(vllm, policy, version=version)
        assert gap(policy, found) < 1e-4
        assert vllm.metrics == {"sampler/weight_version": version}
        disturb(policy)
    assert gap(policy, found) > 0.05


def test_an_adapter_is_merged_and_named_as_the_model_names_its_weights(vllm):
    policy = tiny(adapter={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    disturb(policy, scale=0.1)
    assert gap(policy, sample(vllm, policy)) < 1e-4
    assert dict(policy.named_weights()).keys() == dict(tiny().named_weights()).keys() == NAMES
    merged = copy.deepcopy(policy.model).merge_and_unload().state_dict()
    for name, weight in policy.named_weights():
        assert torch.allclose(weight, merged[name], atol=1e-6), name


def test_memory_is_awake_before_weights_are_written_and_the_cache_is_dropped_before_it_is_used(vllm, monkeypatch):
    policy = tiny()
    sample(vllm, policy)
    monkeypatch.setattr(VLLM, "_sleeps", True)
    stand_in.LLM.last.log.clear()
    with ready(vllm, policy, 5):
        assert stand_in.LLM.last.log == [
            "wake ['weights']",
            "reload_weights",
            "reset_prefix_cache",
            "wake ['kv_cache']",
        ]
        assert stand_in.LLM.last.llm_engine.version == "5"
    assert stand_in.LLM.last.log[4:] == ["sleep 2"]


def test_a_cache_that_cannot_be_dropped_ends_the_run(vllm):
    policy = tiny()
    sample(vllm, policy)
    stand_in.LLM.last.drops_its_cache = False
    with pytest.raises(RuntimeError, match="older weights could not be dropped"):
        sample(vllm, policy)
    assert vllm.metrics == {}


def test_stop_strings_polls_and_early_ends(vllm):
    policy, told, polls = tiny(), {}, []
    with ready(vllm, policy):
        found = vllm.generate(
            policy,
            PROMPTS,
            group_size=4,
            sampling=sampling(stop=(" ",), temperature=1.3),
            seed=3,
            poll=lambda: polls.append(1),
            on_finished=lambda row, text, ids: told.update({row: (text, ids)}),
        )
        own = vllm.generate(policy, PROMPTS, group_size=4, sampling=sampling(temperature=1.3), seed=3)
    assert len(polls) > 5
    assert set(told) == {row for row, finished in enumerate(found.finished) if finished}
    for row, (text, ids) in told.items():
        assert found.texts[row] == text
        assert len(ids) == int(found.mask[row].sum())
    for part, whole in zip(found.texts, own.texts):
        assert part == (whole[: whole.index(" ") + 1] if " " in whole else whole)
    stopped = [finished for text, finished in zip(found.texts, found.finished) if " " in text]
    assert stopped
    assert all(stopped)


@pytest.mark.parametrize(
    ("limit", "turns", "finished"),
    [(60, {1, 3, 4}, {False}), pytest.param(90, {1, 4}, {True, False}, marks=pytest.mark.slow)],
)
def test_multi_turn_completions_are_those_of_the_native_sampler(vllm, limit, turns, finished):
    # A temperature of 0 leaves nothing to chance. With 60 tokens one completion is cut because a reply leaves no room.
    policy = tiny()

    def environment(said):
        return "The 42" if len(said) < 4 else None

    options = {"group_size": 2, "sampling": sampling(temperature=0.0, max_new_tokens=limit), "seed": 3}
    own = generate(policy, PROMPTS, responder=FakeResponder(environment), **options)
    with ready(vllm, policy):
        found = vllm.generate(policy, PROMPTS, responder=FakeResponder(environment), **options)
    assert {len(said) for said in own.turns} == turns
    assert set(own.finished) == finished
    for name in ("ids", "attention_mask", "mask"):
        assert torch.equal(getattr(found, name), getattr(own, name)), name
    assert (found.turns, found.replies, found.finished) == (own.turns, own.replies, own.finished)
    assert_close(found.logprobs, own.logprobs, rtol=0, atol=1e-4)


def test_every_turn_is_drawn_from_the_distribution_that_is_trained(vllm):
    policy, responder = tiny(), FakeResponder(chatty)
    with ready(vllm, policy):
        found = vllm.generate(
            policy, PROMPTS, group_size=8, sampling=sampling(max_new_tokens=60), seed=3, responder=responder
        )
    replied = found.attention_mask[:, -found.mask.shape[1] :] & ~found.mask
    assert replied.sum() > 20
    assert found.logprobs[replied].abs().max() == 0
    assert gap(policy, found) < 1e-4
    seeds = stand_in.LLM.last.llm_engine.seeds
    assert len(set(seeds)) == len(seeds) == sum(map(len, found.turns))  # each turn of each completion has its own


def test_who_leaves_a_rollout_leaves_no_request(vllm):
    policy = tiny()

    def poll():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ready(vllm, policy):
        vllm.generate(policy, PROMPTS, group_size=2, sampling=sampling(), seed=3, poll=poll)
    assert sorted(stand_in.LLM.last.llm_engine.aborted) == [str(number) for number in range(6)]


@pytest.mark.slow
def test_random_state_threads_and_environment_are_as_before(vllm, monkeypatch):
    class Seeding(stand_in.LLM):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            torch.set_num_threads = print
            assert os.environ["WORLD_SIZE"] == "1"
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", Seeding)
    before = (random.getstate(), torch.get_rng_state(), torch.set_num_threads, dict(os.environ))
    numbers = np.random.get_state()[1].tolist()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        sample(vllm, tiny())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.set_num_threads is before[2]
    assert dict(os.environ) == before[3]
    assert np.random.get_state()[1].tolist() == numbers
    assert stand_in.LLM.last.arguments["dtype"] == "bfloat16"  # as the policy computes, where it is first asked


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.kv_cache_gib=2", "rollout.kv_cache_gib=2 does not work with sampler=vllm"),
        ("policy.quantization=4bit", "policy.quantization=4bit does not work with sampler=vllm"),
        (
            "sampler.engine={repetition_penalty: 1.2}",
            "sampler.engine.repetition_penalty=1.2: must not change what is sampled",
        ),
        ("sampler.engine={worker_cls: x.Y}", "sampler.engine.worker_cls=x.Y: must be one of async_scheduling"),
        ("sampler.gpu_memory_utilization=2", "sampler.gpu_memory_utilization=2: must be"),
    ],
)
def test_settings_that_an_engine_cannot_follow(monkeypatch, override, told):
    stand_in.install(monkeypatch)
    assert problems("sampler=vllm") == ()
    assert problems("sampler=vllm", "rollout.top_p=0.9", "rollout.min_p=0.1", "validation.top_k=5") == ()
    found = problems("sampler=vllm", override)
    assert any(told in problem for problem in found), found


def test_without_vllm_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("grpo_lightning.config.consistency.find_spec", lambda _: None)
    sentence = (
        "sampler=vllm: vLLM is not installed; use sampler=own, or an environment of its own with: "
        "pip install -r requirements-vllm.txt"
    )
    assert problems("sampler=vllm") == (sentence,)
    assert problems("sampler=vllm", "mode=export") == ()
    assert problems("sampler=vllm_server", "sampler.directory=/tmp/x") == ()
    with pytest.raises(ValueError, match="vLLM is not installed"):
        VLLM(seed=0)


@pytest.mark.slow
def test_a_run_with_an_engine_and_one_that_continues_it(monkeypatch, tmp_path):
    stand_in.install(monkeypatch)
    words = ["sampler=vllm", "validation.every=1", "rollout.temperature=0.8"]
    whole = small_run(tmp_path / "whole", *words, "steps=2")
    assert whole.metrics["sampler/weight_version"] == 1
    assert whole.metrics["time/sync"] > 0
    assert whole.metrics["time/wake"] >= 0
    assert whole.metrics["policy/entropy"] > 0
    small_run(tmp_path / "parts", *words, "steps=1")
    parts = small_run(tmp_path / "parts", *words, "steps=2", "checkpoint=last")
    assert parts.completed_steps == 2
    for (name, one), other in zip(whole.policy.state_dict().items(), parts.policy.state_dict().values()):
        assert torch.equal(one, other), name
    stored = torch.load(tmp_path / "whole" / "checkpoints" / "last.ckpt", weights_only=True)
    assert not [name for name in stored["state_dict"] if "engine" in name or "sampler" in name]
