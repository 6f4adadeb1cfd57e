"""The directory of a model, which may be a stranger's: what is read of it lies in it.

A link, or a name in a list of files, could make any file of the user's a part of the model, of which an export would
hold a copy.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line


def check_directory(path: str, key: str) -> None:
    """Refuse a directory that is no model's, or of which not all files are its own.

    Args:
        path: A directory, or the name of a model of the hub, of which what is here already is looked at.
        key: Of the setting that names it, such as ``policy.path``.

    Raises:
        ValueError: It holds parts of weights that nobody has put together, a link to elsewhere, or a list of weights
            elsewhere; or it is a run's.
    """
    where, directory = f"{key}={path!r}", Path(path).expanduser()
    if not directory.is_dir():
        found = None
        with suppress(HFValidationError):
            found = try_to_load_from_cache(path, "config.json")
        if not isinstance(found, str):
            return
        directory = Path(found).parent
    # Memory without a part would count as weights. A library may take more names for a part's than end like one.
    if part := next(directory.glob("shard-*"), None):
        raise ValueError(
            f"{where}: {one_line(part.name)} is a part of weights that several processes have written; allowed are "
            "weights that were put together, as transformers' consolidate_distributed_checkpoint does"
        )
    for file in sorted(directory.glob("*.index.json")):
        for name in _names(file):
            if not is_beside(name):
                raise ValueError(
                    f"{where}: {one_line(file.name)} names the weights {one_line(repr(name)[:200])}; allowed are names "
                    "of files beside it"
                )
    if not Path(directory, "config.json").exists() and Path(directory, "export", "config.json").exists():
        raise ValueError(
            f"{where}: the directory of a run; allowed is its export, {typed(key, os.path.join(path, 'export'))}"
        )


def is_beside(name: Any) -> bool:
    """Whether the name of a file leads into no other directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {*name} & {"/", "\\", "\0"}


def _names(index: Path) -> Iterator[Any]:
    """The files that a list of weights names."""
    with suppress(ValueError, RecursionError):  # a damaged one is told when it is read
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        named = content.get("weight_map") if isinstance(content, Mapping) else None
        yield from named.values() if isinstance(named, Mapping) else ()
