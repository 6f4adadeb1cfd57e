"""Learning in multi-turn episodes, for docs/episodes.md: a calculator and a guessing game, each beside a control.

The supervised stage is done once for each; every run after it is a process of its own, one at a time. Finished runs in
``runs/episodes`` are not done again.
"""

import csv
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.process import ROOT

PICTURE, RUNS = ROOT / "docs" / "episodes_curve.png", ROOT / "runs" / "episodes"
GAMES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "calculator": {"with the calculator": [], "without": ["environment=none"]},
    "guess": {"honest replies": [], "random replies": ["environment.function.random_replies=1"]},
}
"""Game -> what is compared -> its settings beside experiment=GAME."""
TINY = (
    "steps=1",
    "policy.path=pkg://grpo_lightning/policy/tiny",
    "data.prompts_per_step=2",
    "data.validation_size=4",
    "rollout.group_size=2",
)


def run(options: Namespace) -> dict[str, Any]:
    """The figures of all games and controls; with all seeds, the picture, too."""
    if options.smoke:
        with tempfile.TemporaryDirectory() as directory:
            return {"calculator": train(Path(directory), "experiment=calculator", *TINY)}
    figures: dict[str, Any] = {}
    print(f"| command | pass@1, seeds {options.seeds} | s |\n|---|---|---|")
    for game, styles in GAMES.items():
        taught = RUNS / f"{game}_taught"
        figures[game] = {"taught": train(taught, f"experiment={game}_taught")}
        for style, settings in styles.items():
            words = [f"experiment={game}", *settings]
            runs = figures[game][style] = [
                train(
                    RUNS / f"{game}_{style.replace(' ', '_')}_{seed}",
                    *(*words, f"policy.path={taught / 'export'}", f"seed={seed}"),
                )
                for seed in options.seeds
            ]
            ends = ", ".join(f"{one['curve'][0][1]:.3f} → {one['curve'][-1][1]:.3f}" for one in runs)
            seconds = ", ".join(f"{one['seconds']:.0f}" for one in runs)
            print(f"| `{' '.join(['python train.py', *words])}` | {ends} | {seconds} |", flush=True)
    draw(figures)
    return figures


def train(directory: Path, *settings: str) -> dict[str, Any]:
    """A run's seconds by its own clock, and the held-out pass@1 after each number of steps."""
    if not (directory / "summary.json").exists():
        command = [sys.executable, "train.py", *settings, "logger=[csv]", f"hydra.run.dir={directory}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "summary.json").read_text())
    with (directory / "csv" / "metrics.csv").open() as file:
        rows = [(row["step"], row.get("val/pass@1")) for row in csv.DictReader(file)]
    curve = [(int(step), float(value)) for step, value in rows if value]
    return {"seconds": summary["seconds"], "steps": summary["steps"], "curve": curve}


def draw(figures: Mapping[str, Any]) -> None:
    """A panel for each game: the mean over seeds, and the seeds themselves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GAMES), figsize=(8, 2.8), dpi=110, sharey=True)
    for axes, (game, styles) in zip(panels, GAMES.items(), strict=True):
        for style in styles:
            curves = [dict(one["curve"]) for one in figures[game][style]]
            mean = {step: fmean(curve[step] for curve in curves) for step in curves[0]}
            [line] = axes.plot(list(mean), list(mean.values()), label=style)
            for curve in curves:
                axes.plot(list(curve), list(curve.values()), color=line.get_color(), alpha=0.3, linewidth=0.8)
        axes.set(title=game, xlabel="rollouts", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="held-out pass@1")
    figure.tight_layout()
    figure.savefig(PICTURE)
    pyplot.close(figure)
