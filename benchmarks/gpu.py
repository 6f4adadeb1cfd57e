"""Figures of one GPU in less than ten minutes; with ``--smoke`` at a small size, on a CPU too.

Every stage is a process of its own with a limit on its time. Models are random and made on the device.
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor

from benchmarks import head as heads
from benchmarks import ours
from benchmarks.measure import autocast, device, fastest, in_turns, ratio
from benchmarks.models import SMALL, qwen, random_model, random_policy, random_prompts, sampling
from benchmarks.process import ROOT, result
from benchmarks.setting import Setting
from grpo_lightning import memory
from grpo_lightning.policy.hf import HFPolicy
from grpo_lightning.policy.loading import load
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.transformer.lm_head import LMHead
from grpo_lightning.types import Sampled

GROUP = 8
SECONDS = {"machine": 20, "decode": 110, "mismatch": 80, "head": 50, "step": 60, "learning": 90}
"""Of each stage at most."""


def run(options: Namespace) -> dict[str, Any]:
    """All stages, or those named; one that fails says why, and the others go on."""
    if device().type != "cuda" and not options.smoke:
        raise SystemExit("gpu: there is no CUDA device; --smoke runs the same stages at a small size on a CPU")
    figures: dict[str, Any] = {}
    for name in options.cases or SECONDS:
        started = time.perf_counter()
        try:
            figures[name] = result("benchmarks.gpu", name, str(int(options.smoke)), timeout=SECONDS[name])
        except RuntimeError as error:
            figures[name] = {"error": str(error)}
        seconds = time.perf_counter() - started
        print(f"{name:10} {seconds:4.0f} s  {json.dumps(figures[name])}", flush=True)
    if options.smoke and any("error" in found for found in figures.values()):
        raise SystemExit("gpu: a stage failed")
    return figures


def copy_rate(size: int) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes on the device."""
    source = torch.ones(size // 4, device=device())
    target = torch.empty_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), times=10, warmup=3)


def machine(small: bool) -> dict[str, Any]:
    """How fast the device copies, and multiplies bf16 matrices."""
    side = 256 if small else 8192
    left, right = (torch.randn(side, side, device=device(), dtype=torch.bfloat16) for _ in range(2))
    product = 2 * side**3 / fastest(lambda: left @ right, times=10, warmup=3)
    return {
        "copy_gb_per_second": copy_rate(1 << 24 if small else 1 << 32) / 1e9,
        "product_tflop_per_second": product / 1e12,
    }


def decode_limit(shape: memory.Shape, rows: int, *, prompt: int, own: float, rate: float) -> float:
    """The least seconds of a token step: 16-bit weights are read once, and keys and values, a group's prompt once.

    Args:
        shape: The model's sizes.
        rows: Completions, in groups of `GROUP`.
        prompt: Tokens of a prompt.
        own: Tokens that a completion has so far, on average.
        rate: Bytes per second.
    """
    weights = 2 * (shape.body + shape.vocabulary * shape.hidden)
    cached = 2 * 2 * shape.keys * shape.layers * (rows / GROUP * prompt + rows * own)
    return (weights + cached) / rate


