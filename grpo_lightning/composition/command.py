"""The command line: from words to an exit status."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning import start
from grpo_lightning.checkpoint.command import say_begun
from grpo_lightning.distributed import fresh
from grpo_lightning.output.redaction import hide, redacted_words
from grpo_lightning.output.shell import program, shell_word
from grpo_lightning.output.terminal import last_through_closed_pipes, one_line, show

_PACKAGE = re.compile(r"(-[\w-]*=?)?(pkg|structured)://")
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + 2, as a shell reports it."""


def main() -> None:
    """Train, validate or export, as the command line says."""
    last_through_closed_pipes()
    signal.signal(signal.SIGINT, _end)  # what is imported now has nothing to lose, and shows no traceback
    start.START = Path.cwd().resolve()
    if "${" in str(start.START):
        sys.exit(f"{one_line(str(start.START))}: settings give ${{ in a name a meaning; allowed is a start elsewhere")

    if found := [word for word in sys.argv[1:] if _PACKAGE.match(word)]:
        sys.exit(f"{found[0]}: settings are read from directories; reading them from a package would import it")

    try:
        from hydra._internal.utils import get_args_parser
        from hydra.core.plugins import Plugins
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed for {sys.executable}: activate an environment with requirements.txt")

    asked, others = get_args_parser().parse_known_args()
    if asked.experimental_rerun is not None:
        sys.exit("--experimental-rerun reads a pickle, which may run code; allowed are overrides and --config-dir")

    if asked.shell_completion:
        sys.exit("--shell-completion would have a shell run what names of settings say; allowed are overrides alone")

    say_begun()
    if others:
        sys.exit(hide(_not_read(sys.argv[1:], others)))

    from grpo_lightning.composition.job import job

    # The name of a folder is no override, whatever it is called.
    start.note_words([*map(_noted, asked.overrides, redacted_words(asked.overrides))])
    start.pass_by_settings()
    fresh.protect_processes()
    Plugins.instance()  # Hydra runs what it finds on the path
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job()
    except KeyboardInterrupt:
        _end()


def _noted(word: str, redacted: str) -> str:
    """An override without secrets, in which a ``${…}`` is left if there was one, as settings may have a part in it."""
    from grpo_lightning.settings.given import is_whole

    return redacted if is_whole(word) or not is_whole(redacted) else f"{redacted}${{hidden}}"


def _not_read(words: Sequence[str], others: Sequence[str]) -> str:
    """What is said of words that are no option of Hydra's, and of overrides after one, which are not read as such.

    Args:
        words: All words of the command line.
        others: Those that are not read.
    """
    from grpo_lightning.composition import CONF
    from grpo_lightning.settings.suggestions import known_keys, unknown_option

    if options := [word for word in others if word.startswith("-")]:
        following = words[words.index(options[0]) + 1 :]
        return unknown_option(options[0], next(iter(following), None), known_keys(CONF))
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    first = [word for word in words if word not in overrides]
    told = " ".join(map(shell_word, [*first, *overrides]))
    return f"{one_line(others[0])}: options stand before overrides; allowed is {program()} {told}"


def _end(*_: object) -> None:
    """End this process before it has done anything; of several processes the first one says so."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show("interrupted")
    os._exit(INTERRUPTED)
