"""One run: from checked settings to a trained, validated or exported policy and a summary of it."""

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.tree import Tree

from grpo_lightning import __version__, memory, settings
from grpo_lightning.callbacks.export import export
from grpo_lightning.checkpoint import resume, tensorboard
from grpo_lightning.checkpoint.io import read, weights
from grpo_lightning.data import PromptData
from grpo_lightning.distributed.ranks import Preempted, lost_contact
from grpo_lightning.distributed.sharding import trainer_shards
from grpo_lightning.distributed.strategies import check_processes, is_first, started_from_outside
from grpo_lightning.module.base import StepModule
from grpo_lightning.reward import check_columns

log = logging.getLogger(__name__)

Build = Callable[..., Any]
"""(name of a part, further keywords of it) -> the objects that its settings describe."""

PREEMPTED = 143
"""Exit status after SIGTERM: 128 + 15, as a shell reports it."""


class Run:
    """Module, data and trainer of some settings, built when they are first asked for.

    Args:
        config: Resolved settings as plain values.
        build: Instantiates a part of them.
        overrides: What the user changed, for the summary.
        directory_given: Whether the user named the run directory, so that a run to continue can be in it.
        multirun: Whether this is one job of a sweep.
        on_start: Called with the run directory before it is first written to.

    Raises:
        ConfigError: The settings cannot work; nothing was loaded.
        ValueError: Several processes would do different things.
    """

    def __init__(
        self,
        config: dict[str, Any],
        build: Build,
        *,
        overrides: Sequence[str],
        directory_given: bool,
        multirun: bool = False,
        on_start: Callable[[Path], None] | None = None,
    ) -> None:
        settings.check(config)
        check_processes(config, directory_given=directory_given, multirun=multirun)
        self.config = config
        self.directory = Path(config["run_dir"])
        self._build = build
        self._overrides = list(overrides)
        self._directory_given = directory_given
        self._on_start = on_start

    @cached_property
    def data(self) -> PromptData:
        """The prompts, as a ``LightningDataModule``: rewards can be called with its columns."""
        lightning.seed_everything(self.config["seed"], workers=True, verbose=False)
        data: PromptData = self._build("data")
        data.load()
        check_columns(self._build("reward"), data.columns)
        return data

    @cached_property
    def module(self) -> StepModule:
        """The ``LightningModule``, whose policy knows how long prompts are: those of `data` that fit remain."""
        data = self.data
        module: StepModule = self._build("module", settings=settings.redacted(self.config))
        data.follow(lambda: module.completed_steps)
        limit, count_tokens = self.config["data"].get("max_prompt_length"), module.policy.count_tokens
        data.limit_prompts(lambda prompts: [limit is None or length <= limit for length in count_tokens(prompts)])
        return module

    @cached_property
    def trainer(self) -> Trainer:
        """Lightning's trainer with the run's callbacks and loggers."""
        trainer: Trainer = self._build("trainer")
        return trainer

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric, by name."""
        return dict(self.module.metrics) if "module" in vars(self) else {}

    def fit(self) -> "Run":
        """Train, from the checkpoint that the settings name if there is one; returns itself.

        Raises:
            ValueError: The run directory holds another run, or the checkpoint cannot be used.
            Preempted: SIGTERM; the last complete step is saved.
        """
        with self._recorded("fit") as checkpoint:
            if is_first():
                for caution in settings.cautions(self.config):
                    log.warning("%s", caution)
            module, trainer = self.module, self.trainer
            recorded: dict[str, Any] = {"events": {}, "config": module.settings, "version": __version__}
            if checkpoint:
                recorded = resume.known(checkpoint, trainer, is_adapter=module.base is not None)
            same = recorded.get("version") == __version__
            for key, then, now in resume.differences(recorded["config"], module.settings, same_version=same):
                if key.startswith("optimizer."):
                    log.warning(
                        "%s=%s is ignored: a continued run keeps its optimizer, whose value is %s", key, now, then
                    )
                else:
                    log.warning("%s was %s when the checkpoint was written and is %s now", key, then, now)
            if is_first():
                tensorboard.rewind(self.directory / "tensorboard", recorded["events"])
            announce_memory(self.config, module, self.data, trainer)
            trainer.fit(module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True)
        return self

    def validate(self) -> dict[str, float]:
        """Measure the policy, or the checkpoint's, on the held-out prompts; returns the metrics."""
        with self._recorded("validate") as checkpoint:
            module = self.module
            self.trainer.validate(module, datamodule=self.data, ckpt_path=checkpoint, weights_only=True, verbose=False)
        return self.metrics

    def export(self) -> Path:
        """Write the policy, or the checkpoint's, in Hugging Face format, by one process; returns the directory."""
        directory = self.directory / "export"
        with self._recorded("export") as checkpoint:
            module = self.module
            if is_first():
                if checkpoint:
                    module.load_state_dict(weights(checkpoint), strict=module.strict_loading)
                    module.on_load_checkpoint(read(checkpoint))
                export(module.policy, directory, metrics=module.metrics, settings=module.settings)
                log.info("exported to %s", directory)
        return directory

    def execute(self) -> float:
        """Do what ``mode`` says and return ``metrics[sweep_metric]``, which a sweep maximizes: always finite.

        Raises:
            SystemExit: With status 143, after SIGTERM.
        """
        if is_first():
            announce(self.config)
        try:
            {"fit": self.fit, "validate": self.validate, "export": self.export}[self.config["mode"]]()
        except Preempted:
            log.warning("asked to end: the last complete step is saved; checkpoint=last continues from it")
            # the first process is killed by Lightning when one that it has started ends otherwise than well
            sys.exit(PREEMPTED if is_first() or started_from_outside() else 0)
        return sweep_value(self.metrics, self.config)

    @contextmanager
    def _recorded(self, mode: str) -> Iterator[Path | None]:
        """Yields the checkpoint to start from; whatever happens inside, ``summary.json`` tells of it."""
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its hints about accelerators and products
        warnings.filterwarnings("ignore", ".*LeafSpec")  # between Lightning and PyTorch
        self.directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        trained_already = "module" in vars(self) and self.module.completed_steps > 0
        checkpoint = None
        if not trained_already:  # else the policy as it is now goes on, or is measured
            checkpoint = resume.chosen(
                self.config | {"mode": mode}, self.directory, directory_given=self._directory_given
            )
        if self._on_start is not None and is_first():
            self._on_start(self.directory)
        status = "failed"
        try:
            yield checkpoint
            status = "finished"
        except (Preempted, SIGTERMException) as error:
            status = "preempted"
            raise Preempted(str(error)) from error
        except BaseException as error:
            if lost := lost_contact(error):
                raise lost from error
            raise
        finally:
            stands = "module" in vars(self)
            # nothing is lost before the module stands
            if is_first() and (stands or not (self.directory / "summary.json").exists()):
                summary = {
                    "metrics": dict(sorted(self.metrics.items())),
                    "steps": self.module.completed_steps if stands else 0,
                    "seconds": round(time.perf_counter() - started, 3),
                    "overrides": self._overrides,
                    "status": status,
                }
                _write_summary(self.directory, mode, summary)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def sweep_value(metrics: Mapping[str, float], config: Mapping[str, Any]) -> float:
    """``metrics[sweep_metric]``, or the smallest float there is where it was not measured."""
    name = config["sweep_metric"]
    value = metrics.get(name, math.nan)
    if math.isfinite(value):
        return value
    if config["mode"] != "export":
        log.warning("sweep_metric=%s was not measured; there are %s", name, ", ".join(metrics))
    return -sys.float_info.max


