"""Random checkpoints of real architectures, read from disk, trained on prompts from a file."""

import json

import pytest
import torch

from grpo_lightning.run import Run
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.composed import build, composed

ROWS = [
    {"prompt": "The best food in the world is", "answer": "pizza"},
    {"prompt": "12 + 34 =", "answer": "46"},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Corgis are"}],
        "answer": "dogs",
    },
    {"prompt": "The meaning of life is", "answer": "42"},
]


@pytest.mark.parametrize(
    ("architecture", "chat"),
    [
        pytest.param(name, number % 2 == 0, marks=() if number < 2 else pytest.mark.slow)
        for number, name in enumerate(sorted(ARCHITECTURES))
    ],
)
def test_three_steps(architecture, chat, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3))
    overrides = [
        *("policy=hf", f"policy.path={write_checkpoint(tmp_path / 'model', architecture, chat=chat)}"),
        *("data=jsonl", f"data.path={file}", "data.prompts_per_step=2", "data.validation_size=2"),
        *("reward=[exact,custom]", "reward.custom.function._target_=tests.support.rewards.vowels"),
        *("rollout.group_size=3", "rollout.max_new_tokens=8", "validation.samples_per_prompt=2", "validation.ks=[1]"),
        *("steps=3", "optimizer.lr=1e-3", "trainer=cpu", f"run_dir={tmp_path / 'run'}"),
    ]
    run = Run(composed(*overrides), build(*overrides), overrides=[], directory_given=True)
    run.execute()
    module = run.module
    assert module.completed_steps == 3
    assert module.policy.uses_chat_template == chat
    assert module.metrics["policy/kl_divergence"] > 0
    assert 0.99 < module.metrics["policy/ratio_mean"] < 1.01
    start = dict(module.reference.named_parameters())
    moved = [not torch.equal(p, start[name]) for name, p in module.policy.named_parameters()]
    assert sum(moved) > 0.9 * len(moved)
