"""A reference that follows the policy: refreshed at once, or as an exponential average."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning.distributed.sharding import load_whole_weights, whole_weights
from grpo_lightning.module import GRPOLightningModule


class ReferenceRefresh(Callback):
    """Moves the reference every so many rollouts:  reference = alpha * policy + (1 - alpha) * reference.

    With ``alpha=1`` it is iterative GRPO (arXiv:2402.03300, Algorithm 1: the reference becomes the policy); below, the
    soft update of TR-DPO (arXiv:2404.09656, Eq. 4), where alpha 0.6 every 512 steps serves well. The weights of a
    reference that has moved are part of checkpoints.

    Args:
        every: Rollouts between two refreshes.
        alpha: How far the reference moves towards the policy, in (0, 1].

    Raises:
        ValueError: On construction, if a number is out of range; when training starts, if there is no reference or its
            weights are not shaped like the policy's.
    """

    def __init__(self, *, every: int, alpha: float) -> None:
        if every < 1 or not 0 < alpha <= 1:
            raise ValueError(
                f"callbacks.reference: every={every}, alpha={alpha}; allowed are every >= 1 and 0 < alpha <= 1"
            )
        self.every = every
        self.alpha = alpha
        self._moved = False
        self._loaded: Mapping[str, Tensor] | None = None
        self._module: GRPOLightningModule | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not isinstance(module, GRPOLightningModule) or module.reference is None:
            raise ValueError(
                "callbacks.reference: there is no reference to refresh; set loss.kl_coef or rollout.kl_penalty"
            )
        self._module = module
        in_policy, in_reference = _shapes(module.policy), _shapes(module.reference)
        if in_policy != in_reference:
            other = sorted(set(in_policy.items()) ^ set(in_reference.items()))[0][0]
            raise ValueError(f"callbacks.reference: the reference is another model than the policy, see {other}")
        if self._loaded is not None:
            load_whole_weights(module.reference, self._loaded)
            self._loaded = None

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self._module is None or self._module.completed_steps % self.every:
            return
        policy = dict(self._module.policy.named_parameters())
        reference = self._module.reference or self._module.policy
        for name, weight in reference.named_parameters():  # tied weights once
            weight.lerp_(policy[name].to(weight), self.alpha)
        self._moved = True

    def state_dict(self) -> dict[str, Any]:
        if not self._moved or self._module is None or self._module.reference is None:
            return {}
        return {"reference": whole_weights(self._module.reference)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("reference")
        self._moved = self._loaded is not None


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
