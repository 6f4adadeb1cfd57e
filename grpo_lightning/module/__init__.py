"""LightningModules: GRPO, and the supervised stage before it."""

from grpo_lightning.module.grpo import GRPOLightningModule
from grpo_lightning.module.sft import SFTLightningModule

__all__ = ["GRPOLightningModule", "SFTLightningModule"]
