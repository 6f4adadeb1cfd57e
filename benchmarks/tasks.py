"""Which tasks of reasoning_gym give a model a signal: sampled answers to a few problems of each, no step.

Groups of equal rewards have an advantage of 0 and teach nothing. ``mixed`` are those in which some answers are right
and some wrong, ``signal`` those with any difference, as verifiers give some wrong answers a little.
"""

import tempfile
from argparse import Namespace
from typing import Any

from reasoning_gym.factory import DATASETS
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_lightning
from grpo_lightning.data.datamodule import collate
from grpo_lightning.preflight import signal_fraction

SETTINGS = (
    *("data.max_prompt_length=256", "data.validation_size=1", "reward=[accuracy]", "loss.kl_coef=0"),
    *("data.prompts_per_step=1", "rollout.group_size=8", "rollout.max_new_tokens=48", "logger=none"),
    "module.self_check=false",
)


def run(options: Namespace) -> dict[str, Any]:
    """Rows of a table for all tasks, or those named by ``--cases``, answered by ``--model``."""
    if not options.model:
        raise SystemExit("tasks: --model=DIR names the model")
    tasks = sorted(options.cases or DATASETS)[: 2 if options.smoke else None]
    policy = AutoModelForCausalLM.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    figures = {}
    for task in tasks:
        try:
            figures[task] = measure(policy, task, 2 if options.smoke else options.prompts)
            print(task, *(f"{name} {value:.2f}" for name, value in figures[task].items()), flush=True)
        except (RuntimeError, ValueError) as error:  # such as prompts that are all too long
            print(f"{task}: {str(error).splitlines()[0]:.100}", flush=True)
    names = ("right", "mixed", "score", "signal", "tokens", "truncated")
    print(f"| task | {' | '.join(names)} |\n|{'---|' * 7}")
    for task, row in sorted(figures.items(), key=lambda item: (-item[1]["mixed"], -item[1]["signal"])):
        cells = [f"{row[name]:.2f}" for name in names]
        print(f"| {' | '.join([task, *cells])} |", flush=True)
    return figures


def measure(policy: Any, task: str, prompts: int) -> dict[str, float]:
    """Means over some prompts of the task, each answered by a group of completions."""
    built = grpo_lightning.compose(*SETTINGS, f"data.task={task}", policy=policy, run_dir=tempfile.mkdtemp())
    built.data.load()
    module = built.module
    module.begin_without_trainer()
    batch = collate(built.data.train, range(min(prompts, len(built.data.train))))
    scored = module.collect(batch, module.rollout, module.context("tasks", 0)).scored
    right = scored.right.float().view(len(scored.prompts), -1)
    shares = right.mean(-1)
    return {
        "score": float(scored.rewards["accuracy"].nanmean()),
        "right": float(shares.mean()),
        "mixed": float(((shares > 0) & (shares < 1)).float().mean()),
        "signal": signal_fraction(scored.rewards["total"].view(right.shape)),
        "tokens": float(scored.sampled.mask.sum(-1).float().mean()),
        "truncated": 1 - sum(scored.sampled.finished) / len(scored.sampled.finished),
    }
