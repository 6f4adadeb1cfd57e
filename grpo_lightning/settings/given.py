"""What only the user may say, on the command line or to ``compose``, and no settings file, which may be a stranger's.

It is whose code is trusted, where a key is sent, what of the environment is sent anywhere, and where a run writes
outside of its own directory.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_lightning import start
from grpo_lightning.allowed import CACHE
from grpo_lightning.logger.known import STORE
from grpo_lightning.output.shell import typed, typed_key
from grpo_lightning.settings.reach import OWN_DIRECTORIES, hides, is_in
from grpo_lightning.settings.trust import beside_brought
from grpo_lightning.settings.walk import at, each_target, key_problems, nodes_called
from grpo_lightning.start import settings_from

_COPIED = (["rollout"], ["validation"], ["module"], ["module", "rollout"], ["module", "validation"])
"""Where conf/ has copies of parts, such as ``rollout.reward`` of ``reward``; a stranger's copies go anywhere."""
_SEVERAL = re.compile(r"\+*trainer=(ddp|fsdp)?")
"""The choice of several processes, or a trainer of the program's."""
_NO = re.compile(r"[^=]+=\s*(false|no|off|0|null|~)?\s*", re.IGNORECASE)
_PLAIN = re.compile(
    r"(?<!\\)\$\{\s*(?:now:[^${}]*|oc\.env:\w+|hydra[.:](?:runtime\.(?:output_dir|cwd)|run\.dir|sweep\.(?:dir|subdir)"
    r"|job\.(?:name|num|id|config_name|override_dirname)))\s*\}"
)
_OPENED = re.compile(r"\$\\*\{")
"""How a ``${…}`` begins, also in an override: Hydra takes away backslashes there."""
_SHOWN = re.compile(
    r"policy\.(system_prompt|template_kwargs)\b|data\.(.*\.)?prompts\b|environment\.function\.(reply|actions)\b"
    r"|(callbacks|trainer)\..*\bfilename$"
)
"""Keys of what cannot be redacted: rollouts hold the tokens of prompts, and files have names."""
_TRACKING, _ARTIFACTS = "tracking_uri", "artifact_location"
_LOCAL = "http://127.0.0.1:8000"
"""The address of conf/sampler/vllm_server.yaml."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_OWN = ("grpo_lightning.callbacks.", "grpo_lightning.logger.")
_SENDING = (".ChatJudge", ".VLLMServer", ".MLFlowLogger", ".WandbLogger")
"""What sends values of its settings to other machines."""


def is_said(key: str) -> bool:
    """Whether the command line sets a key, as a whole."""
    return key in _keys(start.words())


def ungiven(
    config: Mapping[str, Any],
    words: Sequence[str] | None = None,
    *,
    drawn: Collection[str] = (),
) -> list[str]:
    """What settings say that only the user may say, and has not: it stands in a file, or comes from one.

    With it come keys by which that could not be told.

    Args:
        config: Resolved settings.
        words: The user's overrides; None: those of the command line, see `start.words`.
        drawn: Dotted keys whose values come from the environment, which may hold keys.
    """
    if words is None:
        words = start.words()
    given = _keys(words)
    named = re.findall(r"\w+", given.get("trusted", "").partition("=")[2])
    listed = config.get("trusted") or []
    found = ["trusted"] if any(name not in named for name in (listed if isinstance(listed, list) else [listed])) else []
    if config.get("trusted_settings") and "trusted_settings" not in given:
        found.append("trusted_settings")
    trusted = list[tuple[str, str]]()
    for key, value in nodes_called(config, "trust_remote_code"):
        if value in (False, None):
            continue
        if not _is_given(config, key, given) or _NO.fullmatch(given.get(key, "")):
            found.append(typed_key(key))
        elif settings_from():
            trusted.append((typed_key(key), str(value)))
    # Whoever writes a file could otherwise have keys, prompts and completions sent to a server of his own.
    for place, node in each_target(config):
        address, variable = node.get("base_url"), node.get("api_key_env")
        is_asked = "api_key_env" in node and (variable is not None or address is not None)
        is_near = variable is None and _is_of_this_machine(address)
        if is_asked and not is_near and not _is_given(config, f"{place}.base_url", given):
            found.append(typed_key(f"{place}.base_url"))
    for key, value in (*_servers(config), *_outside(config)):
        if not _is_given(config, key, given):
            found.append(typed(key, value))
    # The first of several processes listens for the others, and reads pickles of whoever comes first.
    for key in ("trainer.devices", "trainer.num_nodes") if settings_from() else ():
        is_chosen = key == "trainer.devices" and _SEVERAL.fullmatch(given.get("trainer", ""))
        if at(config, key.split(".")) not in (None, 1) and not is_chosen and not _is_given(config, key, given):
            found.append(key)
    # The value itself is not said: it may be a secret.
    found += [f"{typed_key(key)}=${{oc.env:…}}" for key in _sent(config, drawn) if not _is_given(config, key, given)]
    told = [
        f"{key} stands in a file; allowed is to give it on the command line, or to compose"
        for key in dict.fromkeys(found)
    ]
    told += [
        f"{typed_key(key)}=${{oc.env:…}}: would stand in tokens of prompts, or in names of files; allowed is text"
        for key in sorted(drawn)
        if _SHOWN.match(key)
    ]
    return [*key_problems(config), *told, *(beside_brought(key, name) for key, name in trusted)]


def _keys(words: Sequence[str]) -> dict[str, str]:
    """Key -> override, of those that no file has a part in."""
    last = {word.partition("=")[0].lstrip("+~"): word for word in words}
    return {key: word for key, word in last.items() if not settings_from() or is_whole(word)}


def is_whole(text: str) -> bool:
    """Whether what a text comes to depends on no settings but some of Hydra's own that no file may give."""
    return len(_PLAIN.findall(text)) == len(_OPENED.findall(text))


