"""The path on which a group computes its prompt once, against the model's own forward pass."""

import logging
from dataclasses import replace
from functools import partial
from os.path import commonprefix

import pytest
import torch
from torch.testing import assert_close
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from grpo_lightning.loss import PolicyLoss, clipped, completion_mean, gspo, k3
from grpo_lightning.policy.base import base_of
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.policy.shared_prompt import SharedPath, check
from grpo_lightning.sampler.fused_decode import FusedDecodeStep
from grpo_lightning.transformer import attention
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.transformer.lm_head import LMHead, unshared_logprobs
from grpo_lightning.types import Rollout, Sampling
from tests.support.checkpoints import ARCHITECTURES, tokenizer, write_checkpoint
from tests.support.sampling import generate

PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food in the world"]
FREE = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=20)
CLIPPED, GSPO = (partial(function, epsilon_low=0.2, epsilon_high=0.2) for function in (clipped, gspo))
LOSSES = {
    "per token": PolicyLoss(lambda *given: CLIPPED(*given), k3, completion_mean, 0.04, 0.0),
    "per token, known beforehand": PolicyLoss(CLIPPED, k3, completion_mean, 0.04, 0.0),
    "per completion": PolicyLoss(lambda *given: GSPO(*given), k3, completion_mean, 0.04, 0.0),
    "entropy bonus": PolicyLoss(lambda *given: CLIPPED(*given), k3, completion_mean, 0.04, 0.01),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, name, chat=False) for name in ARCHITECTURES}


def opened(path, **arguments) -> HFPolicy:
    defaults = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
    return load(str(path), **defaults | arguments)


EVERY = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*ARCHITECTURES} - {"llama"}))]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(params=EVERY)
def policy(request, checkpoints):
    made = opened(checkpoints[request.param])
    check(made.model)  # raises where the path would not be taken
    return made


def ragged(policy, group_size, *, left=0, right=0, prompts=PROMPTS) -> Rollout:
    """Groups of completions of 0 to 20 tokens, rows in disorder, padded on either side, with noise on all logs."""
    sampled = generate(policy, prompts, group_size=group_size, sampling=FREE, seed=1)
    rows, length = sampled.mask.shape
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, length + 1, (rows, 1), generator=generator)
    mask = sampled.mask & (torch.arange(length) < lengths)
    attention = torch.cat([sampled.attention_mask[:, :-length], mask], 1)
    noise = 0.3 * torch.randn(3, rows, length, generator=generator) * mask
    pad = torch.nn.functional.pad
    return Rollout(
        ids=pad(sampled.ids, (left, right), value=3),
        attention_mask=pad(attention, (left, right)),
        mask=pad(mask, (0, right)),
        old_logprobs=pad((sampled.logprobs + noise[0]) * mask, (0, right)),
        ref_logprobs=pad((sampled.logprobs + noise[1]) * mask, (0, right)),
        advantages=pad(noise[2], (0, right)),
    )[torch.randperm(rows, generator=generator)]


def test_logprobs_entropy_loss_and_gradients_are_the_models_own(policy):
    path = SharedPath.from_model(policy.model)
    for kind, group_size, left, right in (
        ("per token", 2, 0, 0),
        ("per token, known beforehand", 5, 3, 2),
        ("entropy bonus", 5, 0, 4),
        ("per completion", 20, 0, 4),
    ):
        rows, loss = ragged(policy, group_size, left=left, right=right), LOSSES[kind]
        weights, bonus = loss.weights(rows.mask), bool(loss.entropy_coef)
        known = loss.gradient_by_logprobs(rows, weights, on_policy=False)
        assert (known is not None) == (kind == "per token, known beforehand")
        results = []
        for logprobs, entropy in (
            path.logprobs_and_entropy(rows, temperature=0.8, entropy=bonus, loss_gradient=known),
            unshared_logprobs(policy.model, rows, temperature=0.8, entropy=bonus),
        ):
            policy.zero_grad()
            value, _ = loss(logprobs, entropy, rows, weights)
            value.backward()
            slopes = torch.cat([p.grad.flatten() for p in policy.parameters()])
            results.append((logprobs.detach(), value.detach(), slopes, entropy.detach() if bonus else torch.zeros(1)))
        for found, expected in zip(*results):
            assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(float(expected.abs().max()), 1e-3))
        assert results[0][2].abs().max() > 1e-3


