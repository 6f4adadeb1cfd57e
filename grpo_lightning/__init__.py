"""GRPO post-training of language models as a PyTorch Lightning module, composed by Hydra.

``compose`` makes a run of overrides and live objects; the other names are the types that programs deal with. They are
loaded when they are first used: worker processes of rewards import this package and need no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from grpo_lightning.composition import compose
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.module.sft import SFTLightningModule
    from grpo_lightning.policy import Policy
    from grpo_lightning.run import Run
    from grpo_lightning.types import Prompts, Rollout, Sampled, Sampling, Scored

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
    "Prompts": "types",
    "Rollout": "types",
    "Run": "run",
    "SFTLightningModule": "module.sft",
    "Sampled": "types",
    "Sampling": "types",
    "Scored": "types",
    "compose": "composition",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
