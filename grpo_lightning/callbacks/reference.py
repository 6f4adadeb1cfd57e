"""A reference that follows the policy: replaced at once, or moved as an exponential average."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from grpo_lightning.distributed.sharding import full_state_dict, load_full_state_dict
from grpo_lightning.module import GRPOLightningModule


class ReferenceRefresh(Callback):
    """Moves the reference every so many rollouts:  reference = alpha * policy + (1 - alpha) * reference.

    With ``alpha=1`` it is iterative GRPO (arXiv:2402.03300, Algorithm 1: the reference becomes the policy); below, the
    soft update of TR-DPO (arXiv:2404.09656, Eq. 4), where alpha 0.6 every 512 steps works well. The weights of a
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
            raise ValueError(f"callbacks.reference: every={every}, alpha={alpha}; use every >= 1 and 0 < alpha <= 1")
        self.every = every
        self.alpha = alpha
        self._moved = False
        self._restored: Mapping[str, Tensor] | None = None
        self._module: GRPOLightningModule | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not isinstance(module, GRPOLightningModule) or module.reference is None:
            raise ValueError(
                "callbacks.reference: there is no reference to refresh; set loss.kl_coef or rollout.kl_penalty"
            )
        self._module = module
        shapes = [{name: w.shape for name, w in m.state_dict().items()} for m in (module.policy, module.reference)]
        if shapes[0] != shapes[1]:
            name = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
            raise ValueError(f"callbacks.reference: the reference is another model than the policy, see {name}")
        if self._restored is not None:
            load_full_state_dict(module.reference, self._restored)
            self._restored = None

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
        return {"reference": full_state_dict(self._module.reference)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict.get("reference")
        self._moved = self._restored is not None
