"""The trained policy in Hugging Face format, with a model card."""

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning import __version__
from grpo_lightning.checkpoint import disk
from grpo_lightning.distributed.sharding import is_sharded, whole_weights
from grpo_lightning.output.links import followed
from grpo_lightning.output.terminal import one_line
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

    Raises:
        ValueError: The directory holds something else than an export.
        CannotSave: It could not be written.
    """
    directory = check_replaceable(directory)  # the end of a link is replaced, not the link
    staged = _staged(directory)
    shutil.rmtree(staged, ignore_errors=True)
    needed = disk.weights_bytes((weights or policy.state_dict()).values())
    with disk.telling(directory, needed, kept=lambda: _LATER):
        try:
            staged.mkdir(parents=True)
            policy.export(staged, weights)
            loads = (staged / "config.json").exists()  # a module of a program is no model of transformers
            (staged / "README.md").write_text(card(metrics, settings, is_hf=loads), encoding="utf-8")
            _open_to_umask(staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)
        staged.replace(directory)


def check_replaceable(directory: Path, *, key: str = "callbacks.export.directory") -> Path:
    """Refuse to replace a directory that holds something else than an export.

    Returns:
        Where it leads, with all links followed.

    Raises:
        ValueError: It is a file, or a directory with anything that no export writes, or without its model card, or it
            cannot be told where it leads.
    """
    place, foreign = followed(directory), None
    if place is not None and not directory.is_symlink() and not os.path.lexists(place):
        return place
    if place is not None and place.is_dir():
        card_there = place / "README.md"
        if not any(place.iterdir()):
            return place
        is_ours = card_there.is_file() and _MADE_BY in card_there.read_text(encoding="utf-8", errors="replace")
        if is_ours and (foreign := _foreign(place)) is None:
            return place
    also = f", and nothing else, such as {one_line(foreign.name)}" if foreign else ""
    raise ValueError(
        f"{key}={directory}: allowed is a directory that does not exist, is empty, or holds an earlier export, which is"
        f" replaced{also}"
    )


def _foreign(directory: Path) -> Path | None:
    """Something in a directory that no export writes; None if there is nothing such."""
    for path in sorted(directory.iterdir()):
        is_file = path.is_file() and not path.is_symlink()
        if not is_file or not any(fnmatchcase(path.name, pattern) for pattern in _WRITTEN):
            return path
    return None


def _staged(directory: Path) -> Path:
    """Where an export is put together, beside its place: a name that is free, or holds an export that was cut short."""
    names = (directory.with_name(f".{directory.name}{number or ''}.partial") for number in itertools.count())
    return next(
        path
        for path in names
        if not path.is_symlink() and (not path.exists() or (path.is_dir() and _foreign(path) is None))
    )


def _open_to_umask(directory: Path) -> None:
    """Give all files the mode that new ones have: safetensors lets nobody else read its own."""
    mode = directory.stat().st_mode & 0o666
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


_LATER = "the checkpoints stay, and mode=export checkpoint=last exports later"
_WRITTEN = (
    *("README.md", "config.json", "generation_config.json", "preprocessor_config.json", "model.pt"),
    *("*.safetensors", "*.safetensors.index.json", "chat_template.*", "tokenizer*.json", "tokenizer*.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece*.model", "source.spm", "target.spm", "normalizer.json"),
)
"""The names of what transformers and this program write for a model and its tokenizer."""
_MADE_BY = "trained with grpo-lightning"

_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
"""
_LOAD_STATE = """import torch

model.load_state_dict(torch.load("path/to/this/directory/model.pt", weights_only=True))
"""


def _plain(text: Any) -> str:
    """A text that may be a stranger's, as one piece of a line of Markdown."""
    return one_line(str(text)).translate(str.maketrans("`|<>[]", "'/()()"))


def card(metrics: Mapping[str, float], settings: Mapping[str, Any], *, is_hf: bool = True) -> str:
    """A model card that says what the policy was made from, by which settings, and with which result.

    Args:
        metrics: Final values.
        settings: The run's.
        is_hf: Whether transformers can load it; else it is the ``model.pt`` of a module of a program.
    """
    base = _plain(settings.get("policy", {}).get("path", "a model of a program"))
    library, use = ("transformers", _LOAD) if is_hf else ("pytorch", _LOAD_STATE)
    rows = "\n".join(
        f"| {_plain(name)} | {value:.4g} |" for name, value in sorted(metrics.items()) if name.startswith("val/")
    )
    listed = json.dumps(settings, indent=2, default=str)
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [grpo, reinforcement-learning]\n---\n\n"
        f"# A policy trained from `{base}`\n\n"
        f"Post-{_MADE_BY} {__version__}: group relative policy optimization "
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

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            check_replaceable(self.directory)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        policy: Any = module.policy
        weights = whole_weights(policy) if is_sharded(policy) else None
        if trainer.is_global_zero:
            facts: dict[str, Any] = {"metrics": module.metrics, "settings": module.settings}
            export(policy, self.directory, weights=weights, **facts)
