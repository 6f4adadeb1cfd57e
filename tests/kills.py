"""Kills runs at moments that a clock chooses, continues them, and compares them with runs that nothing broke.

python -m tests.kills --count 50 --seed 0

A round starts train.py, ends all of its processes by SIGKILL, some rounds more than once, and lets ``checkpoint=last``
finish. Its final weights and optimizer state must then be bit for bit those of the unbroken run, and its directory must
hold the unbroken run's files and no other. One line per round tells where it was killed.
"""

import argparse
import fnmatch
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.composed import ROOT
from tests.support.running import SMALL

COMMON = (
    *(*SMALL, "steps=16", "validation.every=4", "data.validation_size=16", "validation.samples_per_prompt=8"),
    *("data.prompts_per_step=8", "rollout.max_new_tokens=32", "callbacks.checkpoint.every=2", "optimizer.lr=0.01"),
)
EPOCHS = ("module.ppo_epochs=2", "module.minibatch_size=16")
TWO = ("trainer.accelerator=cpu", "trainer.devices=2")
KINDS = {
    "grpo, 2 epochs": EPOCHS,
    "episodes, 2 epochs": (
        *("environment=custom", "environment.function._target_=tests.support.games.vowels", "environment.timeout=60"),
        *("reward=[environment,custom]", "advantage=to_go", *EPOCHS),
    ),
    "ddp, 2 processes": ("trainer=ddp", *TWO),
    "fsdp, 2 processes": ("trainer=fsdp", *TWO),
}
"""Taken in turn."""
REQUIRED = (
    *(".hydra/config.yaml", ".hydra/overrides.yaml", "checkpoints/best.ckpt"),
    *("checkpoints/last.ckpt", "export/README.md", "export/chat_template.jinja", "export/config.json"),
    *("export/generation_config.json", "export/model.safetensors", "export/tokenizer.json"),
    *("export/tokenizer_config.json", "health.json", "rollouts/000001.jsonl.gz", "summary.json"),
    *("tensorboard/events.out.tfevents.*", "tensorboard/hparams.yaml", "train.log"),
)
OPTIONAL = ("train_ddp_process_1.log",)
"""What a finished run directory must hold, and what it may hold besides."""
MAX_SECONDS = 120.0
"""That a run may take, starting Python included."""


class Started:
    """train.py in a session of its own, continuing what a directory holds."""

    def __init__(self, directory: Path, settings: tuple[str, ...]) -> None:
        self.log, self.notes = directory.with_suffix(".log"), directory.with_suffix(".phases")
        self.notes.unlink(missing_ok=True)
        callback = f"+callbacks.phases={{_target_: tests.support.killing.Phases, path: '{self.notes}'}}"
        own = (f"hydra.run.dir={directory}", "checkpoint=last", callback)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "train.py", *COMMON, *settings, *own]
        with self.log.open("wb") as log:
            streams: Any = {"stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)

    @property
    def phases(self) -> list[str]:
        """What it has come to, from its first step on."""
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def first_phase(self) -> float:
        """The moment at which its first phase begins."""
        until = time.monotonic() + MAX_SECONDS
        while not self.phases and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return time.monotonic()

    def kill(self) -> None:
        """End all of its processes at once, whatever they are doing."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> float:
        """Seconds from its first phase to its last; RuntimeError if it failed, or took too long."""
        since = self.first_phase()
        while self.process.poll() is None and "end" not in self.phases and time.monotonic() - since < MAX_SECONDS:
            time.sleep(0.02)
        took = time.monotonic() - since
        if took >= MAX_SECONDS:
            self.kill()
        if status := self.process.wait(MAX_SECONDS):
            raise RuntimeError(
                f"exit status {status} after {took:.0f} s: {self.log.read_text(errors='replace')[-1500:]}"
            )
        return took


def broken(directory: Path, settings: tuple[str, ...], seconds: float, chance: random.Random, most: int) -> list[str]:
    """Kill a run up to ``most`` times, then let it finish; returns where it was killed."""
    places: list[str] = []
    wanted = chance.randint(1, most)
    while len(places) < wanted:
        run = Started(directory, settings)
        due = run.first_phase() + chance.uniform(0.0, seconds * (1 if not places else 0.5))
        while time.monotonic() < due and run.process.poll() is None:
            time.sleep(min(0.002, max(0.0, due - time.monotonic())))
        if run.process.poll() is not None:  # it was quicker than the one that was measured
            places.append("after its end")
            break
        run.kill()
        places.append((run.phases or ["before the first step"])[-1])
    Started(directory, settings).finish()
    return places


def difference(expected: Any, found: Any, where: str = "") -> str | None:
    """The first place where two checkpoints' contents differ, or None."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return None if torch.equal(expected, found) else where
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{where}: the keys {sorted(map(str, expected.keys() ^ found.keys()))}"
        pairs = [(expected[key], found[key], f"{where}.{key}") for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        pairs = [(one, other, f"{where}.{number}") for number, (one, other) in enumerate(zip(expected, found))]
    else:
        return None if expected == found else where
    return next((place for one, other, name in pairs if (place := difference(one, other, name))), None)


def problems(unbroken: Path, directory: Path) -> list[str]:
    """What is wrong with a continued run: weights or optimizer state that differ, missing and leftover files."""
    one, other = (torch.load(place / "checkpoints/last.ckpt", weights_only=True) for place in (unbroken, directory))
    found = [
        f"{place} differs"
        for part in ("state_dict", "optimizer_states", "lr_schedulers")
        if (place := difference(one[part], other[part], part))
    ]
    if one["step"]["completed"] != other["step"]["completed"]:
        found.append(f"{other['step']['completed']} steps instead of {one['step']['completed']}")
    if (unbroken / "export/model.safetensors").read_bytes() != (directory / "export/model.safetensors").read_bytes():
        found.append("export/model.safetensors differs")
    paths = [path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()]
    files = {str(path.relative_to(directory)) for path in paths}
    allowed = (*REQUIRED, *OPTIONAL)
    if left := sorted(name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in allowed)):
        found.append(f"left over: {', '.join(left)}")
    if absent := sorted(pattern for pattern in REQUIRED if not fnmatch.filter(files, pattern)):
        found.append(f"absent: {', '.join(absent)}")
    return found


def main(count: int, seed: int, place: Path, *, most: int = 2) -> int:
    """Make rounds of up to ``most`` kills in a directory and say how they ended; returns how many ended badly."""
    chance = random.Random(seed)
    measured: dict[str, float] = {}
    bad = 0
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        unbroken = place / kind.partition(",")[0]
        if kind not in measured:
            measured[kind] = Started(unbroken, KINDS[kind]).finish()
            wrong = problems(unbroken, unbroken)
            bad += bool(wrong)
            print(f"{kind}: {measured[kind]:.1f} s from the first phase to the last, unbroken; {wrong}", flush=True)
        directory = place / f"round{number + 1}"
        try:
            places = broken(directory, KINDS[kind], measured[kind], chance, most)
            wrong = problems(unbroken, directory)
        except RuntimeError as error:
            places, wrong = ["?"], [str(error)]
        bad += bool(wrong)
        verdict = "; ".join(wrong) if wrong else "equal"
        print(f"round {number + 1} of {count}, {kind}: killed in {', then '.join(places)}: {verdict}", flush=True)
    print(f"{count} rounds, {bad} bad", flush=True)
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(main(given.count, given.seed, Path(directory)) > 0)
