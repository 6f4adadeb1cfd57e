"""GRPO post-training of language models as a PyTorch Lightning module, composed by Hydra.

``compose`` makes a run of overrides and live objects; the other names are the types that programs deal with. They are
loaded when they are first used: worker processes of rewards import this package and need no torch.
"""

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from grpo_lightning.batch import Prompts, Rollout, Sampled, Sampling, Scored
    from grpo_lightning.composition import compose
    from grpo_lightning.module import GRPOLightningModule, SFTLightningModule
    from grpo_lightning.policy import Policy
    from grpo_lightning.run import Run

__all__ = [
    "GRPOLightningModule",
    "Policy",
    "Prompts",
    "Rollout",
    "Run",
    "SFTLightningModule",
    "Sampled",
    "Sampling",
    "Scored",
    "compose",
]

_HOME = {
    "GRPOLightningModule": "module",
    "Policy": "policy",
    "Prompts": "batch",
    "Rollout": "batch",
    "Run": "run",
    "SFTLightningModule": "module",
    "Sampled": "batch",
    "Sampling": "batch",
    "Scored": "batch",
    "compose": "composition",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_started() -> bool:
    """Whether this is ``python -m grpo_lightning.report`` or its like, of which nothing is imported yet but this."""
    if sys.argv[:1] != ["-m"]:
        return False
    options = [
        (one, after) for one, after in zip(sys.orig_argv, [*sys.orig_argv[1:], ""], strict=True) if one[:1] == "-"
    ]
    return any(f"m{__name__}" in one or (one[-1] == "m" and after.startswith(__name__)) for one, after in options)


if _is_started():
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a folder there may be called as a package that libraries look for
    from grpo_lightning.distributed.alone.grpo_lightning_path import leave_here

    leave_here()
