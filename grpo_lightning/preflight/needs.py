"""How much memory a run is going to need, said before it begins."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from grpo_lightning import memory
from grpo_lightning.data import PromptData
from grpo_lightning.distributed.sharding import trainer_shards
from grpo_lightning.distributed.strategies import is_first
from grpo_lightning.module.base import StepModule
from grpo_lightning.output.announcement import say_once

if TYPE_CHECKING:
    from lightning import Trainer

log = logging.getLogger(__name__)


def announce_memory(
    config: Mapping[str, Any], module: StepModule, data: PromptData, trainer: "Trainer"
) -> dict[str, float]:
    """Print what the run is going to need, and warn where a GPU has less; returns the bytes by part, if known."""
    shape = module.policy.shape()
    if shape is None or not memory.is_predictable(config) or not is_first():
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
    say_once(memory.table(parts))
    if not on_cpu and parts["peak"] > (available := torch.cuda.mem_get_info()[1]):
        log.warning(
            "the GPU has %.1f GiB: trainer=fsdp, policy.gradient_checkpointing=true, a smaller "
            "module.microbatch_tokens, loss.kl_coef=0 or policy.adapter need less",
            available / memory.GiB,
        )
    return parts
