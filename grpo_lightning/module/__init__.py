"""LightningModules: GRPO, and the supervised stage before it."""

from grpo_lightning.module.base import SFTLightningModule
from grpo_lightning.module.grpo import GRPOLightningModule

__all__ = ["GRPOLightningModule", "SFTLightningModule"]