def test_a_gradient_known_beforehand_for_the_only_update_of_a_rollout(checkpoints):
    policy = opened(checkpoints["llama"])
    rows, loss = ragged(policy, 4), LOSSES["per token, known beforehand"]
    weights = loss.weights(rows.mask)
    asked = []

    def spied(logprobs, numbers):
        asked.append(loss.gradient_by_logprobs(rows, weights, on_policy=True)(logprobs, numbers))
        return asked[-1]

    logprobs, _ = SharedPath.from_model(policy.model).logprobs_and_entropy(
        rows, temperature=1.0, entropy=False, loss_gradient=spied
    )
    logprobs.retain_grad()
    loss(logprobs, None, replace(rows, old_logprobs=logprobs.detach()), weights)[0].backward()
    # Bit by bit, or the logits would be made again.
    expected = {float(value) for value in logprobs.grad[rows.mask]}
    assert {float(value) for value in torch.cat(asked)} == expected


def test_all_rows_may_be_empty(checkpoints):
    policy = opened(checkpoints["llama"])
    rows = ragged(policy, 2)
    empty = replace(rows, mask=torch.zeros_like(rows.mask))
    logprobs, entropy = SharedPath.from_model(policy.model).logprobs_and_entropy(empty, temperature=1.0, entropy=True)
    assert logprobs.shape == entropy.shape == rows.mask.shape
    assert logprobs.count_nonzero() == entropy.count_nonzero() == 0
    policy.zero_grad()
    logprobs.sum().backward()  # as when all completions were cut and rollout.mask_truncated leaves them out
    assert all(parameter.grad.count_nonzero() == 0 for parameter in policy.parameters())


def test_what_is_computed_once(checkpoints, monkeypatch):
    policy, sizes, asked = opened(checkpoints["llama"]), [], []
    sampled = generate(policy, PROMPTS, group_size=8, sampling=FREE, seed=1)
    attend, head = Stream.attend, LMHead.__call__
    monkeypatch.setattr(Stream, "attend", lambda self, n, q, *rest: sizes.append(q.shape) or attend(self, n, q, *rest))
    monkeypatch.setattr(
        LMHead, "__call__", lambda self, h, ids, **more: asked.append(len(h)) or head(self, h, ids, **more)
    )
    mask = sampled.mask.clone()
    mask[:, 0] = False  # as a reply, which is read and not predicted
    policy.logprobs_and_entropy(replace(sampled, mask=mask), temperature=1.0)
    prompts, tokens = sum(map(len, policy.tokenize(PROMPTS))), int(sampled.mask.sum())
    assert sizes == [(1, 4, prompts + tokens - 24, 8)] * 2  # the last token of each of 24 predicts nothing
    assert asked == [tokens - 24]


def gradient(policy, rows):
    policy.zero_grad()
    policy.logprobs(rows, temperature=1.0).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])


def test_gradient_checkpointing_and_adapters_have_the_same_gradient(checkpoints):
    for options in ({}, {"adapter": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}):
        policy = opened(checkpoints["llama"], **options)
        rows = ragged(policy, 4)
        shared = gradient(policy, rows)
        policy.share_prompts = False
        separate_rows = gradient(policy, rows)
        policy.share_prompts = True
        policy.model.gradient_checkpointing_enable()
        checkpointed = gradient(policy, rows)
        assert policy.share_prompts
        check(policy.model)
        assert shared.abs().max() > 1e-3
        assert_close(shared, separate_rows, rtol=1e-4, atol=1e-4 * float(shared.abs().max()))
        assert_close(checkpointed, shared, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_merged_into_the_samplers_copy(checkpoints):
    policy = opened(checkpoints["qwen3"], adapter={"r": 4, "target_modules": "all-linear", "init_lora_weights": False})
    assert check(policy.model)
    FusedDecodeStep(base_of(policy.model).get_decoder(), torch.float32)
    sampled = generate(policy, PROMPTS, group_size=4, sampling=FREE, seed=1)
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs, rtol=0, atol=1e-4)
    with policy.model.disable_adapter():
        bare = generate(policy, PROMPTS, group_size=4, sampling=FREE, seed=1)
        assert_close(policy.logprobs(bare, temperature=1.0), bare.logprobs, rtol=0, atol=1e-4)
    assert bare.texts != sampled.texts


