"""What settings let parts read and write: nothing of others, and no checkpoint that nobody has checked."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from grpo_lightning.allowed import CACHE
from grpo_lightning.checkpoint.tensorboard import SUFFIX
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.places import is_hidden, is_obeyed, is_of_programs
from grpo_lightning.settings.walk import each_target

_DIRECTORIES = ("save_dir", "dirpath", "log_dir", "root_dir", "default_root_dir", "dir")
OWN_DIRECTORIES: tuple[str, ...] = ("directory", "events_directory")
_WRITING = ("callbacks", "logger", "sampler", "trainer")
_NAMES = ("filename", "filename_suffix")
_BELOW = dict.fromkeys(("CSVLogger", "TensorBoardLogger"), ("name", "version", "sub_dir"))
"""Logger -> what it appends to ``save_dir``."""
_KEEPER = "ModelCheckpoint"
_FIELD = r"\{[\w@.-]+(:[\d.]*[bdefgnox%]?)?\}"
_FILE_NAME, _FILE_NAME_ALONE = (re.compile(rf"([^{{}}/]|{field})*") for field in (_FIELD, _FIELD.replace("@", "@/")))
"""What Lightning makes the name of a checkpoint of: with the names of metrics before their values, and without."""
_PROFILERS = "lightning.pytorch.profilers."
_TELLING = ("AdvancedProfiler", "PassThroughProfiler", "SimpleProfiler")
"""Profilers that write no file where they are given no name for one."""
_ALONE = {"Trainer": "default_root_dir", "WandbLogger": "save_dir"}
"""What writes into folders of many names -> the setting that says where."""
_PLAIN = "without '://', '::' and a ':' before the first '/'"
_LIBRARIES = ("lightning.", "grpo_lightning.logger.")
_UNCHECKED = {
    "OnExceptionCheckpoint": "allowed is callbacks.checkpoint, whose last.ckpt is the last complete step, also after "
    "an error: Lightning would go on from what lies at this one's place, whoever has put it there",
    "SpikeDetection": "allowed is callbacks.doctor: this one overwrites a file of the working directory, or what a "
    "checkpoint names",
    **dict.fromkeys(
        ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"),
        "allowed is trainer=fsdp: it checks checkpoints in parts before they are read, which could run code",
    ),
}
"""Class of Lightning's -> what is allowed instead of it."""


def reach_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What settings name outside of the run directory, or would have Lightning read unchecked, by key."""
    run = config.get("run_dir")
    for key, node in each_target(config):
        target = str(node["_target_"])
        name = target.rpartition(".")[2]
        if not target.startswith(_LIBRARIES):
            continue
        if name in _UNCHECKED:
            yield one_line(f"{key}._target_={target}: {_UNCHECKED[name]}")
        if isinstance(run, str):
            yield from _places(key, node, name, Path(run))
    strategy = (config.get("trainer") or {}).get("strategy")
    if isinstance(strategy, str) and strategy.lower().startswith("deepspeed"):  # as Lightning reads it
        yield f"trainer.strategy={strategy}: {_UNCHECKED['DeepSpeedStrategy']}"
    for key, value in (("run_dir", run), *_own_directories(config)):
        if is_url(value):
            yield one_line(f"{key}={value}: allowed is a directory of this machine, {_PLAIN}")
    for key, node in each_target(config):
        for name in (*OWN_DIRECTORIES, CACHE) if str(node["_target_"]).startswith("grpo_lightning.") else ():
            if isinstance(node.get(name), Mapping | list):  # what it makes is not known before
                yield one_line(f"{key}.{name}={node[name]}: allowed is text")
    yield from _linked(config, [Path(run)] if isinstance(run, str) else [])


def _linked(config: Mapping[str, Any], runs: list[Path]) -> Iterator[str]:
    """The places of callbacks and judges to which strangers' links lead, but for those of the run directory itself."""
    kept = [(f"{key}.{CACHE}", node.get(CACHE)) for key, node in each_target(config)]
    for key, value in (*_own_directories(config), *kept):
        places = (value, os.path.expanduser(value)) if isinstance(value, str) else ()  # some parts replace a "~"
        outside = [Path(place) for place in places if not any(is_in(Path(place), run) for run in runs)]
        if any(is_obeyed(one) or is_of_programs(one.parent if key.endswith(CACHE) else one) for one in outside):
            yield one_line(
                f"{key}={value}: leads into a hidden directory of the home or with files that are no run's, or into "
                "one of the system, where programs may run what is put there; allowed is another"
            )


def is_url(value: Any) -> bool:
    """Whether fsspec, by which Lightning and datasets open files, would take a text for more than a path.

    ``file:X`` and ``local:X`` are X to it.
    """
    return isinstance(value, str) and ("://" in value or "::" in value or ":" in value.partition("/")[0])


