"""Weights & Biases, which goes on with a run where the run's directory says so."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.known import keep, known

_NO_GIT = "WANDB_DISABLE_GIT"
_DEFAULTS = "config-defaults.yaml"
_OF_THE_DIRECTORY = ("wandb/settings", ".wandb/settings")


class WandbLogger(loggers.WandbLogger):
    """Logs to W&B, or with ``offline`` to files that ``wandb sync`` uploads.

    A run has the same identifier there after a restart. Steps that are made again appear there twice, with the same
    values but for times. It ends with the training, so that a next run in this process is another one.

    Args:
        save_dir: The run's directory, where W&B's files and the identifier are.
        options: The other arguments of Lightning's logger of this name.
    """

    def __init__(self, save_dir: str, **options: Any) -> None:
        self._file = Path(save_dir) / ".wandb_id"
        super().__init__(save_dir=save_dir, id=known(self._file) or secrets.token_hex(4), **options)
        self._wandb_init.pop("anonymous", None)  # which W&B warns about, whatever it is
        settings = self._wandb_init.get("settings") or {}
        if isinstance(settings, Mapping):  # a program's own are its own
            # It would run git in the run's directory, where a stranger's .git/config may name programs.
            # And it would write to .wandb in place of wandb where there is one.
            self._wandb_init["settings"] = {**settings, "disable_git": True, "use_dot_wandb": False}

    @property
    def experiment(self) -> Any:
        """The run of the wandb library."""
        is_new = self._experiment is None
        with _alone() if is_new else contextlib.nullcontext():
            if is_new:
                _pass_by_settings(is_offline=self._offline)
            run = super().experiment
        if is_new and self._experiment is not None:  # in the first process
            keep(self._file, str(self._id))
        return run

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the run there."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))
            self._experiment = None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Inside, W&B asks no git, and takes no values for the run's settings from the working directory.

    It reads them by whatever tags of YAML a program has registered, and would send them away.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_git())
        if os.path.lexists(_DEFAULTS):
            stack.enter_context(patch("wandb.sdk.wandb_config.Config._load_defaults", lambda _: None))
        yield


@contextlib.contextmanager
def _without_git() -> Iterator[None]:
    """Inside, W&B does not ask git either where the program lies, which it does before it looks at its settings."""
    before = os.environ.get(_NO_GIT)
    os.environ[_NO_GIT] = "true"
    try:
        yield
    finally:
        del os.environ[_NO_GIT]
        if before is not None:
            os.environ[_NO_GIT] = before


def _pass_by_settings(*, is_offline: bool) -> None:
    """Let W&B read no settings of the working directory, which may name the server that it sends the key to.

    Those in the home directory and in variables count. W&B reads the variables here, once, and would not see the one
    that Lightning sets later for a run without a network.
    """
    if any(os.path.lexists(name) for name in _OF_THE_DIRECTORY):
        import wandb

        with contextlib.chdir(sys.prefix):
            wandb.setup(wandb.Settings(mode="offline") if is_offline else None)
