"""The command that continues a run, to be told to users."""

import re
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.config.redaction import redact_overrides
from grpo_lightning.config.shell import command_words, config_path_words, quote_value, shell_quote

_REPLACED = re.compile(r"\+{0,2}(checkpoint|hydra\.run\.dir|run_dir)=")


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
        A line for a shell, with what the shell and Hydra would read otherwise in quotes, and secrets masked.
    """
    kept = [word for word in redact_overrides(overrides) if not _REPLACED.match(word)]
    own = [f"hydra.run.dir={quote_value(str(directory))}", f"checkpoint={quote_value(checkpoint)}"]
    if steps is not None:
        kept = [word for word in kept if word.partition("=")[0].lstrip("+") != "steps"]
        own = [f"steps={steps}", *own]
    return " ".join(map(shell_quote, [*command_words(), *config_path_words(), *kept, *own]))
