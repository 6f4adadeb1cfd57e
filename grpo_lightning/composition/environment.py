"""What settings take from the environment, such as ``${oc.env:HF_TOKEN}``, stays out of everything that is written."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from grpo_lightning.composition.selected import selected

_ENVIRONMENT = re.compile(r"\boc\.env\s*:(?:\s*([A-Za-z_]\w*)\s*[,}])?")
"""What takes a value from the environment, and the variable's name where it stands there as it is."""
_PLAIN = re.compile(
    r"USER|LOGNAME|HOSTNAME|SLURM_(ARRAY_)?JOB_(ID|NAME|PARTITION)|SLURM_(ARRAY_TASK_ID|CLUSTER_NAME|PROCID|NODEID)"
    r"|WANDB_(PROJECT|ENTITY|NAME|RUN_GROUP|TAGS|NOTES|MODE)|MLFLOW_(EXPERIMENT|RUN)_NAME"
)
"""Variables that hold no key, by whose values runs are named."""
_OTHER = "anothertext"  # letters alone, which every resolver can read
_is_other: ContextVar[bool] = ContextVar("is_other", default=False)
_SURELY_PRIVATE = 12  # characters of a value of the environment that is hidden in any text
_LIKE_PASSWORD = re.compile(r"(?=.*[^\W\d_])(?=.*[^\w.-]|(?=.*\d)(?=.*[a-z]).*[A-Z]).{8,}", re.DOTALL)
"""A shorter one that is hidden, too: letters with signs that names do not have, or of both sizes and with digits."""


def remember_words(words: Sequence[str]) -> None:
    """Nothing."""


def remember_secrets(cfg: DictConfig, config: Mapping[str, Any] | None = None) -> None:
    """Nothing."""


def drawn(cfg: DictConfig, config: Mapping[str, Any]) -> set[str]:
    """The dotted keys whose values come from variables of the environment, by whatever way, but for plain ones.

    They are those that change when the variables do.

    Args:
        cfg: The settings as composed.
        config: The same, resolved.
    """
    found: set[str] = set()
    with _other_environment():
        for name, node in config.items():
            other: Any = None
            with suppress(
                Exception
            ):  # of what the variables choose, nothing may be there: then all of it depends on them
                other = selected(cfg, name)
            found |= _changed(node, other, name)
    return found


def _changed(one: Any, other: Any, key: str) -> set[str]:
    """The keys below ``key`` of which the values differ."""
    if isinstance(one, Mapping):
        # A name that is put together from the environment is in one of the two only.
        known = other if isinstance(other, Mapping) else {}
        return {found for name in one for found in _changed(one[name], known.get(name), f"{key}.{name}")}
    if isinstance(one, list):
        listed = other if isinstance(other, list) and len(other) == len(one) else [None] * len(one)
        return {found for n, value in enumerate(one) for found in _changed(value, listed[n], f"{key}.{n}")}
    return set() if str(one) == str(other) else {key}


@contextmanager
def _other_environment() -> Iterator[None]:
    """Inside, ``oc.env`` gives another text than a variable has."""
    before = _is_other.set(True)
    try:
        yield
    finally:
        _is_other.reset(before)


def _of_environment(*words: Any) -> Any:
    """OmegaConf's resolver ``oc.env``; what it reads is kept out of all texts."""
    if _is_other.get() and words and os.environ.get(str(words[0])) and not _PLAIN.fullmatch(str(words[0])):
        return _OTHER
    return oc.env(*words)


OmegaConf.register_new_resolver("oc.env", _of_environment, replace=True)
