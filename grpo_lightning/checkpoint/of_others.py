"""Checkpoints of other runs, which may be a stranger's: code of the user's own takes nothing from them unasked."""

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from grpo_lightning.output.terminal import name_of_file, one_line

log = logging.getLogger(__name__)

_PACKAGES = ("grpo_lightning", "lightning", "torch")
_OF_LAYERS = ("bitsandbytes", "peft", "torchmetrics", "transformers")
"""Packages whose layers do something of their own with weights."""
_TAKING = ("on_load_checkpoint", "load_state_dict")
_OBEYING = ("BaseFinetuning", "SpikeDetection")
"""Lightning's whose state names a file that is overwritten, or takes the place of an optimizer's groups."""
_OF_STRATEGIES = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")


def is_own(checkpoint: Path, directory: Path) -> bool:
    """Whether a checkpoint is one of the run in this directory."""
    return checkpoint.absolute().parent.resolve() == (directory / "checkpoints").resolve()


def check(checkpoint: Path, run: Any, mode: str) -> None:
    """Refuse another run's checkpoint where code of the user's own would be given what stands in it.

    The module is told whose it is.

    Args:
        checkpoint: The file or directory.
        run: The ``Run`` that is to begin with it.
        mode: What it does: to fit and validate, Lightning gives states to data and callbacks, too.

    Raises:
        ValueError: The module, one in it, the data, a callback or the strategy is of a class that takes a state, and
            that no package in ``trusted`` has.
    """
    run.module.continues = _is_of(checkpoint, run.directory, run.config)
    if run.module.continues:
        return
    takers, kinds = [run.module, run.data], []
    if mode in ("fit", "validate"):
        takers += [run.trainer.precision_plugin, *run.trainer.callbacks]
        kinds += [(type(run.trainer.strategy), name) for name in _OF_STRATEGIES]
    kinds += [(type(one), name) for one in takers for name in _TAKING]
    # Of a LambdaCallback they are the object's own.
    own = [
        (type(one), name, vars(one)[name]) for one in takers for name in _TAKING if name in getattr(one, "__dict__", ())
    ]
    _refuse(checkpoint, kinds, trusted := run.config.get("trusted") or (), own)
    _check_layers(checkpoint, run.module, trusted)


def check_weights(module: Any, checkpoint: Mapping[str, Any]) -> None:
    """Refuse another run's weights that are no tensors: a layer of the user's own may take them for anything.

    Args:
        module: Whose trainer has loaded the checkpoint.
        checkpoint: Its content.

    Raises:
        ValueError: There are such; names one.
    """
    weights = checkpoint.get("state_dict", {})
    others = [name for name, weight in weights.items() if not isinstance(weight, Tensor)]
    if others and not module.continues:
        raise ValueError(f"the checkpoint is of another run, and its weight {name_of_file(others[0])} is no tensor")


def leave_out(module: Any, checkpoint: dict[str, Any]) -> None:
    """Take out of a checkpoint what no run needs, and what may do harm.

    Its loops would say what a loader of the user's own takes for its state. States of Lightning's ``ModelCheckpoint``
    name files that are removed once there are newer ones: of URLs from wherever they are, and of another run's only
    those beside the checkpoint are taken.

    Args:
        module: Whose trainer has loaded the checkpoint.
        checkpoint: Its content.
    """
    checkpoint.pop("loops", None)
    trainer, states = module._trainer, checkpoint.get("callbacks")
    if trainer is None or not isinstance(states, dict):
        return
    home = os.path.realpath(os.path.dirname(os.path.abspath(str(trainer.ckpt_path))))
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and (state := states.get(callback.state_key)) is not None:
            named = [*state.get("best_k_models", ())]
            named += [value for key, value in state.items() if key.endswith("_path")]
            if not all(_is_plain(path) and (module.continues or _is_in(home, path)) for path in named if path):
                del states[callback.state_key]
                log.warning("what the checkpoint says of files elsewhere is left out, as they would be removed")


