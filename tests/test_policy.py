"""Sampling and scoring of real architectures against transformers' own forward pass and against each other."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Sampling
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.sampling import generate

PROMPTS = ["The meaning of life is", "12 + 34 =", "Corgis are small dogs. The best food in the world"]
FREE = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=12)


def opened(path, **arguments) -> HFPolicy:
    defaults = {"dtype": "float32", "attn_implementation": "sdpa", "trust_remote_code": False}
    return load(str(path), **defaults | arguments)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, name, chat=name.startswith("qwen")) for name in ARCHITECTURES}


@pytest.fixture
def policy(checkpoints):
    return opened(checkpoints["qwen3"])


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "gpt2")) for name in sorted(ARCHITECTURES)]
)
def any_policy(request, checkpoints):
    return opened(checkpoints[request.param])


def test_log_probabilities_are_the_models_own_one_row_at_a_time_without_padding(any_policy):
    policy = any_policy
    sampled = generate(policy, PROMPTS, group_size=2, sampling=FREE, seed=2)
    logprobs, entropy = policy.logprobs_and_entropy(sampled, temperature=1.0, entropy=True)
    assert_close((sampled.logprobs, sampled.entropy), (logprobs, entropy), rtol=0, atol=1e-4)
    assert policy.logprobs_and_entropy(sampled, temperature=1.0)[1] is None
    logprobs, entropy = policy.logprobs_and_entropy(sampled, temperature=0.7, entropy=True)
    for row in range(len(sampled)):
        ids = sampled.ids[row][sampled.attention_mask[row]][None]
        length = int(sampled.mask[row].sum())
        expected = (policy.model(ids).logits[0, -length - 1 : -1] / 0.7).log_softmax(-1)
        chosen = expected.gather(-1, ids[0, -length:, None]).squeeze(-1)
        assert_close(logprobs[row, :length], chosen, rtol=1e-4, atol=2e-5)
        assert_close(entropy[row, :length], -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=2e-5)
        assert logprobs[row, length:].count_nonzero() == entropy[row, length:].count_nonzero() == 0
    entropy.sum().backward()
    assert max(float(p.grad.abs().max()) for p in policy.parameters() if p.grad is not None) > 1e-3


def test_greedy_decoding_is_that_of_generate_and_an_export_is_the_same_model(any_policy, tmp_path):
    policy = any_policy
    ids = torch.tensor(policy.tokenize(PROMPTS[:1]))
    policy.export(tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(again(ids).logits, policy.model(ids).logits)
    assert again.generation_config.top_k == 2  # what the model came with is exported with it
    sampled = generate(policy, PROMPTS[:1], group_size=1, sampling=replace(FREE, temperature=0.0), seed=0)
    greedy = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": policy.end_ids, "pad_token_id": policy.pad_id}
    again.generation_config = GenerationConfig()
    expected = again.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GenerationConfig(**greedy))
    assert sampled.ids.tolist() == expected.tolist()


def test_an_export_is_read_by_transformers_4_too(tmp_path):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    policy = opened(write_checkpoint(tmp_path / "model", "llama", chat=True, rope_parameters=scaled))
    policy.model.generation_config = GenerationConfig(temperature=0.6, eos_token_id=[1, 2])  # not without do_sample
    policy.export(tmp_path / "export")
    config, words = (
        json.loads((tmp_path / "export" / f"{name}config.json").read_text()) for name in ("", "tokenizer_")
    )
    assert (config["rope_theta"], config["rope_scaling"]) == (5000.0, {"rope_type": "linear", "factor": 2.0})
    assert config["rope_parameters"] == scaled
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"is_local", "backend", "local_files_only"} & words.keys()
    again = opened(tmp_path / "export")
    ids = torch.tensor(policy.tokenize(["The meaning of life is"]))
    assert torch.equal(again.model(ids).logits, policy.model(ids).logits)
    assert again.tokenize(["<|im_end|> is"]) == policy.tokenize(["<|im_end|> is"])
    saved = again.model.generation_config
    assert (saved.eos_token_id, saved.temperature, saved.do_sample) == ([1, 2], 0.6, True)
    assert policy.model.generation_config.do_sample is not True


def test_the_token_with_which_a_text_is_reached(policy):
    ids = policy.tokenizer("The answer to all of it: 42, ümlaut", add_special_tokens=False)["input_ids"]
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    lengths = [len(policy.tokenizer.decode(ids[: n + 1], **options)) for n in range(len(ids))]
    for end in range(1, lengths[-1] + 1):
        expected = next(n for n, length in enumerate(lengths) if length >= end)
        assert policy.token_at(ids, end) == expected
    assert policy.token_at(ids, lengths[-1] + 5) == len(ids) - 1


def test_the_seed_alone_decides_and_not_what_is_sampled_beside_a_completion(policy):
    sampling, reported = replace(FREE, stop=("a", "e", "n")), {}  # many end early, so that the batch is compacted
    state = torch.get_rng_state()
    together = generate(
        policy,
        PROMPTS,
        group_size=6,
        sampling=sampling,
        seed=5,
        on_finished=lambda row, *one: reported.update({row: one}),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert generate(policy, PROMPTS, group_size=6, sampling=sampling, seed=6).texts != together.texts
    for row, (text, ids) in reported.items():
        assert text == together.texts[row]
        assert ids == together.ids[row, -together.mask.shape[1] :][together.mask[row]].tolist()
    assert {row for row, finished in enumerate(together.finished) if finished} == reported.keys()
    assert len({int(n) for n in together.mask.sum(-1)}) > 2
    apart = [
        generate(policy, [prompt], group_size=6, sampling=sampling, seed=5, first_prompt=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    assert [text for part in apart for text in part.texts] == list(together.texts)
    fewer = generate(policy, PROMPTS, group_size=2, sampling=sampling, seed=5)
    assert fewer.texts == tuple(together.texts[row] for row in (0, 1, 6, 7, 12, 13))
    longer = generate(policy, PROMPTS, group_size=2, sampling=replace(sampling, max_new_tokens=15), seed=5)
    assert all(long.startswith(short) for long, short in zip(longer.texts, fewer.texts))


def test_without_a_pad_token_and_in_training_mode_scores_are_those_of_sampling(tmp_path):
    policy = opened(write_checkpoint(tmp_path / "gpt2", "gpt2", chat=False, pad=False)).train()
    assert policy.tokenizer.pad_token is None
    assert policy.model.training  # GPT-2 has dropout
    sampled = generate(policy, PROMPTS, group_size=2, sampling=FREE, seed=1)
    assert_close(policy.logprobs(sampled, temperature=1.0), sampled.logprobs, rtol=0, atol=2e-5)


def test_sampling_options_of_the_checkpoint_do_not_leak(checkpoints):
    policy = opened(checkpoints["llama"])
    assert policy.model.generation_config.top_k == 2
    first = generate(policy, PROMPTS[:1], group_size=400, sampling=FREE, seed=1)
    tokens = first.ids[:, -first.mask.shape[1]]
    logits = policy.model(first.ids[:1, : -first.mask.shape[1]]).logits[0, -1]
    expected = logits.softmax(-1)
    assert tokens.unique().numel() > 20  # top_k 2 would leave 2
    likeliest = int(expected.argmax())
    share = float((tokens == likeliest).float().mean())
    assert share == pytest.approx(expected[likeliest].item(), abs=4 * (0.25 / 400) ** 0.5)


def test_both_end_tokens_end_and_are_counted_once(checkpoints):
    policy = opened(checkpoints["qwen2"])
    assert len(policy.end_ids) == 2
    sampling = replace(FREE, temperature=1.5, max_new_tokens=40)
    sampled = generate(policy, PROMPTS, group_size=60, sampling=sampling, seed=1)
    ended = [row for row, finished in enumerate(sampled.finished) if finished]
    assert 0 < len(ended) < len(sampled)
    seen = set()
    for row in range(len(sampled)):
        completion = sampled.ids[row, -sampled.mask.shape[1] :][sampled.mask[row]].tolist()
        ends = [i for i, token in enumerate(completion) if token in policy.end_ids]
        assert ends == ([len(completion) - 1] if sampled.finished[row] else [])
        seen |= {completion[i] for i in ends}
        assert sampled.finished[row] or len(completion) == 40
    assert seen == set(policy.end_ids)


def test_damaged_weights_are_named(checkpoints):
    policy = opened(checkpoints["llama"])
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(policy, PROMPTS, group_size=1, sampling=FREE, seed=1)


def test_user_errors(checkpoints):
    policy = opened(checkpoints["llama"])
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        generate(policy, [""], group_size=2, sampling=FREE, seed=1)
    with pytest.raises(ValueError, match="context holds 512: lower rollout.max_new_tokens"):
        generate(policy, PROMPTS, group_size=2, sampling=replace(FREE, max_new_tokens=510), seed=1)
