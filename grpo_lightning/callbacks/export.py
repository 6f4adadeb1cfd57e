"""The trained policy in Hugging Face format, with a model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning import __version__
from grpo_lightning.checkpoint import io
from grpo_lightning.distributed.strategies import full_state_dict, is_sharded
from grpo_lightning.policy import Policy

_MADE_BY = "trained with grpo-lightning"
_LOAD_MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
"""
_LOAD_STATE = """import torch

model.load_state_dict(torch.load("path/to/this/directory/model.pt", weights_only=True))
"""


class Export(Callback):
    """Exports the policy at the end of training.

    Args:
        directory: Where to write it.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            check_replaceable(self.directory)

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        weights = full_state_dict(module.policy) if is_sharded(module.policy) else None
        if trainer.is_global_zero:
            metrics, settings = module.metrics, module.settings
            export(module.policy, self.directory, weights=weights, metrics=metrics, settings=settings)


def export(
    policy: Policy,
    directory: Path,
    *,
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights, tokenizer and README.md to ``directory``: all of it or, when interrupted, nothing.

    Args:
        policy: The policy to write.
        directory: Where to write it; replaced if it exists.
        metrics: For the model card.
        settings: For the model card.
        weights: The policy's weights, where the policy itself holds a shard of them.

    Raises:
        ValueError: The directory holds something else than an export.
        CannotSave: It could not be written.
    """
    directory = check_replaceable(directory).resolve()  # replaces what a link leads to, not the link
    staged = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    needed = sum(weight.nbytes for weight in policy.parameters())
    kept = "the checkpoints stay, and mode=export checkpoint=last exports later"
    with io.explain_write_errors(directory, needed, kept=kept):
        try:
            staged.mkdir(parents=True)
            policy.export(staged, weights)
            config = staged / "config.json"
            version = json.loads(config.read_text())["transformers_version"] if config.exists() else None
            (staged / "README.md").write_text(model_card(metrics, settings, transformers=version), encoding="utf-8")
            for path in staged.iterdir():  # safetensors makes files that only their owner can read
                path.chmod(staged.stat().st_mode & 0o666)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)
        staged.replace(directory)


def check_replaceable(directory: Path, *, key: str = "callbacks.export.directory") -> Path:
    """Return ``directory`` if it does not exist, is empty or holds an export.

    Raises:
        ValueError: It is a file, or holds other files.
    """
    present, page = list(directory.iterdir()) if directory.is_dir() else [directory], directory / "README.md"
    is_export = page.is_file() and _MADE_BY in page.read_text(encoding="utf-8", errors="replace")
    if not directory.exists() or not present or (is_export and not any(path.is_dir() for path in present)):
        return directory
    raise ValueError(
        f"{key}={directory} holds other files than an export, which would be replaced: name a directory that does not "
        "exist or is empty"
    )


def model_card(metrics: Mapping[str, float], settings: Mapping[str, Any], *, transformers: str | None) -> str:
    """A model card with base model, settings and result; ``transformers`` is the version that wrote it, if one did."""
    base = settings.get("policy", {}).get("path", "a model of a program")
    library, use = ("transformers", _LOAD_MODEL) if transformers else ("pytorch", _LOAD_STATE)
    written = f" Written by transformers {transformers}; transformers 4 reads it, too." if transformers else ""
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()) if name.startswith("val/"))
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [grpo, reinforcement-learning]\n---\n\n"
        f"# A policy trained from `{base}`\n\n"
        f"Post-{_MADE_BY} {__version__}: group relative policy optimization "
        f"([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) and its variants.{written}\n\n"
        f"| metric | value |\n|---|---|\n{rows}\n\n"
        f"```python\n{use}```\n\n"
        f"<details><summary>Settings</summary>\n\n```json\n{json.dumps(settings, indent=2, default=str)}\n```\n\n"
        "</details>\n"
    )
