"""Checkpoints of other runs, which may be a stranger's: code of the user's own takes nothing from them unasked."""

from pathlib import Path
from typing import Any

from grpo_lightning.output.terminal import name_of_file, one_line

_PACKAGES = ("grpo_lightning", "lightning", "torch")
_TAKING = ("on_load_checkpoint", "load_state_dict")


def is_own(checkpoint: Path, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in this directory."""
    return checkpoint.absolute().parent.resolve() == (directory / "checkpoints").resolve()


def check(checkpoint: Path, run: Any, mode: str) -> None:
    """Refuse another run's checkpoint where code of the user's own would be given what stands in it.

    Args:
        checkpoint: The file or directory.
        run: The ``Run`` that is to begin with it.
        mode: What it does: to fit and validate, Lightning gives states to data and callbacks, too.

    Raises:
        ValueError: The module, one in it, the data or a callback is of a class that takes a state, and that no package
            in ``trusted`` has.
    """
    if is_own(checkpoint, run.directory):
        return
    takers = (run.module, run.data, *(run.trainer.callbacks if mode in ("fit", "validate") else ()))
    trusted = run.config.get("trusted") or ()
    kinds = [(type(one), name) for one in takers for name in _TAKING]
    kinds += [(type(one), "set_extra_state") for one in run.module.modules()]  # it may be a pickle to these
    homes = {(kind.__name__, name, _home(kind, name)) for kind, name in kinds}
    own = sorted(one for one in homes if one[2].partition(".")[0] not in (*_PACKAGES, *trusted))
    if own:
        told = ", ".join(f"{kind} of {home} ({name})" for kind, name, home in own)
        packages = ",".join(sorted({home.partition(".")[0] for *_, home in own}))
        raise ValueError(
            f"checkpoint={name_of_file(str(checkpoint))}: is of another run, and may be a stranger's; what it says "
            f"would be given to {one_line(told)}; allowed is trusted=[{packages}] if you know it"
        )


def is_of_its_run(module: Any) -> bool:
    """Whether what a module's trainer loads is of the run's own; a program that has no run knows what it loads."""
    trainer, directory = module._trainer, module.settings.get("run_dir")
    path = trainer and trainer.ckpt_path
    return directory is None or (bool(path) and is_own(Path(path), Path(directory)))


def _home(kind: type, name: str) -> str:
    """The module that defines a method of a class; this package's own for one that there is not."""
    return next((base.__module__ for base in kind.__mro__ if name in vars(base)), __name__)
