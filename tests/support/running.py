"""A whole run in this process, as train.py makes it, on a policy small enough for milliseconds."""

from pathlib import Path
from typing import Any

import torch

from grpo_lightning.config.settings import quote_value
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.run import Run
from tests.support.composed import build, composed

SMALL = (
    *("policy=scratch", "policy.hidden_size=16", "policy.intermediate_size=32", "policy.num_layers=1"),
    *("policy.num_heads=2", "data.prompts_per_step=2", "data.train_size=50", "data.validation_size=4"),
    *("validation.samples_per_prompt=4", "rollout.group_size=4", "rollout.max_new_tokens=10"),
    "rollout.stop=[a,e,i,o,u,A,B,C,D,E,F,G]",  # a random policy would never end: this makes lengths ragged
    "reward=[custom,format]",
    "reward.custom.function._target_=tests.support.rewards.vowels",
    "trainer=cpu",
    "steps=1",
)


def small_run(directory: Path, *overrides: str) -> GRPOLightningModule:
    """Train as ``overrides`` say, which may choose another policy, and return the module."""
    own_policy = any(override.startswith("policy=") for override in overrides)
    small = [setting for setting in SMALL if not (own_policy and setting.startswith("policy"))]
    arguments = [*small, f"run_dir={quote_value(str(directory))}", *overrides]
    run = Run(composed(*arguments), build(*arguments), overrides=list(overrides), directory_given=True)
    run.execute()
    module: Any = run.module
    return module


def small_module(*overrides: str) -> Any:
    """A module without a trainer."""
    return build(*SMALL, *overrides)("module")


def weights(module: Any) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    return {name: value.clone() for name, value in module.policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def contents(directory: Path) -> dict[Path, bytes]:
    """Path -> content of every file."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward: how many different characters a completion has."""
    return [float(len(set(text))) for text in completions]