def test_an_adapter_that_is_more_than_two_matrices_is_not_merged(checkpoints):
    adapter = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "use_dora": True}
    policy = opened(checkpoints["llama"], adapter=adapter)
    with pytest.raises(TypeError, match="more than a product"):
        FusedDecodeStep(base_of(policy.model).get_decoder(), torch.float32)
    sampled = generate(policy, PROMPTS, group_size=4, sampling=FREE, seed=1)
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_sixteen_bits_round_as_training_does(checkpoints, name):
    stored = opened(checkpoints[name], dtype="bfloat16")
    sampled = generate(stored, PROMPTS, group_size=4, sampling=FREE, seed=1)
    gap = (stored.logprobs(sampled, temperature=1.0).detach() - sampled.logprobs).abs()[sampled.mask]
    assert 0 < float(gap.mean()) < 0.1
    policy = opened(checkpoints[name])
    with torch.autocast("cpu", torch.bfloat16):
        sampled = generate(policy, PROMPTS, group_size=8, sampling=FREE, seed=1)
        assert policy.share_prompts
        assert gradient(policy, sampled).isfinite().all()
        gap = (policy.logprobs(sampled, temperature=1.0) - sampled.logprobs).abs()[sampled.mask]
    exact = (policy.logprobs(sampled, temperature=1.0) - sampled.logprobs).abs()[sampled.mask].detach()
    # Nearer to training in 16 bits than to float32, and near enough.
    assert float(gap.detach().mean()) < min(0.01, float(exact.mean()))


def bloom(**options) -> HFPolicy:
    """A model with an attention of its own, which no name replaces."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = BloomForCausalLM(BloomConfig(vocab_size=400, **sizes, bos_token_id=None, eos_token_id=0, pad_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return HFPolicy(model, tokenizer(chat=False), **options)


def test_a_model_that_computes_otherwise_keeps_its_own_way_and_says_so_once(caplog):
    policy = bloom()
    with caplog.at_level(logging.WARNING):
        sampled = generate(policy, PROMPTS, group_size=2, sampling=FREE, seed=1)
        generate(policy, PROMPTS, group_size=2, sampling=FREE, seed=1)
    assert [r.message.split(":")[0] for r in caplog.records] == ["policy.share_prompts is off"]
    assert "BloomForCausalLM" in caplog.text
    assert sampled.texts == generate(bloom(share_prompts=False), PROMPTS, group_size=2, sampling=FREE, seed=1).texts
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs, rtol=0, atol=2e-5)


def test_rows_beyond_a_sliding_window_take_the_models_own_path():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 400, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    config = MistralConfig(**sizes | ids | {"num_key_value_heads": 2, "sliding_window": 24})
    policy = HFPolicy(MistralForCausalLM(config), tokenizer(chat=False))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(3.0)  # or attention would hardly matter
    assert policy._shared_path(24) is not None
    assert policy._shared_path(25) is None
    sampled = generate(policy, PROMPTS, group_size=3, sampling=replace(FREE, max_new_tokens=60), seed=1)
    assert int(sampled.mask.sum(-1).max()) > 40
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs, rtol=0, atol=1e-4)


def test_what_all_prompts_begin_with_is_computed_once(policy, monkeypatch):
    prompts = [f"You are a helpful assistant. {prompt}" for prompt in PROMPTS]
    path, rows = SharedPath.from_model(policy.model), ragged(policy, 3, prompts=prompts)
    sizes, results, flops = [], [], []
    path.decoder.register_forward_pre_hook(lambda *all: sizes.append(all[-1]["input_ids"].numel()), with_kwargs=True)
    for least in (float("inf"), 0.0):
        monkeypatch.setattr(attention, "MIN_SAVED", least)
        sampled = generate(policy, prompts, group_size=3, sampling=FREE, seed=1)
        policy.zero_grad()
        logprobs, _ = path.logprobs_and_entropy(rows, temperature=0.9, entropy=False)
        (logprobs * rows.advantages).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((sampled.ids, sampled.logprobs, logprobs.detach(), gradient))
        flops.append(policy.flops(rows))
        sizes.append(0)
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1:], results[1][1:], rtol=1e-4, atol=2e-5)
    first, second = sizes[: sizes.index(0)], sizes[sizes.index(0) + 1 : -1]
    saved = 2 * len(commonprefix(policy.tokenize(prompts)))  # noqa: RUF071 (of lists); of three prompts two
    assert [one - other for one, other in zip(first, second, strict=True) if one != other] == [saved, saved]
    assert flops[0] - flops[1] == pytest.approx(2 * policy.shape().body * saved)