def _own_directories(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, node in each_target(config):
        writes = key.partition(".")[0] in _WRITING or str(node["_target_"]).startswith("grpo_lightning.")
        yield from ((f"{key}.{name}", node[name]) for name in OWN_DIRECTORIES if writes and name in node)


def _places(key: str, node: Mapping[str, Any], name: str, run: Path) -> Iterator[str]:
    inside = f"allowed is a directory in run_dir={run}, {_PLAIN}"
    for target, place in _ALONE.items():  # what lies there has been looked at, which folders in it have not
        if name == target and not _is_same(node.get(place), run):
            value = "null" if node.get(place) is None else node[place]
            yield one_line(f"{key}.{place}={value}: allowed is run_dir={run} itself")
    shared = name.startswith("MLFlow")  # a store of many runs, none of which writes to another one's files
    for place in _DIRECTORIES:
        value = None if place == _ALONE.get(name) else node.get(place)
        # What stands behind an empty text, the name of a logger, is the whole place.
        if isinstance(value, str) and (not value or is_url(value) or not (shared or is_in(Path(value), run))):
            yield one_line(f"{key}.{place}={value}: {inside}")
        elif isinstance(value, str) and os.path.expandvars(os.path.expanduser(value)) != value:
            yield one_line(f"{key}.{place}={value}: {inside}, nor '~' and '$', which Lightning would replace")
        elif isinstance(value, str) and not shared and hides(Path(os.path.relpath(value, run))):
            # A shell may run what lies in one.
            yield one_line(f"{key}.{place}={value}: {inside}, none that begins with '.'")
    for part in (*_NAMES, *_BELOW.get(name, ())):
        value = node.get(part)
        is_hidden_name = isinstance(value, str) and part != "filename_suffix" and hides(PurePath(value))
        leads = is_hidden_name or (isinstance(value, str) and {"..", "$"} & {*PurePath(value).parts, *value})
        if leads or (isinstance(value, str) and value.startswith(("/", "~"))):
            yield one_line(
                f"{key}.{part}={value}: allowed is a name without '..' and '$' that begins with no '.', '/', '~'"
            )
    suffix = node.get("filename_suffix")
    if isinstance(suffix, str) and "." in suffix.removesuffix(SUFFIX):  # programs run files of some, as .vim
        yield one_line(f"{key}.filename_suffix={suffix}: allowed is a text without '.', but for {SUFFIX} at its end")
    for part in (*_DIRECTORIES, *_NAMES, *_BELOW.get(name, ())):
        value = node.get(part)  # the text of an object may be any path
        if not isinstance(value, str | None) and not (part == "version" and type(value) is int):
            yield one_line(f"{key}.{part}={node[part]}: allowed is text")
    if name == _KEEPER:
        yield from _kept(key, node, inside)
    is_profiler = str(node["_target_"]).startswith(_PROFILERS)
    if is_profiler and node.get("dirpath") is None and (node.get("filename") or name not in _TELLING):
        yield one_line(f"{key}.dirpath=null: {inside}, such as ${{run_dir}}/profile")
    if name == "WandbLogger" and "/" in (project := str(node.get("project"))):
        yield one_line(f"{key}.project={project}: allowed is a name without '/'")
    written = _written(node, name, run)
    if written is not None and (found := _link(written, run)):
        yield one_line(
            f"{key}: {found} is a link that leads elsewhere, or hides such, through which is not written; allowed is a "
            f"directory in run_dir={run} whose own files lie in it and can be listed"
        )


def hides(path: PurePath) -> bool:
    """Whether a path leads up or through something hidden."""
    return any(part.startswith(".") for part in path.parts)


def _kept(key: str, node: Mapping[str, Any], inside: str) -> Iterator[str]:
    """What would have Lightning put together another place for its checkpoints than the settings say."""
    if node.get("dirpath") is None:
        yield one_line(f"{key}.dirpath=null: {inside}, such as ${{run_dir}}/kept")
    value, is_alone = node.get("filename"), node.get("auto_insert_metric_name") is False
    if isinstance(value, str) and not (_FILE_NAME_ALONE if is_alone else _FILE_NAME).fullmatch(value):
        yield one_line(
            f"{key}.filename={value}: allowed is a name without '/', in which {{METRIC}} and {{METRIC:.2f}} stand for "
            "values; with a '/' in METRIC also auto_insert_metric_name=false"
        )


def _written(node: Mapping[str, Any], name: str, run: Path) -> Path | None:
    """Where a logger or profiler of Lightning's writes files of names that are known before; None: others write none.

    A logger whose version is left open takes a new directory.
    """
    if str(node["_target_"]).startswith(_PROFILERS):
        return Path(node["dirpath"]) if isinstance(node.get("dirpath"), str) else run
    if name not in _BELOW or not isinstance(node.get("save_dir"), str):
        return None
    version, last = node.get("version"), node.get("sub_dir")
    below = [node.get("name", "lightning_logs"), f"version_{version}" if isinstance(version, int) else version, last]
    return Path(node["save_dir"], *(str(part) for part in below if part is not None))


def _link(place: Path, run: Path) -> Path | None:
    """The link by which a directory, or something in it, leads out of the run directory; None if there is none."""
    if not is_in(place, run) or is_hidden(place):
        return place
    return None


def is_in(place: Path, run: Path) -> bool:
    """Whether a place is the run directory or lies in it, both with links followed and by its name alone.

    A way counts as one out of it that leaves it and comes back, since it may lead elsewhere later.
    """
    return Path(os.path.abspath(place)).is_relative_to(os.path.abspath(run))  # as Lightning sees `link/..`


def _is_same(place: Any, run: Path) -> bool:
    """Whether a setting names the run directory."""
    if not isinstance(place, str) or is_url(place) or os.path.abspath(place) != os.path.abspath(run):
        return False
    return Path(place).resolve() == run.resolve()
