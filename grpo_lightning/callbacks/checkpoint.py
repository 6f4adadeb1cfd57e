"""The newest and the best checkpoint of a run, written between steps only, and the export at its end."""

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from grpo_lightning import __version__
from grpo_lightning.checkpoint import io, resume
from grpo_lightning.console import atomic_path, log_line, single_line, utc_now
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.distributed.strategies import full_state_dict, is_sharded
from grpo_lightning.logger import warn_on_failure
from grpo_lightning.policy import Policy
from grpo_lightning.policy.base import check_adapted

log = logging.getLogger(__name__)

_KEPT = "the checkpoints of earlier steps stay as before"


class RunCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run continues exactly, and ``best.ckpt``.

    Args:
        directory: Where the two files are written.
        every: Steps between checkpoints; one is also written after every validation and after the last step.
        monitor: The metric that says which is best; larger is better.
        events_directory: Where TensorBoard's files are; their lengths are recorded, so that a continued run can remove
            what was written later.

    Raises:
        CannotSave: Before the first step, if the disk has no room for two checkpoints; or one cannot be written.
    """

    def __init__(self, directory: str, *, every: int, monitor: str, events_directory: str) -> None:
        self.last = Path(directory) / "last.ckpt"
        self.best = Path(directory) / "best.ckpt"
        self.every = every
        self.monitor = monitor
        self.events_directory = Path(events_directory)
        self.best_value = float("-inf")
        self._saved_step: int | None = None
        self._seconds_before = 0.0
        self._started, self._started_at = time.perf_counter(), utc_now()
        self._bytes = 0
        self._data: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self._bytes = io.checkpoint_bytes(module.policy, module.optimizer, all_weights=module.base is None)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._data = data.fingerprint() if hasattr(data, "fingerprint") else None
        problem = io.room_problem(self.last.parent, checkpoint=self._bytes) if trainer.is_global_zero else None
        if problem := trainer.strategy.broadcast(problem):  # all processes end, none waits for another
            raise io.CannotSave(problem)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step, every = module.completed_steps, module.validation.every
        validates_now = step == module.steps or (every and step % every == 0)
        # A validation ends with a checkpoint of its own; after the last step other callbacks may replace the weights.
        if (step % self.every == 0 or trainer.should_stop) and not validates_now:
            self._save(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        # A continued run that starts between two validations skips the one before its first step.
        if trainer.state.fn != "fit" or module.validated_at != module.completed_steps:
            return
        # training metrics come with the first step, and those of held-out prompts where a reward applies
        value = module.metrics.get(self.monitor, float("-inf"))
        improved = value > self.best_value
        self.best_value = max(self.best_value, value)
        self._save(trainer, module)
        if improved and trainer.is_global_zero:
            with io.explain_write_errors(self.best, self._bytes, kept=_KEPT):
                _link(self.last, self.best)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if self._saved_step != module.completed_steps:  # a time limit or another callback has ended the run
            self._save(trainer, module)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Preempted) and exception.between_steps and trainer.state.fn == "fit":
            self._save(trainer, module)

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            with warn_on_failure(logger):
                logger.save()
                if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                    logger.experiment.flush()
        checkpoint["run"] = {
            "version": __version__,
            "config": module.settings,
            "best": self.best_value,
            "events": resume.event_lengths(self.events_directory),
            "started": self._started_at,
            "seconds": self._seconds_before + time.perf_counter() - self._started,
            "data": self._data,
        }

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.best_value = checkpoint["run"]["best"]
        self._seconds_before = checkpoint["run"].get("seconds", 0.0)
        self._started_at = checkpoint["run"].get("started") or self._started_at
        self._saved_step = checkpoint["step"]["completed"]

    def _save(self, trainer: Trainer, module: Any) -> None:
        with io.explain_write_errors(self.last, self._bytes, kept=_KEPT):
            trainer.save_checkpoint(self.last, weights_only=False)
        self._saved_step = module.completed_steps


def _link(source: Path, destination: Path) -> None:
    """Make ``destination`` a hard link to ``source``, which is only ever replaced; a copy where that is impossible."""
    with atomic_path(destination) as place:
        place.unlink(missing_ok=True)
        if source.is_symlink():  # to the directory of a sharded checkpoint
            place.symlink_to(source.readlink())
            return
        try:
            os.link(source, place)
        except OSError:
            shutil.copyfile(source, place)


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
        push_to_hub: NAME or ORG/NAME of a model on the hub, to which the export is uploaded.
        adapter: Whether to write the adapter alone, in peft's format, rather than the model with its adapter merged.
    """

    def __init__(self, directory: str, push_to_hub: str | None = None, *, adapter: bool = False) -> None:
        self.directory, self.push_to_hub, self.adapter = Path(directory), push_to_hub, adapter

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if self.adapter:
            check_adapted(module.policy, "callbacks.export.adapter=true")
        if stage == "fit" and trainer.is_global_zero:
            check_replaceable(self.directory)

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        weights = full_state_dict(module.policy) if is_sharded(module.policy) else None
        if trainer.is_global_zero:
            metrics, settings, adapter = module.metrics, module.settings, self.adapter
            export(module.policy, self.directory, weights=weights, metrics=metrics, settings=settings, adapter=adapter)
            if self.push_to_hub is not None:
                upload(self.directory, self.push_to_hub)


def export(
    policy: Policy,
    directory: Path,
    *,
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    adapter: bool = False,
) -> None:
    """Write weights, tokenizer and README.md to ``directory``: all of it or, when interrupted, nothing.

    Args:
        policy: The policy to write.
        directory: Where to write it; replaced if it exists.
        metrics: For the model card.
        settings: For the model card.
        weights: The policy's weights, where the policy itself holds a shard of them.
        adapter: As in `Export`.

    Raises:
        ValueError: The directory holds something else than an export, or there is no adapter to write.
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
            (policy.export_adapter if adapter else policy.export)(staged, weights)
            version = metadata.version("transformers") if adapter or (staged / "config.json").exists() else None
            (staged / "README.md").write_text(model_card(metrics, settings, version, adapter=adapter), encoding="utf-8")
            for path in staged.iterdir():  # safetensors makes files that only their owner can read
                path.chmod(staged.stat().st_mode & 0o666)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        shutil.rmtree(directory, ignore_errors=True)
        staged.replace(directory)


def upload(directory: Path, name: str) -> None:
    """Upload an export to a model on the hub, which is made as a private one if it is new; a failure is a warning."""
    from huggingface_hub import HfApi

    try:
        page = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=page.repo_id, folder_path=directory, commit_message="Upload the export of a run")
        log_line(f"uploaded to {page}")
    except Exception as error:  # of the token, the network or the hub
        command = shlex.join(["hf", "upload", name, str(directory), "--private"])
        log.warning("%s is not on the hub (%s); to upload it: %s", directory, single_line(str(error))[:300], command)


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


def model_card(
    metrics: Mapping[str, float], settings: Mapping[str, Any], transformers: str | None, *, adapter: bool
) -> str:
    """A model card with base model, settings and result; ``transformers`` is the version that wrote it, if one did."""
    base = settings.get("policy", {}).get("path", "a model of a program")
    library, use = ("transformers", _LOAD_MODEL) if transformers else ("pytorch", _LOAD_STATE)
    also = ", with the LoRA adapter alone" if adapter else "; transformers 4 reads it, too"
    written = f" Written by transformers {transformers}{also}." if transformers else ""
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
