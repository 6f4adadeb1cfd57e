"""Score recorded rollouts anew, compare the advantages and losses of other settings, or repeat what was logged."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.output.terminal import last_through_closed_pipes, say, sentence
from grpo_lightning.recording import files

_PARTS = ("reward", "advantage", "loss", "rollout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, for the rollouts that a run has recorded, what was logged and what comes out with these settings.

    Overrides are those of train.py, such as reward=[accuracy,length] or algorithm=dr_grpo. Without any, the values that
    were logged come out again, bit for bit.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_lightning.replay", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of a run, which has rollouts/ and .hydra/")
    parser.add_argument("overrides", nargs="*", help="settings that are to be others than they were")
    parser.add_argument("--steps", default=":", metavar="FIRST:LAST", help="both included; default: all")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="[%(levelname)s] %(message)s")
    try:
        text = replay(options.directory, options.overrides, steps=options.steps, form=options.format)
    except (ValueError, OSError) as error:
        say(sentence(error))
        sys.exit(1)
    print(text)


def replay(directory: Path, overrides: Sequence[str], *, steps: str = ":", form: str = "table") -> str:
    """What `main` prints.

    Raises:
        ValueError: There are no recorded rollouts, they are damaged, or the settings cannot work.
    """
    place = files.folder(directory)
    known = files.steps(place)
    if not known:
        raise ValueError(f"{place} has no recorded rollouts; a run with callbacks=rollouts records them")
    chosen = _chosen(steps, known)
    from grpo_lightning.composition.recalled import recalled

    run = place.parent if place.name == files.FOLDER else place
    config, build = recalled(run, overrides, _PARTS)
    import torch

    from grpo_lightning.recording.rows import restored
    from grpo_lightning.replay.presentation import FORMS
    from grpo_lightning.replay.step import replayed

    found = []
    for step in chosen:
        rollout = restored(*files.read(known[step]), torch.device("cpu"))
        found.append(replayed(rollout, config, build))
    return FORMS[form](found, overrides)


def _chosen(steps: str, known: dict[int, Path]) -> list[int]:
    asked = re.fullmatch(r"(\d*)(:?)(\d*)", steps)
    if not asked or steps == "":
        raise ValueError(f"--steps {steps}: allowed is FIRST:LAST, such as 10:50, or one step")
    first, several, last = asked.groups()
    low = int(first or 0)
    high = int(last) if last else low if not several else max(known)
    chosen = [step for step in known if low <= step <= high]
    if not chosen:
        raise ValueError(f"--steps {steps}: recorded are {files.listed(known)}")
    return chosen


if __name__ == "__main__":
    last_through_closed_pipes()
    main()
