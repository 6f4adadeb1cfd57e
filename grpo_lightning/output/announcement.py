"""What a run says at its start."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.tree import Tree

from grpo_lightning.output.redaction import redacted
from grpo_lightning.output.terminal import printable


def announce(config: Mapping[str, Any], arithmetic: str) -> None:
    """Print the settings as a tree, and what a step amounts to.

    Args:
        config: The run's settings.
        arithmetic: What they amount to, in words.
    """
    console = Console(stderr=True)
    tree = Tree("settings")
    _grow(tree, redacted(config))
    console.print(tree, markup=False, highlight=False, soft_wrap=True)
    console.print(arithmetic, markup=False, highlight=False, soft_wrap=True)


def _grow(tree: Tree, node: Mapping[str, Any]) -> None:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            _grow(tree.add(printable(str(key))), value)
        else:
            tree.add(printable(f"{key}: {value}"))
