"""What a continued run says of settings that are others than when its checkpoint was written."""

import logging
from collections.abc import Mapping
from typing import Any

from grpo_lightning.config.tree import leaves

log = logging.getLogger(__name__)

_MAY_CHANGE = {
    *("run_dir", "checkpoint", "steps", "callbacks", "logger", "mode", "tags", "task_name", "preflight", "trusted"),
    *("plugins", "default_root_dir"),
}
"""Names in the keys of settings that may be others when a run is continued."""
_COPIES = {
    "data.validate_every": "validation.every",
    "data.tries": "rollout.max_tries",
}
"""Settings that have another's value under another name."""


def tell(
    recorded: Mapping[str, Any], now: Mapping[str, Any], *, version: str, data: Mapping[str, Any] | None = None
) -> None:
    """Warn of the settings that changed, if any did, and of data that did though the settings are the same.

    Args:
        recorded: What the checkpoint says of its run: "config" and, from later versions, "version" and "data".
        now: The settings of the run that continues it.
        version: Of this program.
        data: What tells the prompts from others, as ``PromptData.fingerprint`` says.
    """
    if changed := told(recorded["config"], now, same_version=recorded.get("version") == version):
        log.warning("%s", changed)
    before, own = recorded.get("data"), [config.get("data") or {} for config in (recorded["config"], now)]
    others = [key for key, *_ in differences(own[0], own[1], prefix="data") if key not in _COPIES]
    if data and before and dict(before) != dict(data) and not others:
        log.warning(
            "the data are not those of the checkpoint: %s training and %s held-out prompts then, %s and %s now, or "
            "other rows; from here on steps have other prompts than an unbroken run",
            *(one[part] for one in (before, data) for part in ("training", "held_out")),
        )


def told(then: Mapping[str, Any], now: Mapping[str, Any], *, same_version: bool = True) -> str | None:
    """One line for each setting that changed, or None; a setting that parts have copies of is told once.

    Args:
        then: The settings in the checkpoint.
        now: The settings of the run that continues it.
        same_version: As in `differences`.
    """
    changed = differences(then, now, same_version=same_version)
    lines: dict[tuple[str, str, str], str] = {}
    for key, before, after in sorted(changed, key=lambda one: one[0].count(".")):  # what others copy comes first
        if key in _COPIES:
            continue
        shown = ["null" if value is None else value for value in (before, after)]
        ignored = ", which is ignored: a continued run keeps its optimizer" if key.startswith("optimizer.") else ""
        line = f"  {key} was {shown[0]} and is {shown[1]} now{ignored}"
        lines.setdefault((key.rpartition(".")[2], repr(before), repr(after)), line)
    if not lines:
        return None
    return "settings that have changed since the checkpoint was written:\n" + "\n".join(sorted(lines.values()))


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], *, same_version: bool = True, prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Settings of a checkpoint that the resumed run changed, except those that may change.

    Args:
        then: The settings in the checkpoint.
        now: The settings of the run that continues it.
        same_version: Whether one version of the program wrote both; else keys that only one of them has, and the names
            of what settings build, say nothing of the run.
        prefix: The dotted key of these settings in the whole, or nothing.

    Returns:
        (dotted key, value then, value now) of each, without copies of whole parts.
    """
    before, after = (dict(leaves(settings, settings, prefix)) for settings in (then, now))
    keys = {*before, *after} if same_version else {key for key in before if key in after and "_target_" not in key}
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(keys - {"trainer._target_"})
        if before.get(key) != after.get(key) and not _MAY_CHANGE & {*key.split(".")}
    ]
