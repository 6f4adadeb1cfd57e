"""Lists of functions that settings name by dotted paths alone."""

from typing import Any

LISTS = {"grpo_lightning.environment.tools.Tools": "tools"}
"""Target -> its setting that is such a list."""


def with_targets(node: Any) -> Any:
    """The same settings, with ``{_target_: PATH, _partial_: true}`` for each dotted path in lists of functions.

    So they are checked, imported and trusted as every other ``_target_`` is.

    Args:
        node: Resolved settings, or a part of them.
    """
    if isinstance(node, list):
        return [with_targets(one) for one in node]
    if not isinstance(node, dict):
        return node
    name = LISTS.get(str(node.get("_target_")))
    made = {key: with_targets(value) for key, value in node.items()}
    if name in made and isinstance(made[name], list):
        made[name] = [{"_target_": one, "_partial_": True} if isinstance(one, str) else one for one in made[name]]
    return made
