"""Callbacks that end the process at a chosen moment, and that write down what was asked and what is done."""

import json
import os
import signal
from pathlib import Path

from lightning import Callback


class Kill(Callback):
    """``kill -9`` to this very process in step ``step`` (counted from 1).

    Args:
        step: The step that is not completed.
        moment: "rollout" (between two generated tokens), "update" (after the backward pass), "validation" (of the
            step before), "loading" (before the weights are restored) or "export" (after the last step).
        signal_number: 9 by default; 15 asks politely.
        rank: The process that is killed, of several.
    """

    def __init__(self, step: int, moment: str, signal_number: int = int(signal.SIGKILL), rank: int = 0) -> None:
        self.step, self.moment, self.signal_number, self.rank = step, moment, signal_number, rank
        self.checks = 0

    def kill(self):
        os.kill(os.getpid(), self.signal_number)

    def on_fit_end(self, trainer, pl_module):
        if self.moment == "export":
            self.kill()

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == self.rank and self.moment == "loading":
            self.kill()

    def on_fit_start(self, trainer, pl_module):
        if trainer.global_rank != self.rank:
            return
        check, apply = pl_module.loop.check, pl_module.apply_gradients

        def checked():
            moment = "rollout" if trainer.training else "validation"
            if moment == self.moment and pl_module.completed_steps + 1 == self.step and not trainer.sanity_checking:
                self.checks += 1
                if self.checks == 4:
                    self.kill()
            check()

        def applied():
            if self.moment == "update" and pl_module.completed_steps + 1 == self.step:
                self.kill()
            return apply()

        pl_module.loop.check, pl_module.apply_gradients = checked, applied


class Asked(Callback):
    """Appends the prompts of every training step to a file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with self.path.open("a") as file:
            file.write(json.dumps([pl_module.completed_steps + 1, list(batch.texts)]) + "\n")


class Phases(Callback):
    """Appends a line to a file whenever the first process comes to a rollout, an update, a save or a validation."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def note(self, trainer, phase):
        if trainer.global_rank == 0:
            with self.path.open("a") as file:
                file.write(f"{phase}\n")

    def setup(self, trainer, pl_module, stage):
        apply, save = pl_module.apply_gradients, trainer.save_checkpoint

        def applied():
            self.note(trainer, f"update of step {pl_module.completed_steps + 1}")
            return apply()

        def saved(*args, **kwargs):
            self.note(trainer, f"saving after step {pl_module.completed_steps}")
            save(*args, **kwargs)
            self.note(trainer, f"saved after step {pl_module.completed_steps}")

        pl_module.apply_gradients, trainer.save_checkpoint = applied, saved

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(trainer, f"rollout of step {pl_module.completed_steps + 1}")

    def on_validation_start(self, trainer, pl_module):
        self.note(trainer, f"validation after step {pl_module.completed_steps}")

    def on_fit_end(self, trainer, pl_module):
        self.note(trainer, "end")