def _is_given(config: Mapping[str, Any], key: str, given: Mapping[str, str]) -> bool:
    """Whether an override sets a dotted key, a mapping above it with its name in it, or what it is a copy of."""
    parts = key.split(".")
    while isinstance(at(config, parts[:-1]), list):  # whoever gives a list gives what stands in it
        parts.pop()
    for begin in range(len(parts) - 1):
        if begin and settings_from() and parts[:begin] not in _COPIED:
            continue
        original = parts[begin:]
        names = ["[]" if part.isdecimal() else part for part in original]  # as `_below` calls what stands in lists
        above = {".".join(original[:count]): ".".join(names[count:]) for count in range(1, len(original))}
        is_set = ".".join(original) in given or any(rest in _below(given.get(name, "")) for name, rest in above.items())
        if is_set and at(config, original[:-1]) == at(config, parts[:-1]):
            return True
    return ".".join(parts) in given


def _below(word: str) -> set[str]:
    """The dotted keys in the mapping that an override sets, as Hydra reads it: quoted texts hold none."""
    found, names, token, quote = set[str](), list[str | None](), "", ""
    characters = iter(word.partition("=")[2])
    for character in characters:
        if character == "\\":
            token += next(characters, "")
        elif quote:
            quote = "" if character == quote else quote
            token += "" if not quote else character
        elif character in "\"'" and not token.strip():
            quote = character
        elif character in "{[(":
            names += [None] * (character == "{") + ["[]"] * (character == "[")
            token = ""
        elif character in "}]":
            del names[-1:]
            token = ""
        elif character == ":" and names and names[-1] is None:
            names[-1] = token.strip()
            found.add(".".join(map(str, names)))
            token = ""
        elif character == "," and names:
            names[-1] = names[-1] and ("[]" if names[-1] == "[]" else None)
            token = ""
        else:
            token += character
    return found


def _servers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where weights, results, and a key of the environment are sent, if not to this machine or the user's own place."""
    for key, node in each_target(config):
        target = str(node["_target_"])
        if target.endswith(".VLLMServer"):
            known = {"url": _LOCAL, "directory": None}
            yield from ((f"{key}.{name}", node[name]) for name in known if name in node and node[name] != known[name])
        owner = node.get("entity")
        if target.endswith(".WandbLogger") and owner is not None and owner != os.environ.get("WANDB_ENTITY"):
            yield f"{key}.entity", owner


def _sent(config: Mapping[str, Any], drawn: Collection[str]) -> Iterator[str]:
    """The keys of what comes from the environment and is sent to other machines."""
    for key, node in each_target(config) if drawn else ():
        if not str(node["_target_"]).endswith(_SENDING):
            continue
        store = os.environ.get("MLFLOW_TRACKING_URI")
        known = f"{key}.{_TRACKING}" if store is not None and node.get(_TRACKING) == store else None
        yield from sorted(one for one in drawn if one.startswith(f"{key}.") and one != known)


def _outside(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The places outside of the run directory that parts are to write to, as pairs of key and value."""
    run = config.get("run_dir")
    for key, node in each_target(config):
        target, names = str(node["_target_"]), OWN_DIRECTORIES
        if target.endswith(".ChatJudge"):
            names = (CACHE,)
        elif key.partition(".")[0] not in ("callbacks", "logger", "trainer") and not target.startswith(_OWN):
            continue
        yield from ((f"{key}.{name}", node[name]) for name in names if _leaves(run, node.get(name)))
        if node.get(_ARTIFACTS) is not None:
            yield f"{key}.{_ARTIFACTS}", node[_ARTIFACTS]
        store = node.get(_TRACKING)
        # Servers get a key of the environment, some stores are opened by code that their address names, and a file that
        # came with the settings may say itself where tables and checkpoints are written, by a trigger of its database.
        is_known = store and (store in (STORE, os.environ.get("MLFLOW_TRACKING_URI")) or _is_of_this_machine(store))
        if not is_known and (_TRACKING in node or target.endswith(".MLFlowLogger")):  # it would log to save_dir
            yield f"{key}.{_TRACKING}", store


def _leaves(run: Any, value: Any) -> bool:
    """Whether a text names a place outside of the run directory, or one there that would be taken for settings."""
    if not isinstance(run, str) or not isinstance(value, str):
        return False
    places = Path(value), Path(value).expanduser()  # some parts replace a "~", to others it is a directory
    # A shell started in a run directory that is the user's own would look into .bashrc.d.
    is_hidden = settings_from() and hides(Path(os.path.relpath(value, run)))
    return is_hidden or not all(is_in(place, Path(run)) for place in places)


def _is_of_this_machine(address: Any) -> bool:
    try:
        parts = urlsplit(str(address))
    except ValueError:
        return False
    is_plain = not {*"?#\\"} & {*str(address)}  # else libraries append what they want to ask to something else
    return is_plain and parts.scheme in ("http", "https") and parts.hostname in _THIS_MACHINE
