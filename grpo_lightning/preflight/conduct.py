"""A preflight, from the first look to ``preflight.json``, and the memory that a run needs."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_lightning import memory
from grpo_lightning.config.redaction import redact_config
from grpo_lightning.console import log_line, wrap, write_json
from grpo_lightning.data import PromptData
from grpo_lightning.distributed.devices import is_first_process
from grpo_lightning.distributed.sharding import trainer_shards
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.module.base import StepModule
from grpo_lightning.preflight.look import look
from grpo_lightning.preflight.verdict import page

if TYPE_CHECKING:
    from lightning import Trainer

log = logging.getLogger(__name__)


def conduct(
    module: GRPOLightningModule,
    data: PromptData,
    trainer: "Trainer",
    *,
    prompts: int,
    predicted: Mapping[str, float],
    directory: Path,
) -> dict[str, Any]:
    """Look, say what was seen, and write it to ``preflight.json``; returns it.

    Args:
        module: The run's; it is measured on the trainer's device, and stays there.
        data: Its prompts.
        trainer: The run's.
        prompts: How many to ask.
        predicted: As in `look.look`.
        directory: The run's.
    """
    device = trainer.strategy.root_device
    data.setup("preflight")
    module.to(device)
    if module.reference is not None and module.reference.idle_device is None:
        module.reference.to(device)
    with trainer.precision_plugin.train_step_context():
        facts = redact_config(look(module, data, prompts=prompts, processes=trainer.world_size, predicted=predicted))
    if is_first_process():
        for line in [*page(facts), "", *facts["verdict"]]:
            log_line(line)
        write_json(directory / "preflight.json", facts)
    return facts


def announce_memory(
    config: Mapping[str, Any], module: StepModule, data: PromptData, trainer: "Trainer"
) -> dict[str, float]:
    """Print what the run is going to need, and warn where a GPU has less; returns the bytes by part, if known."""
    shape = module.policy.shape()
    if shape is None or not memory.is_predictable(config) or not is_first_process():
        return {}
    on_cpu = trainer.strategy.root_device.type == "cpu"
    first = [data.validation[number][0] for number in range(min(64, len(data.validation)))]
    use = memory.use_of(
        config,
        processes=trainer.world_size,
        is_sharded=trainer_shards(trainer),
        on_cpu=on_cpu,
        prompt_tokens=max(module.policy.count_tokens(first)),
    )
    parts = memory.predicted(shape, use)
    for line in wrap(memory.table(parts)):
        log_line(line)
    if not on_cpu and parts["peak"] > (available := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            available / memory.GiB,
        )
    return parts
