"""The policy of a checkpoint: its settings, whether its weights fit, and checkpoints that hold an adapter only."""

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from grpo_lightning.checkpoint.io import read, read_weights
from grpo_lightning.checkpoint.resume import belongs_to, config_diff
from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.settings import leaves, value_at
from grpo_lightning.console import REDACTED

log = logging.getLogger(__name__)

_NUMBERS = {
    "policy": ("rollout.max_new_tokens", "validation.max_new_tokens", "data.max_prompt_length"),
    "reference": ("loss.kl_coef", "rollout.kl_penalty"),
}
"""Part -> numbers that are taken over with it."""


def policy_settings(
    config: Mapping[str, Any], overrides: Sequence[str], current: Callable[[str], Any]
) -> dict[str, Any]:
    """The settings of policy and reference in the checkpoint that is exported or validated, or trained on elsewhere.

    What the user gives stays: a part that is chosen (``policy=NAME``) completely, single keys one by one. A run that
    trains takes the policy alone, and nothing where it continues in its own directory or has an experiment's policy.

    Args:
        config: Has "mode", "checkpoint" and "run_dir" of this run.
        overrides: The user's, such as ``policy.path=DIR``; an object that a program gives counts as ``policy=``.
        current: Dotted key -> its resolved value in the settings as composed, or None.

    Returns:
        Dotted key -> value, to be set in the settings before they are resolved; nothing where there is no such
        checkpoint, which is an error when it is opened.

    Raises:
        ValueError: A setting cannot be taken over, and the user has not given it; or the file is no checkpoint.
    """
    name = config["checkpoint"]
    if name is None:
        return {}
    path = Path(config["run_dir"]) / "checkpoints" / "last.ckpt" if name == "last" else Path(name)
    given_keys = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    trains = config["mode"] == "fit"
    if not path.exists() or (trains and (belongs_to(path, Path(config["run_dir"])) or "experiment" in given_keys)):
        return {}
    recorded = read(path, map_location="meta").get("run", {}).get("config", {})
    updates: dict[str, Any] = {}
    for part, numbers in {"policy": ()}.items() if trains else _NUMBERS.items():
        node = recorded.get(part)
        if part in given_keys or not isinstance(node, Mapping):
            continue
        settings = copy.deepcopy(dict(node))
        for key in (key for key in given_keys if key.startswith(f"{part}.")):
            _put(settings, key.split(".")[1:], current(key))
        try:
            _check_transferable(part, settings, given_keys)
        except ValueError as error:
            raise ValueError(f"checkpoint={name}: {error}") from error
        updates[part] = settings
        if "path" in settings:
            log.info("%s.path=%s, as in the checkpoint", part, settings["path"])
        for key in numbers:
            value = value_at(recorded, key, default="")
            is_number = value is None or isinstance(value, int | float)
            # Sampling lengths of validation follow those of training unless they were given separately.
            follows = key == "validation.max_new_tokens" and value == value_at(recorded, "rollout.max_new_tokens")
            if is_number and key not in given_keys and not follows and current(key) != value:
                updates[key] = value
    return updates


def _check_transferable(part: str, settings: Mapping[str, Any], given_keys: Sequence[str]) -> None:
    """Refuse settings that were objects or secrets, and those that run code, since a checkpoint may be downloaded."""
    values = [(key, value) for key, value in leaves(settings, part) if key not in given_keys]
    if any(value == LIVE for _, value in values):
        raise ValueError(
            f"its {part} was an object of a Python program: name {part}=NAME with its settings, or give "
            f"compose({part}=…) such an object"
        )
    for key, value in values:
        runs_code = (key.endswith(".trust_remote_code") and value) or (
            key.endswith("attn_implementation") and "/" in str(value)  # a kernel of the hub
        )
        if runs_code or (isinstance(value, str) and (REDACTED in value or "${" in value)):
            code = f", which would run code ({part}.path={settings.get('path')})" if runs_code else ""
            raise ValueError(f"its {key} is {value}{code}, which is not taken over: give {key}=… yourself")


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = node.get(name)
        node[name] = node = dict(inner) if isinstance(inner, Mapping) else {}
    node[path[-1]] = value


def check_weights(path: Path, module: Any) -> None:
    """Check that a checkpoint's weights have the names and shapes of a module's; a sharded one is not checked.

    Raises:
        ValueError: They differ; names the settings of the policy that do.
    """
    content = read(path, map_location="meta")
    stored, expected = (
        {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
        for state in (content.get("state_dict") or {}, module.state_dict())
    )
    names = {*stored, *expected} if module.strict_loading else {*stored} & {*expected}
    differing = sorted(name for name in names if stored.get(name) != expected.get(name))
    if not stored or not differing:
        return
    first = f"{differing[0]} {stored.get(differing[0], 'absent')} instead of {expected.get(differing[0], 'absent')}"
    before: Mapping[str, Any] = content.get("run", {}).get("config", {}).get("policy", {})
    changed = [
        f"{key} was {old} and is {new}"
        for key, old, new in config_diff(before, module.settings.get("policy", {}), prefix="policy")
        if not key.endswith(("seed", "prompt", "prompts"))
    ]
    reason = f"its policy has other settings: {', '.join(changed)}" if before and changed else "it is of another model"
    raise ValueError(
        f"checkpoint={path}: {reason} ({len(differing)} weights differ, such as {first}); give the settings with which "
        "it was trained"
    )


def load_checkpoint(module: Any, checkpoint: Path | None) -> None:
    """Load the weights and the progress of a checkpoint, if there is one, without a trainer."""
    if checkpoint:
        weights = read_weights(checkpoint)
        module.on_load_checkpoint(read(checkpoint, mmap=True) | {"state_dict": weights})
        module.load_state_dict(weights, strict=module.strict_loading)


def trained_names(policy: nn.Module) -> set[str]:
    """The names of the trained weights in the state dict of a module that has the policy as ``policy``."""
    return {f"policy.{name}" for name, weight in policy.named_parameters() if weight.requires_grad}


def base_fingerprint(policy: nn.Module) -> str | None:
    """A hash of the name, the shape and up to 64 values of every frozen weight; None where all are trained."""
    frozen = [(name, weight) for name, weight in policy.named_parameters() if not weight.requires_grad]
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in frozen:
        flat = weight.detach().flatten()
        values = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest() if frozen else None


def check_adapter(policy: nn.Module, base: str | None, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint's adapter belongs to a policy's frozen weights.

    Args:
        policy: The policy into which it is loaded.
        base: The policy's `base_fingerprint`.
        checkpoint: The checkpoint's content.

    Raises:
        ValueError: It holds an adapter of another base, or lacks weights of this policy's adapter.
    """
    stored: Any = checkpoint.get("state_dict", {})
    if base is None:
        if "base" in checkpoint:
            raise ValueError("the checkpoint holds an adapter only: set policy.adapter as it was in its run")
        return
    missing = sorted(trained_names(policy) - stored.keys()) if stored else []
    if missing:
        raise ValueError(f"the checkpoint lacks weights that policy.adapter has, {len(missing)} such as {missing[0]}")
    is_complete = {f"policy.{name}" for name in policy.state_dict()} <= stored.keys()
    stored_base = checkpoint.get("base", base if is_complete else None)
    if stored_base != base:
        raise ValueError(
            f"the checkpoint's adapter was trained on other base weights ({stored_base}) than policy.path has"
        )
