"""What only the user may say, on the command line or to ``compose``, and no settings file, which may be a stranger's.

It is whose code is trusted, where a key is sent, and where a run writes outside of its own directory.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.output.terminal import printable
from grpo_lightning.settings.reach import is_in
from grpo_lightning.settings.walk import each_target

_WORDS = "GRPO_LIGHTNING_GIVEN"
_DIRECTORIES = ("directory", "events_directory")
_TRACKING, _ARTIFACTS = "tracking_uri", "artifact_location"
_NAMES = ("trusted", "trust_remote_code", "base_url", "sampler", *_DIRECTORIES, _TRACKING, _ARTIFACTS)
_LOCAL = "http://127.0.0.1:8000"
"""The address of conf/sampler/vllm_server.yaml."""
_STORE = re.compile(r"https?://.*|file:.*|sqlite:///.*|[^:]*", re.DOTALL)
"""Where MLflow may log without being told so by the user: other stores are opened by code that their address names."""


def say_words(words: Sequence[str]) -> None:
    """Take note of the command line, for this process and those that it starts."""
    told = [word for word in words if any(name in word for name in _NAMES)]
    os.environ[_WORDS] = json.dumps(told)


def ungiven(config: Mapping[str, Any], words: Sequence[str] | None = None) -> list[str]:
    """What settings say that only the user may say, and has not: it stands in a file, or comes from one.

    Args:
        config: Resolved settings.
        words: The user's overrides; None: those of the command line, see `say_words`.
    """
    if words is None:
        words = json.loads(os.environ.get(_WORDS) or "[]")
    given = {word.partition("=")[0].lstrip("+~"): word for word in words}
    named = re.findall(r"\w+", given.get("trusted", "").partition("=")[2])
    listed = config.get("trusted") or []
    found = ["trusted"] if any(name not in named for name in (listed if isinstance(listed, list) else [listed])) else []
    for key, value in _nodes(config, "trust_remote_code"):
        if value not in (False, None) and not _is_given(config, key, given):
            found.append(key)
    # Whoever writes a file could otherwise have the user's key sent to a server of his own.
    for key, variable in _nodes(config, "api_key_env"):
        address = f"{key.rpartition('.')[0]}.base_url"
        if variable is not None and not _is_given(config, address, given):
            found.append(address)
    for key, value in _server(config):
        if not _is_given(config, key, given):
            found.append(printable(f"{key}={value}"))
    for key, value in _outside(config):
        if not _is_given(config, key, given):
            found.append(printable(f"{key}={value}"))
    return [f"{key} stands in a file; allowed is to give it on the command line, or to compose" for key in found]


def _is_given(config: Mapping[str, Any], key: str, given: Mapping[str, str]) -> bool:
    """Whether an override sets a dotted key, a mapping above it with its name in it, or what all there is a copy of."""
    parts = key.split(".")
    for begin in range(len(parts) - 1):
        original = parts[begin:]
        above = [".".join(original[:count]) for count in range(1, len(original))]
        is_set = ".".join(original) in given or any(_has(given.get(name, ""), parts[-1]) for name in above)
        if is_set and _at(config, original[:-1]) == _at(config, parts[:-1]):
            return True
    return key in given


def _has(word: str, name: str) -> bool:
    """Whether an override sets a mapping with a name in it; the name of a file may hold any words."""
    return re.search(rf"[{{,]\s*['\"]?{re.escape(name)}['\"]?\s*:", word.partition("=")[2]) is not None


def _at(node: Any, path: Sequence[str]) -> Any:
    """What stands at a path; None where there is nothing."""
    for part in path:
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _server(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where weights, and a key of the environment, are sent for sampling, if not to this machine."""
    sampler = config.get("sampler")
    if isinstance(sampler, Mapping) and str(sampler.get("_target_")).endswith(".VLLMServer"):
        yield from ((f"sampler.{name}", sampler[name]) for name in ("url", "directory") if sampler.get(name) != _LOCAL)


def _outside(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The places outside of the run directory that callbacks and loggers are to write to, as pairs of key and value."""
    run = config.get("run_dir")
    for key, node in each_target(config):
        if not isinstance(run, str) or key.partition(".")[0] not in ("callbacks", "logger"):
            continue
        for name in _DIRECTORIES:
            if isinstance(value := node.get(name), str) and not is_in(Path(value), Path(run)):
                yield f"{key}.{name}", value
        if node.get(_ARTIFACTS) is not None:
            yield f"{key}.{_ARTIFACTS}", node[_ARTIFACTS]
        store = node.get(_TRACKING)
        if store is not None and store != os.environ.get("MLFLOW_TRACKING_URI") and not _STORE.fullmatch(str(store)):
            yield f"{key}.{_TRACKING}", store


def _nodes(node: Any, wanted: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What stands under a name at any depth, as pairs of its dotted key and itself."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        name = f"{prefix}.{key}" if prefix else str(key)
        if key == wanted:
            yield name, value
        yield from _nodes(value, wanted, name)
