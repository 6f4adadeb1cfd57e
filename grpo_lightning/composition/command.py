"""The command line: from words to an exit status."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.config.redaction import redact, single_line
from grpo_lightning.config.shell import command_name, shell_quote
from grpo_lightning.output.terminal import last_through_closed_pipes, show

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + 2, as a shell reports it."""


def main() -> None:
    """Train, validate or export, as the command line says."""
    last_through_closed_pipes()
    signal.signal(signal.SIGINT, _end)  # what is imported now has nothing to lose, and shows no traceback
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # rewards of one's own lie there, as beside any script
    try:
        from hydra._internal.utils import get_args_parser
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed for {sys.executable}: activate an environment with requirements.txt")

    asked, others = get_args_parser().parse_known_args()
    if others:
        sys.exit(redact(_not_read(sys.argv[1:], others)))
    if asked.config_dir:
        sys.path.append(str(Path(asked.config_dir).absolute()))  # and beside a recipe
    if not (asked.help or asked.hydra_help or asked.shell_completion or asked.info or asked.experimental_rerun):
        from grpo_lightning.composition.precheck import check

        check(asked)
    from grpo_lightning.composition.job import job

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job()
    except KeyboardInterrupt:
        _end()


def _not_read(words: Sequence[str], others: Sequence[str]) -> str:
    """What is said of words that are no option of Hydra's, and of overrides after one, which are not read as such.

    Args:
        words: All words of the command line.
        others: Those that are not read.
    """
    from grpo_lightning.composition import CONF
    from grpo_lightning.config.suggestions import known_keys, unknown_option

    if options := [word for word in others if word.startswith("-")]:
        following = words[words.index(options[0]) + 1 :]
        return unknown_option(options[0], next(iter(following), None), known_keys(CONF))
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    first = [word for word in words if word not in overrides]
    told = " ".join(map(shell_quote, [*first, *overrides]))
    return f"{single_line(others[0])}: options stand before overrides; allowed is {command_name()} {told}"


def _end(*_: object) -> None:
    """End this process before it has done anything; of several processes the first one says so."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show("interrupted")
    os._exit(INTERRUPTED)
