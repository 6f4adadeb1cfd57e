"""Milliseconds per sampled token, beside ``generate`` and beside what reading weights, keys and values takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu.machine import copy_rate
from benchmarks.gpu.models import model, policy, prompts, sampling, sized
from benchmarks.gpu.progress import enough, keep
from benchmarks.gpu.tools import half, seconds
from benchmarks.setting import NATIVE
from grpo_lightning.memory import Shape

ROWS, FEW = (64, 128, 256, 512), 256
GROUP, PROMPT = 8, 256
SHORT, LONG = 16, 144
"""Tokens of two rollouts: their difference has no prompts and no start in it."""
LEAST = 0.4
_ENOUGH = 20.0
"""Seconds that must be left for another measurement of ``generate``."""
Found = dict[str, dict[str, float]]
"""By the number of rows."""


def limit(shape: Shape, rows: int, *, prompt: int, own: float, rate: float) -> float:
    """The seconds in which the bytes of a token step are read: 16-bit weights once, a group's prompt once.

    Args:
        shape: The model's sizes.
        rows: Completions, in groups of ``GROUP``.
        prompt: Tokens of a prompt.
        own: Tokens that a completion has so far, on average.
        rate: Bytes per second.
    """
    weights = 2 * (shape.body + shape.vocabulary * shape.hidden)
    cached = 2 * 2 * shape.keys * shape.layers * (rows / GROUP * prompt + rows * own)
    return (weights + cached) / rate


def per_token(sampled: Callable[[int], Any], *, short: int, long: int) -> float:
    """Seconds of a token, from rollouts of two lengths; the longer goes first, to compile and capture."""
    sampled(long)
    times = [seconds(lambda length=length: sampled(length), times=2, warmup=0) for length in (short, long)]
    return (times[1] - times[0]) / (long - short)


@dataclass(frozen=True)
class Sizes:
    """Of the rollouts."""

    rows: tuple[int, ...] = ROWS
    prompt: int = PROMPT
    short: int = SHORT
    long: int = LONG


def ours(config: PretrainedConfig, sizes: Sizes, *, rate: float, found: Found) -> None:
    """Put the sampler's time into ``found``, and its share of the limit at ``rate`` bytes per second."""
    given = policy(model(config), endless=True)
    for rows in sizes.rows:
        asked = prompts(rows // GROUP, sizes.prompt, config.vocab_size)

        def sampled(length: int, asked: list[list[int]] = asked) -> Any:
            return NATIVE.generate(given, asked, group_size=GROUP, sampling=sampling(length), seed=0)

        with half():
            took = per_token(sampled, short=sizes.short, long=sizes.long)
        own = (sizes.short + sizes.long) / 2
        least = limit(given.shape(), rows, prompt=sizes.prompt, own=own, rate=rate)
        found[str(rows)] = {"ours_ms": 1e3 * took, "limit_ms": 1e3 * least, "fraction": least / took}
        keep(rows=found, main=told(found))
    if not given.share_prompts:
        raise RuntimeError("prompts are not shared")


def theirs(config: PretrainedConfig, sizes: Sizes, *, found: Found) -> list[str]:
    """Put the time of ``generate`` with 16-bit weights into ``found``; returns what there was no time for."""
    plain = model(config, dtype=torch.bfloat16)
    plain.generation_config.eos_token_id = None
    left_out: list[str] = []
    for rows in sizes.rows:
        if not enough(_ENOUGH, f"`generate` with {rows} rows", left_out):
            continue
        ids = torch.tensor(prompts(rows // GROUP, sizes.prompt, config.vocab_size), device=plain.device)
        ids = ids.repeat_interleave(GROUP, 0)  # [P, S] -> [B, S]

        def generated(length: int, ids: torch.Tensor = ids) -> Any:
            return plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=length,
                min_new_tokens=length,
            )

        middle = (sizes.short + sizes.long) // 2
        found[str(rows)]["generate_ms"] = 1e3 * per_token(generated, short=sizes.short, long=middle)
        keep(rows=found, main=told(found))
    return left_out


def run(reduced: bool) -> dict[str, Any]:
    """The sampler at every number of rows, then ``generate`` as far as the time goes."""
    config, sizes = sized(reduced), Sizes((8, 16), 16, 4, 12) if reduced else Sizes()
    rate = copy_rate(1 << 24 if reduced else 1 << 32)
    found: Found = {}
    keep(prompt=sizes.prompt, group_size=GROUP, tokens=[sizes.short, sizes.long], copy_gb_per_second=rate / 1e9)
    ours(config, sizes, rate=rate, found=found)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    not_tested = theirs(config, sizes, found=found)
    passed = reduced or all(row["fraction"] >= LEAST for rows, row in found.items() if int(rows) <= FEW)
    return {"passed": passed, "main": told(found), "not_tested": not_tested, "judged": not reduced}


def told(found: Found) -> str:
    """Ours, the limit's share and generate's, of every number of rows."""
    parts = []
    for rows, row in found.items():
        also = f", generate {row['generate_ms']:.1f}" if "generate_ms" in row else ""
        parts.append(f"B {rows}: {row['ours_ms']:.2f} ms, {row['fraction']:.2f} of the limit{also}")
    return "; ".join(parts)
