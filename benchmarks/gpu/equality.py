"""Prompts shared by a group, the sampler and the head against the models' own forward pass, on six architectures."""

from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.gpu.models import SMALL, model, policy, prompts, sampling
from benchmarks.gpu.progress import enough, keep
from benchmarks.gpu.tools import device, half
from benchmarks.setting import NATIVE
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs
from grpo_lightning.transformer.logprobs import separate
from grpo_lightning.types import Sampled

_IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SMALL | _IDS, tie_word_embeddings=True),
    "qwen2, compiled": Qwen2Config(**SMALL | _IDS | {"vocab_size": 80_000}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL | _IDS, head_dim=16, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL | _IDS, tie_word_embeddings=False),
    "gemma": GemmaConfig(**SMALL | _IDS, head_dim=16),
    "mistral": MistralConfig(**SMALL | _IDS, sliding_window=None),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512, vocab_size=512, **_IDS),
}
EXACT, ROUNDED = 1e-4, 0.01
"""The largest error in float32 relative to the largest value, and the mean one in nats in bf16."""
_ENOUGH = 12.0
"""Seconds that must be left for another architecture."""
LENGTHS = (5, 9, 40)
"""Tokens of the prompts."""


def gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def scored(given: HFPolicy, rows: Sampled, *, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [B, T], entropies [B, T], and the gradient of a sum of both over all weights."""
    given.zero_grad()
    way = given.logprobs_and_entropy if shared else lambda rows, **how: separate(given.model, rows, **how)
    logprobs, entropies = way(rows, temperature=0.8, entropy=True)
    slopes = torch.linspace(-1, 1, rows.mask.numel(), device=logprobs.device).view_as(logprobs)
    (slopes * (logprobs + 0.1 * entropies)).sum().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in given.parameters()])
    return logprobs.detach(), entropies.detach(), gradient


def sampled(given: HFPolicy, asked: list[list[int]], *, group_size: int = 6) -> Sampled:
    return NATIVE.generate(given, asked, group_size=group_size, sampling=sampling(20), seed=1)


def exact(name: str) -> dict[str, float]:
    """The errors of an architecture in float32."""
    made = model(CONFIGS[name])
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)  # far from uniform, so that errors show
    given, plain = policy(made), policy(model(CONFIGS[name]), share_prompts=False)
    plain.model.load_state_dict(made.state_dict())
    asked = [prompts(1, length, 512, seed=length)[0] for length in LENGTHS]
    rows, expected = sampled(given, asked), sampled(plain, asked)
    if not given.share_prompts:
        raise RuntimeError(f"{name}: prompts are not shared")
    same = [one == other for one, other in zip(tokens(rows), tokens(expected), strict=True)]
    one, other = scored(given, rows, shared=True), scored(given, rows, shared=False)
    with torch.no_grad():
        drawn, entropies = separate(made, rows, temperature=1.0, entropy=True)
    names = ("logprobs", "entropies", "gradient")
    return {
        **{name: gap(a, b) for name, a, b in zip(names, one, other, strict=True)},
        "sampler_logprobs": gap(rows.logprobs, drawn),
        "sampler_entropies": gap(rows.entropy, entropies),
        "other_rows": 1 - sum(same) / len(same),
    }


def tokens(rows: Sampled) -> list[list[int]]:
    length = rows.mask.shape[1]
    return [ids[keep].tolist() for ids, keep in zip(rows.ids[:, -length:], rows.mask, strict=True)]


def rounded(name: str) -> dict[str, float]:
    """The mean errors of an architecture under bf16 autocast, in nats, and that of its gradient beside the plain one.

    Both gradients are rounded: each is compared with the one in float32.
    """
    given = policy(model(CONFIGS[name]))
    asked = [prompts(1, length, 512, seed=length)[0] for length in LENGTHS]
    with half():
        rows = sampled(given, asked)
        if not given.share_prompts:
            raise RuntimeError(f"{name}: prompts are not shared in bf16")
        one, other = scored(given, rows, shared=True), scored(given, rows, shared=False)
        with torch.no_grad():
            drawn, _ = separate(given.model, rows, temperature=1.0, entropy=False)
    truth = scored(given, rows, shared=False)
    errors = [float((found[2] - truth[2]).norm() / truth[2].norm()) for found in (one, other)]
    real = rows.mask
    return {
        "logprobs": float((one[0] - other[0])[real].abs().mean()),
        "entropies": float((one[1] - other[1])[real].abs().mean()),
        "sampler_logprobs": float((rows.logprobs - drawn)[real].abs().mean()),
        "gradient": errors[0],
        "plain_gradient": errors[1],
    }


def head(vocabulary: int, *, entropy: bool) -> float:
    """The largest relative error of log-probabilities, entropies and gradients in chunks, in float32."""
    torch.manual_seed(0)
    rows = 37
    given = [
        torch.randn(rows, 64, device=device(), requires_grad=True),
        (0.25 * torch.randn(vocabulary, 64, device=device())).requires_grad_(),
    ]
    ids = torch.randint(vocabulary, (rows,), device=device())
    slopes = torch.randn(2, rows, device=device())
    chunked = LMHead(given[1], None)(given[0], ids, temperature=0.7, entropy=entropy, chunk=30 * vocabulary)
    whole = token_logprobs(given[0] @ given[1].T, ids, 0.7, entropy_gradient=True)
    kinds = 1 + entropy
    found, expected = (
        [*each[:kinds], *torch.autograd.grad(each[:kinds], given, [*slopes[:kinds]])] for each in (chunked, whole)
    )
    return max(gap(one.detach(), other.detach()) for one, other in zip(found, expected, strict=True))


def run(reduced: bool) -> dict[str, Any]:
    """The errors of all architectures in float32, then of all in bf16."""
    exact_errors: dict[str, dict[str, float]] = {}
    half_errors: dict[str, dict[str, float]] = {}
    # The larger one is compiled on a GPU.
    in_chunks, left_out = max(head(1000, entropy=True), head(152_000, entropy=False)), list[str]()
    for kind, found, errors_of in (("float32", exact_errors, exact), ("bf16", half_errors, rounded)):
        for name in CONFIGS:
            if found and not enough(_ENOUGH, f"{name} in {kind}", left_out):
                continue
            found[name] = errors_of(name)
            keep(head=in_chunks, float32=exact_errors, bf16=half_errors)
            if device().type == "cuda":
                torch._dynamo.reset()  # or the kernels of all would count as recompilations of one function
    return {"head": in_chunks, "not_tested": left_out, **verdict(in_chunks, exact_errors, half_errors)}


def verdict(
    in_chunks: float, float32: dict[str, dict[str, float]], bf16: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Whether all errors are within their bounds, and the largest."""
    worst = max(max(v for k, v in errors.items() if k != "other_rows") for errors in float32.values())
    other = max(errors["other_rows"] for errors in float32.values())
    mean = max(max(e[k] for k in ("logprobs", "entropies", "sampler_logprobs")) for e in bf16.values())
    gradient = max(e["gradient"] / e["plain_gradient"] for e in bf16.values())
    # A float32 sum of probabilities is not the same twice on a GPU, so a number may now and then fall on the other side
    # of a token's border; it then changes the rest of its row.
    allowed = 0.1 if device().type == "cuda" else 0.0
    return {
        "passed": max(worst, in_chunks) < EXACT and mean < ROUNDED and gradient < 1.5 and other <= allowed,
        "main": f"float32 {max(worst, in_chunks):.1e}, bf16 {mean:.4f} nats, prompts shared, "
        f"{other:.0%} of rows drawn otherwise",
    }
