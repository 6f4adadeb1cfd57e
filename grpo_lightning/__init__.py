"""GRPO post-training of language models as a PyTorch Lightning module, composed by Hydra.

``compose`` makes a run of overrides and live objects; the other names are the types that programs deal with. They are
loaded when they are first used: worker processes of rewards import this package and need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from grpo_lightning.composition import compose
    from grpo_lightning.module import GRPOLightningModule, SFTLightningModule
    from grpo_lightning.policy import Policy
    from grpo_lightning.run import Run
    from grpo_lightning.types import Prompts, Rollout, Sampled, Sampling, Scored

_TYPES = ["Prompts", "Rollout", "Sampled", "Sampling", "Scored"]
_MODULES = {"GRPOLightningModule": "module", "Policy": "policy", "Run": "run", "SFTLightningModule": "module"}
_HOME = {**dict.fromkeys(_TYPES, "types"), **_MODULES, "compose": "composition"}

__all__ = ["GRPOLightningModule", "Policy", "Prompts", "Rollout", "Run", "SFTLightningModule", "Sampled", "Sampling"]
__all__ += ["Scored", "compose"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
