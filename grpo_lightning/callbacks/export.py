"""The trained policy in Hugging Face format, with a model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning import __version__
from grpo_lightning.distributed.sharding import is_sharded, whole_weights
from grpo_lightning.policy import Policy


def export(
    policy: Policy,
    directory: Path,
    *,
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, tokenizer and README.md to ``directory``: all of it or, when interrupted, none.

    Args:
        policy: The policy to write.
        directory: Where to write it; replaced if it exists.
        metrics: The final metrics, for the model card.
        settings: The run's settings, for the model card.
        weights: The policy's weights, where the policy itself holds a part of them only.
    """
    staged = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    policy.export(staged, weights)
    loads = (staged / "config.json").exists()  # a module of a program is no model of transformers
    (staged / "README.md").write_text(card(metrics, settings, is_hf=loads), encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    staged.replace(directory)


_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
"""
_LOAD_STATE = """import torch

model.load_state_dict(torch.load("path/to/this/directory/model.pt", weights_only=True))
"""


def card(metrics: Mapping[str, float], settings: Mapping[str, Any], *, is_hf: bool = True) -> str:
    """A model card that says what the policy was made from, by which settings, and with which result.

    Args:
        metrics: Final values.
        settings: The run's.
        is_hf: Whether transformers can load it; else it is the ``model.pt`` of a module of a program.
    """
    base = settings.get("policy", {}).get("path", "a model of a program")
    library, use = ("transformers", _LOAD) if is_hf else ("pytorch", _LOAD_STATE)
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()) if name.startswith("val/"))
    listed = json.dumps(settings, indent=2, default=str)
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [grpo, reinforcement-learning]\n---\n\n"
        f"# A policy trained from `{base}`\n\n"
        f"Post-trained with grpo-lightning {__version__}: group relative policy optimization "
        "([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) and its variants.\n\n"
        f"| metric | value |\n|---|---|\n{rows}\n\n"
        f"```python\n{use}```\n\n"
        f"<details><summary>Settings</summary>\n\n```json\n{listed}\n```\n\n</details>\n"
    )


class Export(Callback):
    """Exports the policy at the end of training.

    Args:
        directory: Where to write it.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        policy: Any = module.policy
        weights = whole_weights(policy) if is_sharded(policy) else None
        if trainer.is_global_zero:
            facts: dict[str, Any] = {"metrics": module.metrics, "settings": module.settings}
            export(policy, self.directory, weights=weights, **facts)
