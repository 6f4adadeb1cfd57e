"""A preflight from the first look to ``preflight.json`` and the page on the terminal."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from grpo_lightning.data import PromptData
from grpo_lightning.distributed.strategies import is_first
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.output.redaction import redacted
from grpo_lightning.output.summary import write_json
from grpo_lightning.output.terminal import say
from grpo_lightning.preflight.look import look
from grpo_lightning.preflight.verdict import page


def conduct(
    module: GRPOLightningModule,
    data: PromptData,
    *,
    prompts: int,
    processes: int,
    device: torch.device,
    precision: AbstractContextManager[Any],
    predicted: Mapping[str, float],
    directory: Path,
) -> dict[str, Any]:
    """Look, say what was seen, and write it to ``preflight.json``.

    Args:
        module: The run's.
        data: Its prompts.
        prompts: How many to ask.
        processes: Of the run; one of them measures.
        device: Where the module is measured, and stays.
        precision: Inside, arithmetic is that of a training step.
        predicted: As in `look.look`.
        directory: The run's.

    Returns:
        What `look.look` says.
    """
    data.setup("preflight")
    module.to(device)
    if module.reference is not None and module.reference.idle_device is None:
        module.reference.to(device)
    with precision:
        facts = redacted(look(module, data, prompts=prompts, processes=processes, predicted=predicted))
    if is_first():
        for line in [*page(facts), "", *facts["verdict"]]:
            say(line)
        write_json(directory / "preflight.json", facts)
    return facts
