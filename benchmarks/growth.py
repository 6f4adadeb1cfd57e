"""How a whole step's time grows with completions per prompt, prompt length, completion length and vocabulary."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.process import Worker
from benchmarks.setting import Setting
from benchmarks.timing import in_turns, ratio, told

LONG = Setting("growth", prompt=512, prompts=2)
SHORT = Setting("growth")
AXES = {
    "K": [replace(LONG, group=group) for group in (8, 16, 32)],
    "P": [replace(SHORT, prompts=2, prompt=prompt) for prompt in (128, 256, 512, 1024)],
    "R": [replace(SHORT, mean=None, cap=cap) for cap in (32, 64, 128, 256)],
    "V": [replace(SHORT, prompts=2, vocabulary=size) for size in (2048, 16_384, 65_536)],
}
FIELD = {"K": "group", "P": "prompt", "R": "cap", "V": "vocabulary"}


def measured(system: str, settings: list[Setting], *, warmup: int, steps: int) -> list[list[float]]:
    """Seconds of each setting's steps, taken in turns."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as started:
        workers = {}
        for number, setting in enumerate(settings):
            place = Path(directory) / str(number)
            place.mkdir()
            setting.write(place)
            workers[str(number)] = started.enter_context(Worker(f"benchmarks.{system}", setting.dumps(), str(place)))
        actions = {name: (lambda worker=worker: worker.step()["seconds"]) for name, worker in workers.items()}
        seconds = in_turns(actions, warmup=warmup, steps=steps)
    return list(seconds.values())


def run(*, axes: Mapping[str, list[Setting]] = AXES, warmup: int = 2, steps: int = 8) -> dict:
    found: dict = {}
    for axis, settings in axes.items():
        values = [getattr(setting, FIELD[axis]) for setting in settings]
        found[axis] = {"values": values}
        for system, ends_only in (("ours", False), ("theirs", True)):
            chosen = [settings[0], settings[-1]] if ends_only else settings
            seconds = measured(
                system,
                chosen,
                warmup=min(warmup, 1) if ends_only else warmup,
                steps=min(steps, 3) if ends_only else steps,
            )
            found[axis][system] = {
                "values": [getattr(setting, FIELD[axis]) for setting in chosen],
                "seconds": [median(row) for row in seconds],
                **ratio(seconds[-1], seconds[0]),
            }
            shown = ", ".join(f"{median(row):.2f} s" for row in seconds)
            name = "ours" if system == "ours" else "TRL"
            print(f"{axis} {values[0]} -> {values[-1]} {name:5} {told(found[axis][system])}   {shown}", flush=True)
    return found
