"""Options of Lightning's Trainer that would end or thin a run behind its back, or that are settings of this project."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.settings.contradictions import Reader

_STEPS = "the run ends after steps=N rollouts"
_VALIDATED = "the held-out prompts are data.validation_size=N"
_VALIDATIONS = "a validation comes every validation.every=N steps"

OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_steps": ((-1,), _STEPS),
    "max_epochs": ((-1,), _STEPS),
    "min_steps": ((None,), _STEPS),
    "min_epochs": ((None,), _STEPS),
    "max_time": (
        (None,),
        "`timeout -s TERM 4h`, before the command, ends a run after four hours, and its last complete step is saved",
    ),
    "fast_dev_run": ((False,), "steps=1 tries a run"),
    "overfit_batches": ((0, 0.0), "data.train_size=N trains on few prompts"),
    "limit_train_batches": ((None, 1.0), _STEPS),
    "limit_val_batches": ((None, 1.0), _VALIDATED),
    "val_check_interval": ((None, 1.0), _VALIDATIONS),
    "check_val_every_n_epoch": ((1,), _VALIDATIONS),
    "num_sanity_val_steps": ((-1, 0), f"-1 validates before the first step, 0 does not, and {_VALIDATED}"),
    "accumulate_grad_batches": ((1,), "module.microbatch_tokens=N divides a step's work, and never changes results"),
    "gradient_clip_val": ((None,), "module.max_grad_norm=X clips gradients"),
    "gradient_clip_algorithm": ((None,), "module.max_grad_norm=X clips gradients, by their norm"),
    "enable_checkpointing": ((True,), "~callbacks.checkpoint leaves checkpoints out"),
    "reload_dataloaders_every_n_epochs": ((1,), "prompts are loaded anew after every validation"),
    "use_distributed_sampler": ((False,), "all processes read the same prompts and divide them later"),
    "barebones": ((False,), "logger=none writes no metrics"),
    "model_registry": ((None,), "mode=export writes the policy"),
}
"""Option -> the values that change nothing here, and what does instead of others."""

_CHECKPOINTS = "grpo_lightning.checkpoint.io.AtomicCheckpointIO"
_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "single_device")
_SHARDING = ("deepspeed", "fsdp")  # how the names of strategies begin that have answers of their own


def trainer_problems(get: Reader) -> list[str]:
    """What is wrong with the options of a trainer; one that a program hands over is looked at when it begins."""
    trainer = get("trainer")
    if not isinstance(trainer, Mapping) or str(trainer.get("_target_")).startswith("grpo_lightning.composition."):
        return []
    return [*_options(trainer), *_plugins(trainer), *_cpu_devices(trainer), *_strategy(trainer)]


def _options(trainer: Mapping[str, Any]) -> Iterator[str]:
    for name, (allowed, instead) in OPTIONS.items():
        value = trainer.get(name, allowed[0])
        # 1 batch is another thing than 1.0 of all batches, and True is 1
        if not any(type(value) is type(one) and value == one for one in allowed):
            listed = " or ".join(_written(one) for one in allowed)
            yield f"trainer.{name}={_written(value)}: allowed is {listed}; {instead}"
    if (value := trainer.get("logger", [])) is None or value is True:
        yield f"trainer.logger={_written(value)}: allowed is a list or false; Lightning's own is logger=tensorboard"


def _plugins(trainer: Mapping[str, Any]) -> Iterator[str]:
    """A run whose checkpoints Lightning writes itself could lose them to a kill."""
    plugins = trainer.get("plugins")
    listed = plugins if isinstance(plugins, list | tuple) else [plugins]
    if not any(isinstance(one, Mapping) and one.get("_target_") == _CHECKPOINTS for one in listed):
        needed = f"{{_target_: {_CHECKPOINTS}}}"
        yield f"trainer.plugins={plugins}: allowed is a list with {needed}, which keeps checkpoints whole"


def _cpu_devices(trainer: Mapping[str, Any]) -> Iterator[str]:
    devices = trainer.get("devices")
    on_all = str(devices) == "-1"
    if trainer.get("accelerator") == "cpu" and (on_all or isinstance(devices, list | tuple) or "," in str(devices)):
        yield f"trainer.devices={devices}: allowed with trainer.accelerator=cpu is auto or a number of processes, >= 1"


def _strategy(trainer: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a strategy that is given by Lightning's name of it."""
    name = trainer.get("strategy")
    if isinstance(name, str) and name.lower() not in _STRATEGIES and not name.lower().startswith(_SHARDING):
        yield (
            f"trainer.strategy={name}: allowed are {', '.join(_STRATEGIES)}, and trainer=ddp or trainer=fsdp; forked "
            "and spawned processes cannot give back what the command has to know at its end"
        )


def _written(value: Any) -> str:
    """A value as a user writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
