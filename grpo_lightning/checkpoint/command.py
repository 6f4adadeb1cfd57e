"""The command that continues a run, to be told to users."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_lightning import start
from grpo_lightning.output.redaction import HIDDEN, hide
from grpo_lightning.output.shell import hydra_text, shell_word

_REPLACED = re.compile(r"\+{0,2}(checkpoint|hydra\.run\.dir|run_dir)=")
_CONFIG = ("--config-", "-cd", "-cn", "-cp")
_UNTOLD = "the command of this run (not shown, as it holds a secret)"
_OF_FILES = (
    "the command of this sweep and its hydra.sweep.dir (not shown, as files that it brings along say what is swept)"
)


def say_begun() -> None:
    """Take note of how the command line begins, and where it finds settings, for the processes that it starts, too.

    Jobs of a launcher are other programs. Without the place of its settings a command would be another one: a
    stranger's would no longer be known as such.
    """
    start.note_begun(list(_options(sys.argv[1:])))


def continue_command(
    overrides: Sequence[str], directory: Path, *, checkpoint: str = "last", steps: int | None = None
) -> str:
    """The command line that goes on with a run.

    Args:
        overrides: Those that the run was started with.
        directory: The run's directory.
        checkpoint: The checkpoint to go on from: "last", or a path.
        steps: How many it is to make; None: as many as before.

    Returns:
        A line for a shell, with what the shell and Hydra would read otherwise in quotes. A description instead if it
        held what the user has not said, which would become his word, or a secret: with another word in its place it
        would be another command, as a stranger's ``token`` may be a word of the user's, such as a package that is
        trusted.
    """
    kept = [word for word in overrides if not _REPLACED.match(word)]
    if start.settings_from() and not set(map(_key, kept)) <= set(map(_key, start.words())):
        return _OF_FILES
    own = [f"hydra.run.dir={hydra_text(str(directory))}", f"checkpoint={hydra_text(checkpoint)}"]
    if steps is not None:
        kept, own = [word for word in kept if _key(word) != "steps"], [f"steps={steps}", *own]
    words = [shell_word(word) for word in [*start.begun(), *kept, *own]]
    for said, is_whole in ((words, True), (words[-len(own) :], False)):
        line = " ".join(said)
        if hide(line) == line and not (is_whole and any(HIDDEN in word for word in kept)):
            return line if is_whole else f"{_UNTOLD} and {line}"
    return f"{_UNTOLD} and checkpoint=last, in the same hydra.run.dir"


def _options(words: Sequence[str]) -> Iterator[str]:
    """Where Hydra was told to find settings, such as ``--config-dir conf`` or ``hydra.searchpath=[conf]``."""
    for number, word in enumerate(words):
        if word.startswith(_CONFIG):
            yield from words[number : number + (1 if "=" in word else 2)]
        elif word.lstrip("+").startswith("hydra.searchpath="):
            yield word


def longer_command(overrides: Sequence[str], directory: Path, *, steps: int) -> str:
    """The command line that goes on with a run of so many ``steps``, which it has made, for as many again."""
    return continue_command(overrides, directory, steps=2 * steps)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
