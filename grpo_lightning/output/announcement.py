"""What a run says at its start: what was chosen, what that amounts to, and where it writes."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_lightning import __version__
from grpo_lightning.config.redaction import redact_overrides
from grpo_lightning.output.terminal import WIDTH

_Choices = Mapping[str, str | list[str]]
_TOLD = ("mode", "steps", "seed", "checkpoint")
"""Settings that the first line of all has."""


def greeting(config: Mapping[str, Any]) -> str:
    """The first line of all, known as soon as the settings are."""
    steps = f", {config['steps']} steps" if config["mode"] == "fit" else ""
    start = f", from checkpoint={config['checkpoint']}" if config["checkpoint"] is not None else ""
    return f"grpo-lightning {__version__}: {config['mode']}{steps}, seed {config['seed']}{start}"


def opening(
    choices: _Choices, defaults: _Choices, overrides: Sequence[str], config: Mapping[str, Any], arithmetic: str
) -> list[str]:
    """The lines that say what a run was set to, what that amounts to, and where it writes.

    Args:
        choices: The parts of the run: group of conf/ -> name, or names.
        defaults: The parts of a run without overrides.
        overrides: What the user changed.
        config: The settings.
        arithmetic: What they amount to, in words.
    """
    settings = dict(_setting(word) for word in redact_overrides(overrides))
    parts = {group: _listed(names) for group, names in choices.items()}
    usual = {group: _listed(names) for group, names in defaults.items()}
    everything = settings | parts
    shown = dict.fromkeys((*settings, *(group for group in parts if parts[group] != usual.get(group))))
    told = [f"{key}: {everything[key]}" for key in shown if key not in _TOLD]
    if config["mode"] == "fit":
        told += fitted(arithmetic)
    directory, settings_file = f"directory: {config['run_dir']}", "(settings: .hydra/config.yaml)"
    line = f"{directory} {settings_file}"
    return [*told, *([line] if len(line) <= WIDTH else [directory, f"  {settings_file}"])]


def _listed(names: str | Iterable[str]) -> str:
    return names if isinstance(names, str) else ", ".join(names)


def _setting(word: str) -> tuple[str, str]:
    """The key and the value of an override such as ``+trainer.benchmark=true``; of ``~key`` that it is left out."""
    key, _, value = word.partition("=")
    return key.lstrip("+~"), "left out" if key.startswith("~") else value


def fitted(text: str) -> list[str]:
    """``text`` in lines that fit a terminal; a word that does not, such as a path, stays whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