def _is_plain(path: Any) -> bool:
    return isinstance(path, str) and ":" not in path  # else it may be a URL, and what is there is always removed


def _is_in(directory: str, path: str) -> bool:
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) == directory


def check_network(network: nn.Module, weights: Mapping[str, Any], module: Any) -> None:
    """`check` and `check_weights` for weights that a callback keeps, of a network that is no part of the module.

    Args:
        network: That is to take them.
        weights: By name.
        module: Whose trainer has loaded the checkpoint.
    """
    check_weights(module, {"state_dict": weights})
    if not module.continues:
        _check_layers(Path(module.trainer.ckpt_path), network, module.settings.get("trusted") or ())


def _check_layers(checkpoint: Path, network: nn.Module, trusted: Collection[str]) -> None:
    """Refuse layers with code of the user's own that takes a state: some of them unpickle what is no weight."""
    layers = list(network.modules())
    kinds = [(type(one), name) for one in layers for name in ("load_state_dict", "set_extra_state")]
    _refuse(checkpoint, kinds, trusted)
    hooks = [
        (type(one), name.strip("_"), getattr(hook, "hook", hook))
        for one in layers
        for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
        for hook in getattr(one, name, {}).values()
    ]
    _refuse(checkpoint, [(type(one), "_load_from_state_dict") for one in layers], (*trusted, *_OF_LAYERS), hooks)


def _refuse(
    checkpoint: Path,
    kinds: Iterable[tuple[type, str]],
    trusted: Collection[str],
    functions: Iterable[tuple[type, str, Any]] = (),
) -> None:
    homes = {(kind.__name__, name, _home(kind, name)) for kind, name in kinds}
    homes |= {(kind.__name__, name, str(getattr(call, "func", call).__module__)) for kind, name, call in functions}
    own = sorted(one for one in homes if one[2].partition(".")[0] not in (*_PACKAGES, *trusted))
    if own:
        told = ", ".join(f"{kind} of {home} ({name})" for kind, name, home in own)
        packages = ",".join(sorted({home.partition(".")[0] for *_, home in own}))
        raise ValueError(
            f"checkpoint={name_of_file(str(checkpoint))}: is of another run, and may be a stranger's; what it says "
            f"would be given to {one_line(told)}; allowed is trusted=[{packages}] if you know it"
        )


def is_left_out(module: Any, checkpoint: Mapping[str, Any], carried: object) -> bool:
    """Whether groups that a checkpoint carries over are left out, with a warning: it is of another run, or other data.

    Rewards of the user's own would be given their columns in place of those of the user's data.

    Args:
        module: Whose trainer has loaded the checkpoint.
        checkpoint: Its content.
        carried: The groups in it, None for none.
    """
    if carried is None:
        return False
    data: Any = getattr(module._trainer, "datamodule", None)
    then = checkpoint.get("run", {}).get("data")  # not known of version 0.1
    has_other_data = bool(then) and hasattr(data, "fingerprint") and dict(then) != data.fingerprint()
    if module.continues and not has_other_data:
        return False
    of = "other data" if module.continues else "another run"
    log.warning("the groups that the checkpoint carries over are left out, since it is of %s", of)
    return True


def _is_of(checkpoint: Path, directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a checkpoint lies where the run writes its own, which may be elsewhere."""
    callback = (settings.get("callbacks") or {}).get("checkpoint")
    place = callback.get("directory") if isinstance(callback, Mapping) else None
    is_there = isinstance(place, str) and checkpoint.absolute().parent.resolve() == Path(place).resolve()
    return is_there or is_own(checkpoint, directory)


def _home(kind: type, name: str) -> str:
    """The module that defines a method of a class; this package's own for one that there is not."""
    base = next((base for base in kind.__mro__ if name in vars(base)), None)
    if base is None:
        return __name__
    obeys = any(one.__name__ in _OBEYING for one in base.__mro__)
    return kind.__module__ if obeys else base.__module__
