"""The trained policy in Hugging Face format, with a model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning import __version__
from grpo_lightning.policy import Policy
from grpo_lightning.policy.sharding import is_sharded, whole_weights


def export(
    policy: Policy,
    directory: Path,
    *,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, tokenizer and README.md to ``directory``: all of it or, when interrupted, none.

    Args:
        policy: What to write.
        directory: Replaced if it exists.
        metrics: Final values, for the card.
        config: The run's settings, for the card.
        weights: As in ``Policy.export``.
    """
    staged = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    policy.export(staged, weights)
    (staged / "README.md").write_text(card(metrics, config), encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    staged.replace(directory)


def card(metrics: Mapping[str, float], config: Mapping[str, Any]) -> str:
    """A model card: what it was made from, by which settings, with which result."""
    base = config.get("policy", {}).get("path", "unknown")
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()) if name.startswith("val/"))
    settings = json.dumps(config, indent=2, default=str)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [grpo, reinforcement-learning]\n---\n\n"
        f"# A policy trained from `{base}`\n\n"
        f"Post-trained with grpo-lightning {__version__}: group relative policy optimization "
        "([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) and its variants.\n\n"
        f"| metric | value |\n|---|---|\n{rows}\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")\n```\n\n'
        f"<details><summary>Settings</summary>\n\n```json\n{settings}\n```\n\n</details>\n"
    )


class Export(Callback):
    """Exports at the end of fit.

    Args:
        directory: Where to.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        policy: Any = module.policy
        weights = whole_weights(policy) if is_sharded(policy) else None
        if trainer.is_global_zero:
            told: dict[str, Any] = {"metrics": module.metrics, "config": module.config}
            export(policy, self.directory, weights=weights, **told)
