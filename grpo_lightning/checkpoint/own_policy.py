"""The policy that a checkpoint is of: its settings, and whether its weights fit into a policy that is there."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.checkpoint.changes import differences
from grpo_lightning.checkpoint.io import read, weights
from grpo_lightning.config.redaction import REDACTED
from grpo_lightning.config.rules import LIVE
from grpo_lightning.config.tree import leaves, value_at

log = logging.getLogger(__name__)

_COMES_WITH = {
    "policy": ("rollout.max_new_tokens", "validation.max_new_tokens", "data.max_prompt_length"),
    "reference": ("loss.kl_coef", "rollout.kl_penalty"),
}
"""Part -> numbers that its settings file sets, or that contradict it if they are another's."""


def recalled(config: Mapping[str, Any], overrides: Sequence[str], current: Callable[[str], Any]) -> dict[str, Any]:
    """The settings of policy and reference with which a checkpoint is exported or validated: its own.

    What the user gives explicitly stays: a part that is chosen (``policy=NAME``) altogether, single keys one by one.

    Args:
        config: Has "mode", "checkpoint" and "run_dir" of this run.
        overrides: The user's, such as ``policy.path=DIR``; an object that a program hands over counts as ``policy=``.
        current: Dotted key -> its value in the settings as composed, resolved, or None.

    Returns:
        Dotted key -> value, to be set in the settings before they are resolved; nothing where a run trains, or there is
        no such checkpoint, which is told when it is opened.

    Raises:
        ValueError: A setting cannot be taken over, and the user has not given it; or the file is no checkpoint.
    """
    named = config["checkpoint"]
    if named is None or config["mode"] == "fit":
        return {}
    path = Path(config["run_dir"]) / "checkpoints" / "last.ckpt" if named == "last" else Path(named)
    if not path.exists():
        return {}
    recorded = read(path, map_location="meta").get("run", {}).get("config", {})
    try:
        updates = own_settings(recorded, overrides, current)
    except ValueError as error:
        raise ValueError(f"checkpoint={named}: {error}") from error
    for part, node in updates.items():
        if isinstance(node, Mapping) and "path" in node:
            log.info("%s.path=%s, as the checkpoint says", part, node["path"])
    return updates


def own_settings(
    recorded: Mapping[str, Any], overrides: Sequence[str], current: Callable[[str], Any]
) -> dict[str, Any]:
    """Policy and reference as a checkpoint's settings have them, and the numbers that come with them.

    Args:
        recorded: The checkpoint's settings.
        overrides: As in `recalled`.
        current: As in `recalled`.

    Raises:
        ValueError: A setting cannot be taken over, and the user has not given it; names the override that is missing.
    """
    given = [word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides]
    updates: dict[str, Any] = {}
    for part, numbers in _COMES_WITH.items():
        node = recorded.get(part)
        if part in given or not isinstance(node, Mapping):
            continue
        own = copy.deepcopy(dict(node))
        for key in (key for key in given if key.startswith(f"{part}.")):
            _put(own, key.split(".")[1:], current(key))
        _check_taken(part, own, given)
        updates[part] = own
        for key in numbers:
            value = value_at(recorded, key, default="")
            is_number = value is None or isinstance(value, int | float)
            # Sampling lengths of validation follow those of training unless they were given apart.
            follows = key == "validation.max_new_tokens" and value == value_at(recorded, "rollout.max_new_tokens")
            if is_number and key not in given and not follows and current(key) != value:
                updates[key] = value
    return updates


def _check_taken(part: str, own: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuse settings that say nothing, or that run code that was downloaded: a checkpoint may be, too."""
    if any(value == LIVE for key, value in leaves(own, {}, part) if key.endswith("._target_")):
        raise ValueError(
            f"its {part} was an object of a Python program: name {part}=NAME with its settings, or give "
            f"compose({part}=…) such an object"
        )
    nested = [key for key, _ in leaves(own, {}, part) if key.endswith(("._target_", ".trust_remote_code"))]
    if odd := [key for key in nested if key.count(".") > 1]:
        raise ValueError(f"its settings have {odd[0]}, which would build something else: give {part}=NAME yourself")
    if own.get("trust_remote_code") and not {f"{part}.trust_remote_code", f"{part}.path"} <= {*given}:
        raise ValueError(
            f"it was trained with {part}.trust_remote_code=true and {part}.path={own.get('path')}, whose code would "
            "run: give both again if you trust it"
        )
    asked = {
        key: value
        for key, value in leaves(own, {}, part)
        if key not in given
        and isinstance(value, str)
        and (
            any(sign in value for sign in (REDACTED, "${"))
            or (key.endswith("attn_implementation") and "/" in value)  # a kernel of the hub
        )
    }
    if asked:
        raise ValueError(
            f"its {' and '.join(f'{key} is {value}' for key, value in asked.items())}, which is not taken over: give "
            f"{' '.join(f'{key}=…' for key in asked)} yourself"
        )


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = node.get(name)
        node[name] = node = dict(inner) if isinstance(inner, Mapping) else {}
    node[path[-1]] = value


def check_weights(path: Path, module: Any) -> None:
    """Check that a checkpoint's weights have the names and shapes of a module's, before they are loaded.

    Args:
        path: The checkpoint; of one in parts nothing is known here.
        module: A ``StepModule``, with its weights whole.

    Raises:
        ValueError: They differ; names the settings of the policy that do.
    """
    content = read(path, map_location="meta")
    stored, own = (
        {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
        for state in (content.get("state_dict") or {}, module.state_dict())
    )
    wrong = [
        f"{name} {stored.get(name, 'absent')} instead of {own.get(name, 'absent')}"
        for name in sorted({*stored, *own} if module.strict_loading else {*stored} & {*own})
        if stored.get(name) != own.get(name)
    ]
    if not stored or not wrong:
        return
    then: Mapping[str, Any] = content.get("run", {}).get("config", {}).get("policy", {})
    now: Mapping[str, Any] = module.settings.get("policy", {})
    shared = set(then) & set(now) if then.get("_target_") != now.get("_target_") else {*then, *now}
    changed = [
        f"{key} was {before} and is {after}"
        for key, before, after in differences(then, now, prefix="policy")
        if not key.endswith(("seed", "prompt", "prompts")) and key.split(".")[1] in shared
    ]
    reason = f"its policy has other settings: {', '.join(changed)}" if then and changed else "it is of another model"
    raise ValueError(
        f"checkpoint={path}: {reason} ({len(wrong)} weights differ, such as {wrong[0]}); give the settings with which "
        "it was trained"
    )


def load(module: Any, checkpoint: Path | None) -> None:
    """Take over the weights and the progress of a checkpoint, if there is one, without a trainer."""
    if checkpoint:
        held = weights(checkpoint)
        module.on_load_checkpoint(read(checkpoint, mmap=True) | {"state_dict": held})
        module.load_state_dict(held, strict=module.strict_loading)