def decode(small: bool) -> dict[str, Any]:
    """Milliseconds per token step between two lengths, beside `decode_limit` and transformers' ``generate``."""
    config = qwen("1.5 B", **SMALL if small else {})
    prompt, short, long, sizes = (16, 4, 12, (8, 16)) if small else (256, 16, 144, (64, 128, 256, 512))
    rate = copy_rate(1 << 24 if small else 1 << 32)

    def per_token(sample: Callable[[int], Any], last: int) -> float:
        sample(last)  # compiles and captures
        times = [fastest(lambda length=length: sample(length), times=2, warmup=0) for length in (short, last)]
        return 1e3 * (times[1] - times[0]) / (last - short)

    policy = random_policy(config, endless=True)
    figures: dict[str, dict[str, float]] = {}
    for rows in sizes:
        prompts = random_prompts(rows // GROUP, prompt, config.vocab_size)

        def sample(length: int, prompts: Any = prompts) -> Sampled:
            return NativeSampler().generate(policy, prompts, group_size=GROUP, sampling=sampling(length), seed=0)

        with autocast():
            ms = per_token(sample, long)
        least = 1e3 * decode_limit(policy.shape(), rows, prompt=prompt, own=(short + long) / 2, rate=rate)
        figures[str(rows)] = {"ms": ms, "fraction_of_limit": least / ms}
    if not policy.share_prompts:
        raise RuntimeError("prompts are not shared")
    plain = random_model(config, dtype=torch.bfloat16)
    plain.generation_config.eos_token_id = None
    for rows in sizes:
        ids = torch.tensor(random_prompts(rows // GROUP, prompt, config.vocab_size), device=device())
        ids = ids.repeat_interleave(GROUP, 0)  # [P, S] -> [B, S]
        options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "temperature": 1.0, "top_k": 0}

        def generate(length: int, ids: Tensor = ids, options: Any = options) -> Any:
            return plain.generate(ids, max_new_tokens=length, min_new_tokens=length, **options)

        figures[str(rows)]["generate_ms"] = per_token(generate, (short + long) // 2)
    return figures


def mismatch(small: bool) -> dict[str, Any]:
    """Log-probabilities of the sampler beside those that training computes, both under bf16 autocast.

    Mean and largest difference in nats, and k3 = r - 1 - log r with r the ratio of training to sampler
    (http://joschu.net/blog/kl-approx.html); "rounding" is how far training itself is from float32.
    """

    def score(policy: HFPolicy, rows: Sampled) -> Tensor:
        logprobs = torch.zeros_like(rows.logprobs)
        for part in policy.microbatches(rows, 16_384):
            logprobs[part] = policy.logprobs(rows[part], temperature=1.0)
        return logprobs

    def gaps(policy: HFPolicy, prompts: Any, *, group_size: int, length: int) -> dict[str, float]:
        with torch.no_grad():
            with autocast():
                rows = NativeSampler().generate(
                    policy, prompts, group_size=group_size, sampling=sampling(length), seed=0
                )
                scored = score(policy, rows)
            rounding = (score(policy, rows) - scored)[rows.mask].abs().mean()
        gap = (scored - rows.logprobs)[rows.mask].double()
        k3 = (gap.expm1() - gap).mean()
        found = {"mean": gap.abs().mean(), "max": gap.abs().max(), "rounding": rounding, "k3": k3}
        return {name: float(value) for name, value in found.items()}

    path = "pkg://grpo_lightning/policy/tiny"
    shipped = load(path, dtype="float32", attn_implementation="sdpa", trust_remote_code=False).to(device())
    config = qwen("1.5 B", **SMALL if small else {})
    texts = ["Spell this word backward: house", "Spell this word backward: river", "Calculate 12 + 34 - 5."]
    prompts = random_prompts(4 if small else 16, 24 if small else 256, config.vocab_size)
    policy = random_policy(config, endless=True)
    return {
        "shipped": gaps(shipped, texts, group_size=8 if small else 64, length=36),
        "random": gaps(policy, prompts, group_size=8, length=16 if small else 128),
    }


def head(small: bool) -> dict[str, Any]:
    """The LM head with its gradients in chunks of several sizes, beside the three products that it cannot do without.

    The head has float32 weights under autocast, as in training, and the gradient of the loss beforehand; the products
    are those of 16-bit matrices.
    """
    tokens, hidden, vocabulary = (64, 64, 2048) if small else (8192, 1536, 151_936)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device()).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, hidden, device=device())).requires_grad_()
    ids, slopes = torch.randint(vocabulary, (tokens,), device=device()), torch.randn(tokens, device=device())

    def gradients(chunk: int | None) -> None:
        states.grad = weight.grad = None
        options: Any = {} if chunk is None else {"chunk": chunk}
        with autocast():
            logprobs, _ = LMHead(weight)(
                states, ids, temperature=1.0, entropy=False, loss_gradient=lambda _, part: slopes[part], **options
            )
        logprobs.backward(slopes)

    rounded = [tensor.detach().to(torch.bfloat16) for tensor in (states, weight)]
    chunks: dict[str, int | None] = {"default": None} | {f"2^{power}": 1 << power for power in (24, 26, 28)}
    actions: dict[str, Any] = {name: lambda chunk=chunk: gradients(chunk) for name, chunk in chunks.items()}
    actions["products"] = lambda: heads.products(*rounded, ids, slopes, logits=1 << 28)
    seconds = in_turns(actions, warmup=1, steps=2 if small else 7)
    return {name: ratio(seconds[name], seconds["products"])["ratio"] for name in chunks}


class Phases(Callback):
    """Keeps the times of every step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.times = steps, list[dict[str, float]]()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.times.append({name: value for name, value in module.metrics.items() if name.startswith("time/")})
        trainer.should_stop = len(self.times) == self.steps


def step(small: bool) -> dict[str, Any]:
    """The third step of Qwen2.5-1.5B's shape in bf16-mixed with gradient checkpointing, without a reference."""
    prompt, cap, group, prompts = (16, 12, 4, 2) if small else (256, 256, 8, 8)
    config = qwen("1.5 B", **SMALL if small else {})
    vocabulary = config.vocab_size
    setting = Setting("step", prompt=prompt, cap=cap, group=group, prompts=prompts, vocabulary=vocabulary)
    policy = random_policy(config, endless=True)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    load = memory.Workload(
        prompts=setting.prompts,
        group_size=setting.group,
        prompt_tokens=setting.prompt,
        completion_tokens=setting.cap,
        microbatch_tokens=16_384,
        is_half=True,
        checkpointing=True,
        device=device().type,
        copy_bytes=2.0,
    )
    predicted = memory.predict(policy.shape(), load)["peak"]
    module, phases = ours.compose(setting, policy, "steps=100").module, Phases(3)
    ours.bare_trainer(precision="bf16-mixed", callbacks=[phases]).fit(module, ours.batches(setting, 3))
    if not policy.share_prompts:
        raise RuntimeError("prompts are not shared")
    figures = {**phases.times[-1], "predicted_gib": predicted / memory.GiB}
    if device().type == "cuda":
        figures["measured_gib"] = torch.cuda.max_memory_allocated() / memory.GiB
    return figures


def learning(small: bool) -> dict[str, Any]:
    """The default task from start to end by ``train.py``, and two steps more from its checkpoint."""
    import subprocess

    steps, more = (1, 1) if small else (40, 2)
    settings = [f"trainer={'gpu' if device().type == 'cuda' else 'cpu'}"]
    if small:
        settings += ["data.prompts_per_step=2", "data.validation_size=4", "rollout.group_size=4"]
    with tempfile.TemporaryDirectory() as name:
        started, summaries = time.perf_counter(), []
        for words in ([f"steps={steps}"], [f"steps={steps + more}", "checkpoint=last"]):
            command = [sys.executable, "train.py", *settings, *words, f"hydra.run.dir={name}"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            summaries.append(json.loads((Path(name) / "summary.json").read_text()))
        seconds = time.perf_counter() - started
    first, second = summaries
    return {"pass@1": first["metrics"]["val/pass@1"], "seconds": seconds, "continued_to": second["steps"]}


if __name__ == "__main__":
    stages = {stage.__name__: stage for stage in (machine, decode, mismatch, head, step, learning)}
    print(json.dumps(stages[sys.argv[1]](sys.argv[2] == "1")))
