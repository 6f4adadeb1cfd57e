"""The name of a sweep's job, by what it differs in: ``group_size=8,seed=1``."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

_LONGEST = 100
_KEY = re.compile(r"\+{0,2}([\w./@-]+)")
_PLAIN = re.compile(r"[\w.-]+", re.ASCII)
_LIST = re.compile(r"\[([\w.-]+(,[\w.-]+)+)\]", re.ASCII)
_HASH = 8  # hexadecimal digits


def job_name(overrides: Sequence[str], *, hidden: Sequence[str] = (), shown: Sequence[str] | None = None) -> str:
    """A directory's name that no other job of the sweep has, a function of the words that are not hidden alone.

    Keys are as short as they can be told apart by, ``+`` joins what is a list, and what no file system likes is left
    out. Where that could make two names equal, or the name would be longer than 100 characters, it ends with a hash.

    Args:
        overrides: Of the job, such as ``rollout.group_size=8``.
        hidden: Keys that are left out, such as those that all jobs have with the same value.
        shown: The overrides as the name may show them, without secrets, in the same order; None: as they are.
    """
    seen = [pair for pair in zip(overrides, shown or overrides, strict=True) if pair[0].partition("=")[0] not in hidden]
    own = [word for word, _ in seen]
    pairs = {key: value for key, _, value in (word.partition("=") for _, word in seen)}
    keys = {key: (_KEY.fullmatch(key) or [key, key])[1].replace("/", ".").replace("@", ".") for key in pairs}
    short = _shortened(list(keys.values()))
    words, is_exact = [], own == [word for _, word in seen]
    for key, value in sorted(pairs.items()):
        told = _shown(value)
        is_exact = is_exact and told is not None
        words.append(f"{short[keys[key]]}={told if told is not None else _safe(value)}")
    name = ",".join(words) or "defaults"
    if is_exact and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256("\n".join(sorted(own)).encode()).hexdigest()[:_HASH]
    return f"{name[: _LONGEST - _HASH - 1]}~{digest}"


def words_of(config: DictConfig) -> list[str]:
    """The overrides of a command or job, as they are written: ``${oc.env:TOKEN}`` is not looked up."""
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return [str(word) for word in words]


def _shortened(keys: Sequence[str]) -> Mapping[str, str]:
    """Key -> as many of its last parts as no other key ends with."""
    ends = {}
    for key in keys:
        parts = key.split(".")
        tails = (".".join(parts[-number:]) for number in range(1, len(parts) + 1))
        others = [f".{other}" for other in keys if other != key]
        ends[key] = next((tail for tail in tails if not any(one.endswith(f".{tail}") for one in others)), key)
    return ends


def _shown(value: str) -> str | None:
    """A value as it stands in a name from which it can be told; None if there is no such."""
    if _PLAIN.fullmatch(value):
        return value
    return listed[1].replace(",", "+") if (listed := _LIST.fullmatch(value.replace(" ", ""))) else None


def _safe(value: str) -> str:
    return re.sub(r"[^\w.-]+", "-", value, flags=re.ASCII).strip("-.")
