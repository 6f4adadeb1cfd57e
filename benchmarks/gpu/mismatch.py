"""Log-probabilities as the sampler states them beside those that training computes, both under bf16 autocast."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import model, policy, prompts, sampling, sized
from benchmarks.gpu.progress import keep
from benchmarks.gpu.tools import device, half
from benchmarks.setting import NATIVE
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Sampled

BOUND = 0.01
WORDS = ("Spell this word backward: house", "Spell this word backward: river", "Calculate 12 + 34 - 5.")


def scored(given: HFPolicy, rows: Sampled) -> Tensor:
    """Log-probabilities [B, T] as training computes them."""
    found = torch.zeros_like(rows.logprobs)
    for part in given.microbatches(rows, 16_384):
        found[part] = given.logprobs(rows[part], temperature=1.0)
    return found


def measured(given: HFPolicy, asked: list[Any], *, group_size: int, length: int) -> dict[str, float]:
    """Mean and largest difference in nats, and the mean of r - 1 - log r with r the ratio of training to sampler.

    The last estimates the KL divergence of the sampler from training (http://joschu.net/blog/kl-approx.html, k3).
    "rounding" is how far training itself is on average from what float32 gives.
    """
    with half(), torch.no_grad():
        rows = NATIVE.generate(given, asked, group_size=group_size, sampling=sampling(length), seed=0)
        found = scored(given, rows)
    with torch.no_grad():
        rounding = (scored(given, rows) - found)[rows.mask].abs().mean()
    gaps = (found - rows.logprobs)[rows.mask].double()
    return {
        "mean": float(gaps.abs().mean()),
        "max": float(gaps.abs().max()),
        "rounding": float(rounding),
        "k3": float((gaps.expm1() - gaps).mean()),
        "tokens": float(rows.mask.sum()),
        "entropy": float(rows.entropy[rows.mask].mean()),
        "shared": float(given.share_prompts),
    }


def run(reduced: bool) -> dict[str, Any]:
    """The shipped policy, whose tokens are mostly sure, then a random one of 1.5 B parameters."""
    shipped = load(
        "pkg://grpo_lightning/policy/tiny", dtype="float32", attn_implementation="sdpa", trust_remote_code=False
    ).to(device())
    config = sized(reduced)
    found = {"shipped": measured(shipped, list(WORDS), group_size=8 if reduced else 64, length=36)}
    keep(cases=found)
    asked = prompts(4 if reduced else 16, 24 if reduced else 256, config.vocab_size)
    given = policy(model(config), endless=True)
    found["random"] = measured(given, asked, group_size=8, length=16 if reduced else 128)
    main = "; ".join(
        f"{name}: mean {r['mean']:.4f} (rounding of training {r['rounding']:.4f}), max {r['max']:.3f}, k3 {r['k3']:.1e}"
        for name, r in found.items()
    )
    passed = all(row["mean"] < BOUND and row["shared"] for row in found.values())
    return {"passed": passed, "main": main, "cases": found}
