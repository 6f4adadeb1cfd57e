"""The policy that a checkpoint is of: its settings, and whether its weights fit into a policy that is there."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.allowed import LIVE
from grpo_lightning.checkpoint import of_others
from grpo_lightning.checkpoint.changes import differences
from grpo_lightning.checkpoint.io import read, weights
from grpo_lightning.output.redaction import HIDDEN
from grpo_lightning.output.shell import typed_key
from grpo_lightning.output.terminal import one_line, quoted

log = logging.getLogger(__name__)

_TAKEN = {
    "policy": ("grpo_lightning.policy.hf.load", "grpo_lightning.policy.scratch.character_llama"),
    "reference": tuple(
        f"grpo_lightning.reference.{name}" for name in ("frozen_copy", "none", "adapter_off", "another_model")
    ),
}
"""Part -> what may build it on the word of a checkpoint, which can be a stranger's: nothing that runs other code."""
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
        raise ValueError(f"checkpoint={one_line(str(named))}: {error}") from error
    if "${" in str(updates):  # whatever stands where: nothing of a checkpoint is resolved
        raise ValueError(f"checkpoint={one_line(str(named))}: its settings refer to others; allowed are plain values")
    for part, node in updates.items():
        if isinstance(node, Mapping) and isinstance(place := node.get("path"), str):
            log.info("%s.path=%s, as the checkpoint says", part, one_line(place))
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
    for part, targets in _TAKEN.items():
        node = recorded.get(part)
        if part in given or not isinstance(node, Mapping):
            continue
        own = copy.deepcopy(dict(node))
        for key in (key for key in given if key.startswith(f"{part}.")):
            _put(own, key.split(".")[1:], current(key))
        _check_taken(part, own, targets, given, current)
        if own.get("_target_") in targets:  # else the settings have all that the user's own code is given
            updates[part] = own
        for key in _COMES_WITH[part]:
            value = _number(recorded, key)
            # Sampling lengths of validation follow those of training unless they were given apart.
            follows = key == "validation.max_new_tokens" and value == _number(recorded, "rollout.max_new_tokens")
            if value is not KeyError and key not in given and not follows and current(key) != value:
                updates[key] = value
    return updates


def _check_taken(
    part: str, own: Mapping[str, Any], targets: Sequence[str], given: Sequence[str], current: Callable[[str], Any]
) -> None:
    """Refuse settings that say nothing, or that only a user may decide."""
    # By their paths: keys may have dots in them, so that two values can have one dotted key.
    said = {tuple(key.split(".")) for key in given}
    leaves = [(path, value) for path, value in _leaves(own, (part,)) if path not in said]
    odd = [one_line(".".join(map(str, path))) for path, _ in leaves if any(map(_is_odd, path))]
    if odd:
        raise ValueError(
            f"its settings have {quoted(odd[0])}; allowed are keys of text without '$', ':', '{{' and '}}'"
        )
    trust = f"{part}.trust_remote_code"
    if own.get("trust_remote_code", False) is not False and not {trust, f"{part}.path"} <= {*given}:
        place = quoted(str(own.get("path")))
        raise ValueError(
            f"it was trained with {trust}=true and {part}.path={place}, whose code would run, which only you can "
            "decide; allowed is to give both again"
        )
    kernel = f"{part}.attn_implementation"
    if "/" in str(own.get("attn_implementation")) and kernel not in given:
        told = quoted(str(own["attn_implementation"]))
        raise ValueError(f"its {kernel} is {told}, a kernel of the hub; allowed is {kernel}=… on the command line")
    builders = [(path, value) for path, value in leaves if path[-1] == "_target_"]
    if any(value == LIVE for _, value in builders):
        raise ValueError(
            f"its {part} was an object of a Python program; allowed is {part}=NAME with its settings, or "
            f"compose({part}=…) with such an object"
        )
    top = f"{part}._target_"
    outer = [value for path, value in builders if path == (part, "_target_")]
    if len(builders) > len(outer) or (top not in given and (not outer or outer[0] not in targets)):
        listed = quoted(", ".join(str(value) for _, value in builders) or "nothing")
        raise ValueError(
            f"its {part} was built by {listed}; allowed without "
            f"{part}=NAME or {top}=… on the command line are {', '.join(targets)}"
        )
    is_foreign = own.get("_target_") not in targets
    asked = dict[str, str]()
    for path, value in leaves:
        key = ".".join(path)
        is_theirs = is_foreign and value != current(key)  # code of the user's may do anything on the word of a setting
        # Objects of OmegaConf's would resolve what a chat template of the checkpoint's puts into them.
        is_unresolved = "_convert_" in path and value != "all"
        is_hidden = isinstance(value, str) and any(sign in value for sign in (HIDDEN, "${"))
        if is_theirs or is_unresolved or is_hidden:
            asked[typed_key(key)] = quoted(str(value))
    if asked:
        told = " and ".join(f"{key} is {value}" for key, value in asked.items())
        wanted = " ".join(f"{key}=…" for key in asked)
        raise ValueError(f"its {told}; allowed is {wanted} with the value{'s' * (len(asked) > 1)}")


