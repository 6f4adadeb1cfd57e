"""What a run says at its start: what was chosen, what that amounts to, and where it writes."""

import logging
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_lightning import __version__
from grpo_lightning.output import activity
from grpo_lightning.output.ending import folded
from grpo_lightning.output.redaction import redacted_words
from grpo_lightning.output.terminal import WIDTH, say

log = logging.getLogger(__name__)

_Choices = Mapping[str, str | list[str]]
_TOLD = ("mode", "steps", "seed", "checkpoint")
"""Settings that the first line of all has."""
_said: set[str] = set()
"""What `say_once` has said, here or in an earlier job of a sweep."""


def greeting(config: Mapping[str, Any]) -> str:
    """The first line of all, known as soon as the settings are."""
    steps = f", {config['steps']} steps" if config["mode"] == "fit" else ""
    start = f", from checkpoint={config['checkpoint']}" if config["checkpoint"] is not None else ""
    return f"grpo-lightning {__version__}: {config['mode']}{steps}, seed {config['seed']}{start}"


class Opening:
    """What was chosen for a run, and of a sweep's further jobs what tells them apart.

    Args:
        defaults: The parts of a run without overrides: group of conf/ -> name, or names.
    """

    def __init__(self, defaults: _Choices) -> None:
        self._defaults = {group: _listed(names) for group, names in defaults.items()}
        self._values: dict[str, set[str]] = {}
        self._jobs = 0

    def lines(
        self, choices: _Choices, overrides: Sequence[str], config: Mapping[str, Any], arithmetic: str
    ) -> list[str]:
        """What to print of a run, or of the next job of a sweep.

        Args:
            choices: The parts of the run, like the defaults.
            overrides: What the user changed.
            config: The settings.
            arithmetic: What they amount to, in words.
        """
        settings = [_setting(word) for word in redacted_words(overrides)]
        parts = {group: _listed(names) for group, names in choices.items()}
        differing = [group for group, names in parts.items() if names != self._defaults.get(group)]
        everything = parts | {key: value for key, value in settings if key not in parts}
        for key, value in everything.items():
            self._values.setdefault(key, set()).add(value)
        self._jobs += 1
        if self._jobs > 1:
            varied = [f"{key}: {value}" for key, value in everything.items() if len(self._values[key]) > 1]
            return [*folded(f"job {self._jobs - 1}: ", varied), f"directory: {config['run_dir']}"]
        shown = dict.fromkeys((*(key for key, _ in settings), *differing))  # what was asked for, then what came with it
        told = [f"{key}: {everything[key]}" for key in shown if key in everything and key not in _TOLD]
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


def say_once(text: str) -> None:
    """Say it in lines that fit, unless an earlier job of the sweep has; the log file has it anyway."""
    if text in _said:
        log.info("%s", text, extra={"shown": True})
        return
    _said.add(text)
    activity.note(said=sorted(_said))
    for line in fitted(text):
        say(line)


def heard(facts: Mapping[str, Any]) -> None:
    """Take over what `say_once` has said in the process of a job, as noted by it."""
    _said.update(facts.get("said", ()))
