"""Learning in episodes: a calculator and a guessing game, each beside a control, three seeds of each.

python -m benchmarks.episodes            all of it: figures, the table in docs/episodes.md and its picture
python -m benchmarks.episodes --seeds 0  fewer seeds
python -m benchmarks.episodes --report   table and picture again, from the stored figures

The supervised stage is done once for each of the two; every run after it is a process of its own, one at a time. Runs
that are in the directory --runs already are not done again.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.machine import described

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "episodes.md", ROOT / "docs" / "episodes_curve.png"
RESULTS = Path(__file__).parent / "results" / "cpu" / "episodes.json"
GAMES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "calculator": {"with the calculator": [], "without": ["environment=none"]},
    "guess": {"honest replies": [], "random replies": ["environment.function.random_replies=1"]},
}
"""Game -> what is compared -> its settings beside experiment=GAME."""
METRIC = "val/pass@1"


def trained(directory: Path, *settings: str) -> dict[str, Any]:
    """What a run found: seconds by its own clock, and the held-out pass@1 after each number of steps."""
    if not (directory / "summary.json").exists():
        command = [sys.executable, "train.py", *settings, "logger=[csv]", f"hydra.run.dir={directory}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "summary.json").read_text())
    with (directory / "csv" / "metrics.csv").open() as file:
        curve = [(int(row["step"]), float(row[METRIC])) for row in csv.DictReader(file) if row.get(METRIC)]
    return {"seconds": summary["seconds"], "steps": summary["steps"], "curve": curve}


def run(runs: Path, seeds: Iterable[int]) -> dict[str, Any]:
    """The figures of all games and controls."""
    found: dict[str, Any] = {"machine": described()}
    for game, styles in GAMES.items():
        taught = runs / f"{game}_taught"
        found[game] = {"taught": trained(taught, f"experiment={game}_taught")}
        for style, settings in styles.items():
            found[game][style] = {}
            for seed in seeds:
                path = f"policy.path={taught / 'export'}"
                directory = runs / f"{game}_{style.replace(' ', '_')}_{seed}"
                one = trained(directory, f"experiment={game}", path, f"seed={seed}", *settings)
                found[game][style][str(seed)] = one
                print(f"{game}, {style}, seed {seed}: {told(one)}, {one['seconds']:.0f} s", flush=True)
    return found


def told(one: Mapping[str, Any]) -> str:
    """Pass@1 before and after a run."""
    return f"{one['curve'][0][1]:.3f} → {one['curve'][-1][1]:.3f}"


def table(found: Mapping[str, Any]) -> str:
    """A row for each game and each control."""
    seeds = next(iter(found["calculator"][style] for style in GAMES["calculator"]))
    lines = [
        f"| command | pass@1, seeds {', '.join(seeds)} | s |",
        "|---|---|---|",
    ]
    for game, styles in GAMES.items():
        for style, settings in styles.items():
            of_seeds = found[game][style].values()
            command = " ".join(("python train.py", f"experiment={game}", *settings))
            seconds = ", ".join(f"{one['seconds']:.0f}" for one in of_seeds)
            lines.append(f"| `{command}` | {', '.join(map(told, of_seeds))} | {seconds} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A panel for each game: the mean over seeds, and the seeds themselves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GAMES), figsize=(8, 2.8), dpi=110, sharey=True)
    for axes, (game, styles) in zip(panels, GAMES.items(), strict=True):
        for style in styles:
            curves = [one["curve"] for one in found[game][style].values()]
            steps = [step for step, _ in curves[0]]
            [line] = axes.plot(
                steps, [mean(values) for values in zip(*([y for _, y in c] for c in curves), strict=True)]
            )
            line.set_label(style)
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=line.get_color(), alpha=0.3, linewidth=0.8)
        axes.set(title=game, xlabel="rollouts", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="held-out pass@1")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def report(found: Mapping[str, Any]) -> None:
    """Table and picture into docs/."""
    text = PAGE.read_text(encoding="utf-8")
    marks = "<!-- episodes -->", "<!-- end episodes -->"
    new, count = re.subn(f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table(found)}\n{marks[1]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE}: expected one {marks[0]}, got {count}")
    PAGE.write_text(new, encoding="utf-8")
    draw(found, PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "episodes", help="where runs are kept")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if not given.report:
        RESULTS.write_text(json.dumps(run(given.runs.resolve(), given.seeds), indent=1) + "\n")
    report(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