def _leaves(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value that holds no others, with the keys that lead to it; places in lists are texts."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(node, list | tuple) and node:
        for number, value in enumerate(node):
            yield from _leaves(value, (*path, str(number)))
    else:  # also what is empty, and may have a meaning
        yield path, node


def _is_odd(key: Any) -> bool:
    """Whether a key is none that settings may have, see `composition.resolvers`."""
    return not isinstance(key, str) or not set(key).isdisjoint("${}:")


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = node.get(name)
        node[name] = node = dict(inner) if isinstance(inner, Mapping) else {}
    node[path[-1]] = value


def _number(recorded: Mapping[str, Any], key: str) -> Any:
    """A number or null of the checkpoint's settings; ``KeyError`` (the class) for anything else."""
    part, _, name = key.partition(".")
    value = (recorded.get(part) or {}).get(name, KeyError)
    return value if value is None or isinstance(value, int | float) else KeyError


def check_weights(path: Path, module: Any) -> None:
    """Check that a checkpoint's weights have the names and shapes of a module's, before they are loaded.

    Args:
        path: The checkpoint; of one in parts nothing is known here.
        module: A ``StepModule``, with its weights whole.

    Raises:
        ValueError: They differ; names the settings of the policy that do.
    """
    content = read(path, map_location="meta")
    stored: Mapping[str, Any] = content.get("state_dict") or {}
    of_others.check_weights(module, {"state_dict": stored})
    own = dict(module.state_dict())
    wrong = [
        f"{name} {_shape(stored, name)} instead of {_shape(own, name)}"
        for name in sorted({*stored, *own} if module.strict_loading else {*stored} & {*own})
        if _shape(stored, name) != _shape(own, name)
    ]
    if not stored or not wrong:
        return
    then: Mapping[str, Any] = content.get("run", {}).get("config", {}).get("policy", {})
    now: Mapping[str, Any] = module.settings.get("policy", {})
    shared = set(then) & set(now) if then.get("_target_") != now.get("_target_") else {*then, *now}
    changed = [
        f"{key} was {quoted(str(before))} and is {quoted(str(after))}"
        for key, before, after in differences(then, now, prefix="policy.")
        if not key.endswith(("seed", "prompt", "prompts")) and key.split(".")[1] in shared
    ]
    reason = f"its policy has other settings: {', '.join(changed)}" if then and changed else "it is of another model"
    raise ValueError(
        f"checkpoint={one_line(str(path))}: {reason} ({len(wrong)} weights differ, such as {quoted(wrong[0])}); "
        "allowed are the settings with which it was trained"
    )


def load(module: Any, checkpoint: Path | None) -> None:
    """Take over the weights and the progress of a checkpoint, if there is one, without a trainer."""
    if checkpoint:
        held = weights(checkpoint)
        module.on_load_checkpoint(read(checkpoint) | {"state_dict": held})
        module.load_state_dict(held, strict=module.strict_loading)


def _shape(weights: Mapping[str, Any], name: str) -> Any:
    return tuple(getattr(weights[name], "shape", ())) if name in weights else "absent"
