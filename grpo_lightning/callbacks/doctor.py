"""Says once what a run suffers from and what to try, and ends it if that is asked for and nothing can come of it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from grpo_lightning.callbacks.symptoms import RECENT, Course, findings
from grpo_lightning.console import write_json

log = logging.getLogger(__name__)


class Hopeless(RuntimeError):
    """A run was ended because nothing can come of it any more; its last step is saved."""


class Doctor(Callback):
    """Compares the metrics of every rollout with the rules of `symptoms`, and writes findings to ``health.json``.

    Args:
        directory: Where to write the file.
        rollouts: How many in a row that teach nothing are a standstill.
        stop: Whether to end a hopeless run, as a failure, after its checkpoint is written.

    Raises:
        ValueError: On construction, if ``rollouts`` is below 1.
        Hopeless: At the end of the fit, if ``stop`` has ended it.
    """

    def __init__(self, directory: str, *, rollouts: int, stop: bool) -> None:
        if rollouts < 1:
            raise ValueError(f"callbacks.doctor.rollouts={rollouts}: allowed is an integer >= 1")
        self.path = Path(directory) / "health.json"
        self.rollouts = rollouts
        self.stop = stop
        self.found: list[dict[str, Any]] = []
        self._course = Course(keep=max(RECENT, rollouts))
        self._reason: str | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        metrics: Mapping[str, float] = module.metrics  # type: ignore[assignment]
        rollout: Any = getattr(module, "rollout", None)
        self._course.add(metrics, rollout.scorer.outcome_name if rollout else None)
        for rule, value in findings(self._course, self.found, patience=self.rollouts):
            said = rule.said.format(value=value, rollouts=self.rollouts)
            finding = {
                "rule": rule.name,
                "step": int(module.completed_steps),  # type: ignore[arg-type]
                "metric": rule.metric,
                "value": value,
                "said": said,
                "advice": rule.advice,
                "hopeless": rule.is_hopeless,
            }
            self.found.append(finding)
            if trainer.is_global_zero:
                log.warning("step %d: %s; what helps: %s", finding["step"], said, rule.advice)
            self._write(trainer)
            if self.stop and rule.is_hopeless:
                self._reason = f"step {finding['step']}: {said}; what helps: {rule.advice} (callbacks.doctor.stop=true)"
                trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        metrics: Mapping[str, float] = module.metrics  # type: ignore[assignment]
        if trainer.state.fn == "fit" and module.validated_at == module.completed_steps and "val/pass@1" in metrics:
            self._course.validated(metrics["val/pass@1"])

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._reason:
            raise Hopeless(self._reason)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "course": dict(vars(self._course))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = list(state_dict["found"])
        self._course = Course(**(state_dict["course"] | {"keep": self._course.keep}))

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            write_json(self.path, {"findings": self.found})
