"""Fast paths against plain ones, on the device that there is: ``pytest -m slow tests/test_gpu.py`` on a GPU.

On a CPU the same tests run in float32, and those that need CUDA are skipped.
"""

import warnings

import pytest
import torch
import torch._dynamo.utils
from torch.nn.functional import scaled_dot_product_attention
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from benchmarks.measure import autocast, device
from benchmarks.models import IDS, SMALL, qwen, random_policy, random_prompts, sampling
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.transformer.attention import Stream
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs, unshared_logprobs

pytestmark = pytest.mark.slow
ON_GPU = torch.cuda.is_available()
UNTIED = SMALL | IDS | {"tie_word_embeddings": False}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL | IDS),
    "qwen2, compiled": Qwen2Config(**SMALL | IDS | {"vocab_size": 80_000}),
    "qwen3": Qwen3Config(**SMALL | IDS, head_dim=16),
    "llama": LlamaConfig(**UNTIED),
    "gemma": GemmaConfig(**SMALL | IDS, head_dim=16),
    "mistral": MistralConfig(**UNTIED, sliding_window=None),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512, vocab_size=512, **IDS),
}


def gap(one, other):
    """The largest difference relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def generate(policy, prompts, *, length=20, group_size=6, seed=1):
    return NativeSampler().generate(policy, prompts, group_size=group_size, sampling=sampling(length), seed=seed)


def score(policy, rows, *, shared):
    """Log-probabilities [B, T], entropies [B, T], and the gradient of a sum of both over all weights."""
    policy.zero_grad()
    options = {"temperature": 0.8, "entropy": True}
    logprobs, entropies = (
        policy.logprobs_and_entropy(rows, **options) if shared else unshared_logprobs(policy.model, rows, **options)
    )
    slopes = torch.linspace(-1, 1, rows.mask.numel(), device=logprobs.device).view_as(logprobs)
    (slopes * (logprobs + 0.1 * entropies)).sum().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    return logprobs.detach(), entropies.detach(), gradient


@pytest.mark.parametrize("name", CONFIGS)
def test_shared_prompts_and_the_sampler_equal_the_models_own_forward_pass(name):
    policy = random_policy(CONFIGS[name])
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)  # far from uniform, so that errors show
    prompts = [random_prompts(1, length, 512, seed=length)[0] for length in (5, 9, 40)]
    rows = generate(policy, prompts)
    assert policy.share_prompts
    shared, plain = score(policy, rows, shared=True), score(policy, rows, shared=False)
    assert max(gap(one, other) for one, other in zip(shared, plain)) < 1e-4
    with torch.no_grad():
        logprobs, entropies = unshared_logprobs(policy.model, rows, temperature=1.0, entropy=True)
    assert max(gap(rows.logprobs, logprobs), gap(rows.entropy, entropies)) < 1e-4
    if not ON_GPU:
        return
    with autocast():
        rows = generate(policy, prompts)
        shared_half, plain_half = score(policy, rows, shared=True), score(policy, rows, shared=False)
    assert policy.share_prompts
    for one, other in zip(shared_half[:2], plain_half[:2]):
        assert (one - other)[rows.mask].abs().mean() < 0.01  # nats
    exact = score(policy, rows, shared=False)[2]
    errors = [float((found[2] - exact).norm() / exact.norm()) for found in (shared_half, plain_half)]
    assert errors[0] < 1.5 * errors[1]  # both are rounded
    torch._dynamo.reset()  # or the kernels of all would count as recompilations of one function


def test_the_head_in_chunks_equals_all_logits_at_once():
    for vocabulary, entropy in ((1000, True), (152_000, False)):  # the larger one is compiled on a GPU
        torch.manual_seed(0)
        hidden = torch.randn(37, 64, device=device(), requires_grad=True)
        weight = (0.25 * torch.randn(vocabulary, 64, device=device())).requires_grad_()
        ids, slopes = torch.randint(vocabulary, (37,), device=device()), torch.randn(2, 37, device=device())
        chunked = LMHead(weight)(hidden, ids, temperature=0.7, entropy=entropy, chunk=30 * vocabulary)
        whole = token_logprobs(hidden @ weight.T, ids, 0.7, entropy_gradient=True)
        kinds = 1 + entropy
        found, expected = (
            [*each[:kinds], *torch.autograd.grad(each[:kinds], (hidden, weight), [*slopes[:kinds]])]
            for each in (chunked, whole)
        )
        assert max(gap(one.detach(), other.detach()) for one, other in zip(found, expected)) < 1e-4


def layout(size):
    """Groups of at most 4096 tokens, each a prompt and eight completions of unequal lengths, with ``size`` in all."""
    groups = []
    for start in range(0, size, 4096):
        part = min(4096, size - start)
        prompt = max(1, part // 8)
        lengths = [(part - prompt) * share // 36 for share in range(1, 9)]
        lengths[0] += part - prompt - sum(lengths)
        groups.append((prompt, tuple(lengths)))
    return tuple(groups)


def by_row(query, key, value, groups):
    """The same attention [1, N, Hq, D], one prompt or completion at a time."""
    parts, start = [], 0
    for prompt, completions in groups:
        head, position = torch.arange(start, start + prompt), start + prompt
        for places, own in [(head, prompt)] + [
            (torch.cat([head, torch.arange(position + sum(completions[:i]), position + sum(completions[: i + 1]))]), n)
            for i, n in enumerate(completions)
        ]:
            chosen = [tensor[:, :, places.to(query.device)] for tensor in (query, key, value)]
            output = scaled_dot_product_attention(*chosen, is_causal=True, enable_gqa=True)
            parts.append(output[:, :, len(places) - own :])
        start += prompt + sum(completions)
    return torch.cat(parts, 2).transpose(1, 2)


def attend(size, dtype):
    """Inputs, and output with gradients by a stream, at the sizes of Qwen2.5-1.5B's heads."""
    torch.manual_seed(size)
    tensors = [torch.randn(1, size, heads, 128, device=device(), dtype=dtype) for heads in (12, 2, 2, 12)]
    leaves, slopes = [tensor.transpose(1, 2).requires_grad_() for tensor in tensors[:3]], tensors[3]
    output = Stream(layout(size), device()).attend(0, *leaves, 128**-0.5)
    return leaves, slopes, [output.detach(), *torch.autograd.grad(output, leaves, slopes)]


def test_attention_over_a_stream_equals_that_of_each_row_and_is_not_compiled_anew():
    dtype, bound = (torch.bfloat16, 1e-2) if ON_GPU else (torch.float32, 1e-4)
    for size in (100, 333, 1000, 4096, 16_384)[: 5 if ON_GPU else 3]:
        leaves, slopes, found = attend(size, dtype)
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        output = by_row(*exact, layout(size))
        expected = [output.detach(), *torch.autograd.grad(output, exact, slopes.float())]
        for one, other in zip(found, expected):
            assert float((one.float() - other).norm() / other.norm()) < bound
    if ON_GPU:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for size in (150, 271, 801, 2222, 5000, 9999, 16_000):
            attend(size, dtype)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.skipif(not ON_GPU, reason="waits of the host need a CUDA device")
def test_sampling_waits_for_the_device_once_in_many_tokens():
    policy = random_policy(qwen("1.5 B", **SMALL), endless=True)
    prompts = random_prompts(4, 24, 512)

    def waits(length):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                generate(policy, prompts, length=length, group_size=8, seed=0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    with autocast():
        generate(policy, prompts, length=128, group_size=8, seed=0)  # compiles and captures
        assert (waits(128) - waits(32)) / 96 < 0.2
