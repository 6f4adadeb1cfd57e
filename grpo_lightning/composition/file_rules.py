"""What files of settings may not say, which decides what runs and where it writes: that is for the command line.

Every value is checked once more where it ends up, whoever has given it. These rules are there since a stranger who
writes a file has more means than one thinks of: names that are put together, places that are links of his.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.walk import PARTS

_PARAMETER = r"(?!.*\$\\*\{)[^\x00-\x1f\x7f-\x9f]*"  # what is resolved in a sweeper is no longer known to be a secret
_HYDRA = {
    r"hydra\.mode": "RUN|MULTIRUN",
    r"hydra\.sweeper\.params\.(?!\W*(hydra|run_dir|callbacks|logger|trainer)\b)[\w.+~]+": _PARAMETER,
    r"hydra\.sweeper\.(n_trials|n_jobs|max_batch_size|max_failure_rate|sampler\.seed)": r"[\d.]+|None",
    r"hydra\.sweeper\.direction": "maximize",
    r"hydra\.launcher\.(n_jobs|timeout_min|nodes|array_parallelism|(cpus|gpus|tasks)_per_(task|node)|mem_gb)": r"-?\d+",
    r"hydra\.launcher\.(partition|account|qos)": r"[\w.-]+",
}
"""Key -> value, both as patterns, of what any file may say of Hydra."""
_PRESETS = ("algorithm", "debug", "experiment", "sweep")
"""Folders of conf/ whose files set parts, and are none."""
_PARTS = ("hydra", "hydra.sweeper", "hydra.sweeper.params", "hydra.launcher")
"""What may be empty in it."""


def hydra_problems(file: str, said: Any) -> list[str]:
    """What a file must not say of Hydra.

    Args:
        file: Its name, for messages.
        said: What stands in it below ``hydra``, not resolved.
    """
    return [
        f"{one_line(file)}: {typed(key, value)} stands in a file; allowed there are hydra.mode, "
        "hydra.sweeper.params, and numbers of trials, jobs and their resources; anything else on the command line"
        for key, value in leaves_of(said, "hydra")
        if not (value == {} and key in _PARTS)
        and not any(re.fullmatch(name, key) and re.fullmatch(text, str(value)) for name, text in _HYDRA.items())
    ]


def shape_problems(file: str, said: Mapping[str, Any]) -> list[str]:
    """What in a file has no effect: ``loss: dapo`` chooses nothing, and nobody reads settings below ``experiment``.

    Args:
        file: Its name, for messages.
        said: What stands in it, not resolved.
    """
    found = []
    for name in (*PARTS, *_PRESETS):
        is_settings = name in PARTS and isinstance(said.get(name), Mapping)
        if name not in said or is_settings or (name == "environment" and said[name] is None):
            continue
        if isinstance(said[name], Mapping):
            told = (
                f"nothing reads the settings below {name}; allowed is a file whose first line is '# @package _global_'"
            )
        else:
            or_settings = f", or settings below {name}" * (name in PARTS)
            told = f"{typed(name, said[name])} chooses nothing in a file; allowed is a line "
            told += f"'- override /{name}: NAME' among its defaults{or_settings}"
        found.append(f"{one_line(file)}: {told}")
    return found


def leaves_of(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every plain value below a node, and every empty mapping and list, as pairs of its dotted key and itself."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if not node or pairs is None:
        yield prefix, node
        return
    for key, value in pairs:
        yield from leaves_of(value, f"{prefix}.{key}" if prefix else str(key))