def announce(config: Mapping[str, Any]) -> None:
    """Print the settings as a tree, and what a step amounts to."""
    console = Console(stderr=True)
    tree = Tree("settings")
    _grow(tree, settings.redacted(config))
    console.print(tree, markup=False, highlight=False, soft_wrap=True)
    console.print(settings.arithmetic(config), markup=False, highlight=False, soft_wrap=True)


def announce_memory(config: Mapping[str, Any], module: StepModule, data: PromptData, trainer: Trainer) -> None:
    """Print what the run is going to need, and warn where a GPU has less."""
    shape = module.policy.shape()
    if shape is None or not memory.is_predictable(config) or not is_first():
        return
    on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
    first = [data.validation[number][0] for number in range(min(64, len(data.validation)))]
    use = memory.use_of(
        config,
        processes=trainer.world_size,
        is_sharded=trainer_shards(trainer),
        on_cpu=on_cpu,
        prompt_tokens=max(module.policy.count_tokens(first)),
    )
    parts = memory.predicted(shape, use)
    print(memory.table(parts), file=sys.stderr)
    if not on_cpu and parts["peak"] > (available := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            available / memory.GiB,
        )


def _grow(tree: Tree, node: Mapping[str, Any]) -> None:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            _grow(tree.add(str(key)), value)
        else:
            tree.add(f"{key}: {value}")


def _write_summary(directory: Path, mode: str, summary: Mapping[str, Any]) -> None:
    """``summary.json``; a later validation or export of the same directory does not overwrite that of its training."""
    path = directory / "summary.json"
    if mode != "fit" and path.exists():
        path = directory / f"summary_{mode}.json"
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    staged.replace(path)
