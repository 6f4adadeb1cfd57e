"""The command that continues a run, to be told to users."""

import re
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.output.redaction import redacted_words
from grpo_lightning.output.shell import hydra_text, program_words, search_words, shell_word

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
    kept = [word for word in redacted_words(overrides) if not _REPLACED.match(word)]
    own = [f"hydra.run.dir={hydra_text(str(directory))}", f"checkpoint={hydra_text(checkpoint)}"]
    if steps is not None:
        kept = [word for word in kept if word.partition("=")[0].lstrip("+") != "steps"]
        own = [f"steps={steps}", *own]
    return " ".join(map(shell_word, [*program_words(), *search_words(), *kept, *own]))
