"""What settings take from the environment, such as ``${oc.env:HF_TOKEN}``, stays out of everything that is written."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from grpo_lightning.composition.selected import selected
from grpo_lightning.output import redaction
from grpo_lightning.settings import trust

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
    """Take note of the secrets among overrides, also by keys in what they set, such as ``logger.x={api_key: abc}``."""
    redaction.remember_words(words)
    parser = OverridesParser.create()
    for word in words:
        with suppress(Exception):  # of which the user is told where they are composed
            parsed = parser.parse_override(word)
            redaction.remember({parsed.key_or_group: _texts(parsed.value())})


def _texts(value: Any) -> Any:
    """What an override sets, as plain values; the choices of a sweep as a list."""
    if isinstance(value, Mapping):
        return {str(key): _texts(one) for key, one in value.items()}
    if isinstance(value, ChoiceSweep):
        value = value.list
    if isinstance(value, list):
        return [_texts(one) for one in value]
    return value.text if isinstance(value, QuotedString) else value


def remember_secrets(cfg: DictConfig, config: Mapping[str, Any] | None = None) -> None:
    """Take note of the secrets among settings as composed and, if they are known already, as resolved."""
    composed: Any = OmegaConf.to_container(cfg, resolve=False)
    named = [key for key, value in trust.values(composed) if _may_be_set(str(value))]
    own = config or {key: node for key, node in composed.items() if key != "hydra"}
    redaction.remember(own, keys=named)


def _may_be_set(value: str) -> bool:
    """Whether a value takes something from a variable that is set, or named as secret, as far as one can tell."""
    return any(not name or _counts(name) for name in _ENVIRONMENT.findall(value))


def _counts(name: str) -> bool:
    """Whether a variable may give a secret: one that is set, or is named so, whatever settings have in its place."""
    return name in os.environ or redaction.names_secret(name)


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


def _is_place(value: str) -> bool:
    """Whether a value is a place, whose name is found in many texts and is no secret by itself: keys have /, too."""
    return value.startswith(("/", "~", ".")) or ("/" in value and os.path.exists(value))


def _is_private(name: str, value: str) -> bool:
    """Whether the value of a variable is hidden wherever it stands, also in a longer one, such as an address."""
    if _is_place(value):
        return False
    is_named = redaction.names_secret(name) or bool(_LIKE_PASSWORD.fullmatch(value) and not _PLAIN.fullmatch(name))
    return len(value) >= (redaction.SHORTEST if is_named else _SURELY_PRIVATE)


def _of_environment(*words: Any) -> Any:
    """OmegaConf's resolver ``oc.env``; what it reads is kept out of all texts."""
    if _is_other.get() and words and os.environ.get(str(words[0])) and not _PLAIN.fullmatch(str(words[0])):
        return _OTHER
    value = oc.env(*words)
    if isinstance(value, str) and _counts(str(words[0])) and _is_private(str(words[0]), value):
        redaction.remember({}, texts=[value])
    return value


OmegaConf.register_new_resolver("oc.env", _of_environment, replace=True)
