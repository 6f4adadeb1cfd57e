"""One run: from checked settings to a trained, validated or exported policy and a summary of it."""

import gc
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.tree import Tree

from grpo_lightning import config as settings
from grpo_lightning import memory, resume
from grpo_lightning.callbacks import events
from grpo_lightning.callbacks.checkpoint import read, weights
from grpo_lightning.callbacks.export import export
from grpo_lightning.data import PromptData
from grpo_lightning.ranks import Preempted, lost_contact
from grpo_lightning.reward import check_columns
from grpo_lightning.step import StepModule
from grpo_lightning.strategy import check_processes, is_first, started_from_outside

log = logging.getLogger(__name__)

Build = Callable[[str], Any]
"""Name of a part -> the objects that its settings describe."""

PREEMPTED = 143
"""Exit status after SIGTERM: 128 + 15, as a shell reports it."""


def run(
    config: dict[str, Any], build: Build, *, overrides: Sequence[str], directory_given: bool, multirun: bool = False
) -> float:
    """Do what ``config`` says and leave ``summary.json``.

    Args:
        config: Resolved settings as plain values.
        build: Instantiates a part of them.
        overrides: What the user changed, for the summary.
        directory_given: Whether the user named the run directory, so that a run to continue can be in it.
        multirun: Whether this is one job of a sweep.

    Returns:
        ``metrics[sweep_metric]`` for hyper-parameter searches, which maximize it: always finite.

    Raises:
        ConfigError: The settings cannot work; nothing was loaded.
        SystemExit: With status 143, after SIGTERM.
    """
    settings.check(config)
    check_processes(config, directory_given=directory_given, multirun=multirun)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its hints about accelerators and products
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # what is logged is the same in all processes
    warnings.filterwarnings("ignore", ".*LeafSpec")  # between Lightning and PyTorch
    directory = Path(config["run_dir"])
    directory.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    summary: dict[str, Any] = {"metrics": {}, "steps": 0, "seconds": 0.0, "overrides": list(overrides)}
    module: StepModule | None = None
    checkpoint = resume.chosen(config, directory, directory_given=directory_given)
    try:
        lightning.seed_everything(config["seed"], workers=True, verbose=False)
        if is_first():
            announce(config)
        data: PromptData = build("data")
        data.load()
        check_columns(build("reward"), data.columns)
        module = build("module")
        module.config = settings.redacted(config)
        limit, count_tokens = config["data"]["max_prompt_length"], module.policy.count_tokens
        data.limit_prompts(lambda prompts: [length <= limit for length in count_tokens(prompts)])
        MODES[config["mode"]](config, build, module, data, checkpoint, directory)
        status = "finished"
    except (Preempted, SIGTERMException):
        status = "preempted"
    except BaseException as error:
        status = "failed"
        if lost := lost_contact(error):
            raise lost from error
        raise
    finally:
        if module is not None:
            summary |= {"metrics": dict(sorted(module.metrics.items())), "steps": module.completed_steps}
        summary |= {"seconds": round(time.perf_counter() - started, 3), "status": status}
        # nothing is lost before the module stands
        if is_first() and (module is not None or not (directory / "summary.json").exists()):
            _write_summary(directory, config["mode"], summary)
        del module
        gc.collect()  # a trainer and its parts refer to one another: a sweep would hold the weights of two jobs
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if status == "preempted":
        log.warning("asked to end: the last complete step is saved; checkpoint=last continues from it")
        # the first process is killed by Lightning when one that it has started ends otherwise than well
        sys.exit(PREEMPTED if is_first() or started_from_outside() else 0)
    return sweep_value(summary["metrics"], config)


def fit(
    config: dict[str, Any],
    build: Build,
    module: StepModule,
    data: PromptData,
    checkpoint: Path | None,
    directory: Path,
) -> None:
    """Train, from ``checkpoint`` if there is one."""
    trainer: Trainer = build("trainer")
    known = resume.known(checkpoint, module, trainer) if checkpoint else {"events": {}, "config": module.config}
    for key, then, now in resume.differences(known["config"], module.config):
        if key.startswith("optimizer."):
            log.warning("%s=%s is ignored: a continued run keeps its optimizer, whose value is %s", key, now, then)
        else:
            log.warning("%s was %s when the checkpoint was written and is %s now", key, then, now)
    if is_first():
        events.rewind(directory / "tensorboard", known["events"])
    announce_memory(config, module, data, trainer)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)


def validate(
    config: dict[str, Any],
    build: Build,
    module: StepModule,
    data: PromptData,
    checkpoint: Path | None,
    directory: Path,
) -> None:
    """Measure the policy, or ``checkpoint``'s, on the held-out prompts."""
    trainer: Trainer = build("trainer")
    trainer.validate(module, datamodule=data, ckpt_path=checkpoint, weights_only=True, verbose=False)


def write_export(
    config: dict[str, Any],
    build: Build,
    module: StepModule,
    data: PromptData,
    checkpoint: Path | None,
    directory: Path,
) -> None:
    """Write the policy, or ``checkpoint``'s, in Hugging Face format; by one process."""
    if not is_first():
        return
    if checkpoint:
        content = read(checkpoint)
        module.load_state_dict(weights(checkpoint), strict=module.strict_loading)
        module.on_load_checkpoint(content)
    export(module.policy, directory / "export", metrics=module.metrics, config=module.config)
    log.info("exported to %s", directory / "export")


MODES = {"fit": fit, "validate": validate, "export": write_export}


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
    rollout = config.get("rollout", {})
    if "rollout" in config["module"] and (rollout["top_p"] < 1 or rollout["top_k"] > 0 or rollout["min_p"] > 0):
        log.warning(
            "rollout.top_p=%s, top_k=%s, min_p=%s sample another distribution than the one that is scored and trained",
            *(rollout[name] for name in ("top_p", "top_k", "min_p")),
        )


def announce_memory(config: Mapping[str, Any], module: StepModule, data: PromptData, trainer: Trainer) -> None:
    """Print what the run is going to need, and warn where a GPU has less."""
    shape = module.policy.shape()
    if shape is None or "rollout" not in config["module"] or not is_first():
        return
    on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
    first = [data.validation[number][0] for number in range(min(64, len(data.validation)))]
    use = memory.use_of(
        config,
        processes=trainer.world_size,
        is_sharded=isinstance(trainer.strategy, ModelParallelStrategy),
        on_cpu=on_cpu,
        prompt_tokens=max(module.policy.count_tokens(first)),
    )
    parts = memory.predicted(shape, use)
    print(memory.table(parts), file=sys.stderr)
    if not on_cpu and parts["peak"] > (there := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            there / memory.GiB,
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
