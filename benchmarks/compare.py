"""A whole training step of this project beside TRL's, or beside that of another checkout, in turns.

Two processes with the same weights, prompts and settings take one step each; what counts is the ratio of neighbouring
steps. Beside TRL it is shown first that both compute the same: log-probabilities, loss and gradients of the same
completions.
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import format_ratio, ratio
from benchmarks.process import ROOT, Worker
from benchmarks.setting import TINY, Setting
from grpo_lightning.sampler.native import NativeSampler
from grpo_lightning.types import Rollout, Sampling

CASES = (
    Setting("base"),
    Setting("long_prompt", prompt=512, prompts=2),
    Setting("half_dead", dead=0.5),
    Setting("full_length", mean=None),
    Setting("large_vocabulary", vocabulary=151_936, prompts=2),
    Setting("thousand_tokens", mean=None, cap=1024, prompts=2),
    Setting("long_answers", prompt=64, cap=256, mean=None, prompts=2, keys=2),
    Setting("short_answers", prompt=512, cap=64, mean=None, prompts=2, keys=2),
    Setting("base_bf16", bf16=True),
)
EQUALITY = Setting("equality", prompt=24, cap=40, mean=20, group=6, prompts=3, hidden=64, layers=2, kl=0.04)
TOLERANCE = 1e-4
PHASES = {"step": "seconds", "rollout": "time/rollout", "update": "time/update"}


def run(options: Namespace, cases: Sequence[Setting] = CASES) -> dict[str, Any]:
    """All cases, or those named, beside TRL or ``options.against``."""
    chosen = select(cases, options)
    steps = {"warmup": 0, "steps": 1} if options.smoke else {"warmup": 3, "steps": 10}
    figures: dict[str, Any] = {} if options.against else {"equality": equality()}
    other = "before" if options.against else "TRL"
    print(f"| case | {other}, s | ours, s | {other} / ours (quartiles) | rollout | update |\n|---|---|---|---|---|---|")
    for case in chosen:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as started:
            case.write(Path(directory))
            arguments = case.dumps(), directory
            first = ("benchmarks.ours", options.against.resolve()) if options.against else ("benchmarks.theirs", ROOT)
            workers = {
                other: started.enter_context(Worker(first[0], *arguments, checkout=first[1])),
                "ours": started.enter_context(Worker("benchmarks.ours", *arguments)),
            }
            pairs = [{name: worker.step() for name, worker in workers.items()} for _ in range(sum(steps.values()))]
        pairs = pairs[steps["warmup"] :]
        phases = {
            phase: {name: [pair[name][key] for pair in pairs] for name in workers if key in pairs[0][name]}
            for phase, key in PHASES.items()
        }
        row = {
            phase: {name: median(values) for name, values in seconds.items()}
            | (ratio(seconds[other], seconds["ours"]) if len(seconds) == 2 else {})
            for phase, seconds in phases.items()
        }
        row["update_rate"] = median(pair["ours"]["update_rate"] for pair in pairs)
        figures[case.name] = row
        cells = [f"{row['step'][name]:.2f}" for name in workers] + [f"**{format_ratio(row['step'])}**"]
        cells += [
            format_ratio(row[phase]) if options.against else f"{row[phase]['ours']:.2f} s"
            for phase in ("rollout", "update")
        ]
        cells[-1] += f", {row['update_rate']:.2f} of the rate of products"
        print(f"| {' | '.join([case.name, *cells])} |", flush=True)
    return figures


def select(cases: Sequence[Setting], options: Namespace) -> Sequence[Setting]:
    """The cases named on the command line, or all; one that is tiny for a smoke test.

    Raises:
        SystemExit: None is named so.
    """
    if options.model:
        model = Setting("model", cap=16, prompts=8, model=str(options.model))
        cases = (model, replace(model, name="model_bf16", bf16=True))
    chosen = [case for case in cases if not options.cases or case.name in options.cases]
    if not chosen:
        raise SystemExit(f"--cases: there are {', '.join(case.name for case in cases)}")
    return [TINY] if options.smoke and not options.model else chosen


def equality() -> dict[str, float]:
    """The gaps of both systems on the same completions.

    Raises:
        SystemExit: One is above `TOLERANCE`.
    """
    from benchmarks import ours, theirs

    with tempfile.TemporaryDirectory() as directory:
        EQUALITY.write(Path(directory))
        module = ours.compose(EQUALITY, Path(directory)).module
        trainer = theirs.build(EQUALITY, directory)
    policy, model = module.policy, trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():  # the reference differs from the policy, or the KL term would be 0
        for p, q in zip(policy.parameters(), model.parameters(), strict=True):
            step = 0.02 * torch.randn_like(p)
            p.add_(step)
            q.add_(step)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=EQUALITY.cap)
    prompts = [ids for ids, _ in EQUALITY.rows(EQUALITY.prompts)]
    sampled = NativeSampler().generate(policy, prompts, group_size=EQUALITY.group, sampling=sampling, seed=0)
    length = sampled.mask.shape[1]
    scores = torch.rand(EQUALITY.prompts, EQUALITY.group, generator=torch.Generator().manual_seed(0))
    advantages = module.rollout.advantage(scores).flatten()
    reference = module.reference.logprobs(sampled, temperature=1.0)
    rows = Rollout(
        ids=sampled.ids,
        attention_mask=sampled.attention_mask,
        mask=sampled.mask,
        old_logprobs=sampled.logprobs,
        ref_logprobs=reference,
        advantages=advantages[:, None] * sampled.mask,
    )
    weights = module.loss.weights(rows.mask)
    gradient = module.loss.gradient_by_logprobs(rows, weights, on_policy=False)
    logprobs, _ = policy.logprobs_and_entropy(rows, temperature=1.0, loss_gradient=gradient)
    value, _ = module.loss(logprobs, None, rows, weights)
    value.backward()

    start = rows.ids.shape[1] - length
    inputs = {
        "prompt_ids": rows.ids[:, :start],
        "prompt_mask": rows.attention_mask[:, :start].long(),
        "completion_ids": rows.ids[:, start:],
        "completion_mask": rows.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": sampled.logprobs,
        "num_items_in_batch": rows.mask.sum(),
    }
    with torch.no_grad():
        scored = [
            trainer._get_per_token_logps_and_entropies(one, rows.ids, rows.attention_mask.long(), length)[0]
            for one in (model, trainer.ref_model)
        ]
    loss = trainer._compute_loss(model, inputs | {"ref_per_token_logps": scored[1]})
    loss.backward()
    gradients = [torch.cat([p.grad.flatten() for p in one.parameters()]) for one in (policy, model)]
    gaps = {
        "log-probabilities": (logprobs.detach() - scored[0])[rows.mask].abs().max() / scored[0][rows.mask].abs().max(),
        "reference": (reference - scored[1])[rows.mask].abs().max(),
        "loss": (value - loss).detach().abs() / loss.detach().abs(),
        "gradient": (gradients[0] - gradients[1]).norm() / gradients[1].norm(),
    }
    print("equality: " + ", ".join(f"{name} {float(gap):.1e}" for name, gap in gaps.items()), flush=True)
    if not max(map(float, gaps.values())) < TOLERANCE:
        raise SystemExit(f"the two differ by more than {TOLERANCE}")
    return {name: float(gap) for name, gap in gaps.items()}
