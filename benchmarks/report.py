"""Tables and pictures of the stored figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import compare as comparison
from benchmarks.gpu.runner import ALL
from benchmarks.gpu.table import rendered

CASES = [case.name for case in comparison.CASES]
HERE = Path(__file__).parent
NAMES = {"ours": "grpo-lightning", "theirs": "TRL 1.16.0"}


def table(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def spread(found: dict[str, Any]) -> str:
    low, high = found["quartiles"]
    return f"**{found['ratio']:.2f}** ({low:.2f} - {high:.2f})"


def compare(found: dict[str, Any]) -> str:
    rows = []
    for name, row in sorted(found.items(), key=lambda item: CASES.index(item[0])):
        s, phases = row["setting"], row.get("phases")
        lengths = f"{'mean 64, at most' if s['mean'] else 'all'} {s['cap']}"
        rest = [f"V {s['vocabulary']}"] if s["vocabulary"] > 2048 else []
        rest += ["half the groups dead"] if s["dead"] else []
        parts = [f"{phases[f'time/{phase}']:.2f}" for phase in ("rollout", "update")] if phases else ["not stored"]
        rows.append(
            [
                name,
                ", ".join([f"P {s['prompt']}, R {lengths}, K {s['group']} x {s['prompts']}", *rest]),
                f"{row['theirs']:.2f}",
                f"{row['ours']:.2f}",
                spread(row),
                " + ".join(parts),
            ]
        )
    return table("case | setting | TRL, s | ours, s | TRL / ours (quartiles) | rollout + update, s", rows)


def rollout(found: dict[str, Any]) -> str:
    rows = [[name, f"{r['generate']:.2f}", f"{r['ours']:.2f}", spread(r)] for name, r in found.items()]
    return table("case | `generate`, s | ours, s | `generate` / ours (quartiles)", rows)


def head(found: dict[str, Any]) -> str:
    forms = {"naive": "all logits at once", "recomputed": "chunks, recomputed", "one pass": "chunks, one pass"}
    rows = []
    for form, name in forms.items():
        memory = [row.get(form) for row in found["memory"].values()]
        time = found.get(form)
        rows.append([name, *("-" if m is None else f"{m:.0f}" for m in memory), spread(time) if time else "-"])
    columns = " | ".join(f"N {tokens}, MiB" for tokens in found["memory"])
    return table(f"form | {columns} | time / three products, N 2048 (quartiles)", rows)


def memory(found: dict[str, Any]) -> str:
    states = found.pop("states", None)
    rows = [
        [
            name,
            *(f"{r[part] / 2**30:.2f}" for part in ("weights", "optimizer", "reference", "sampling", "update", "peak")),
            f"{r['measured'] / 2**30:.2f}",
            f"**{r['measured'] / r['peak']:.2f}**",
        ]
        for name, r in found.items()
    ]
    columns = "weights | optimizer | reference | sampling | update | predicted peak | measured | measured / predicted"
    text = table(f"case | {columns}", rows)
    if states:
        grpo, ppo = (states[system] / 2**30 for system in ("grpo", "ppo"))
        text += f"\n\nStates of GRPO {grpo:.2f} GiB, of PPO {ppo:.2f} GiB: **{grpo / ppo:.2f}**."
    return text


def limit(found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{r['parameters'] / 1e6:.1f} M",
            f"{r['seconds']:.2f}",
            f"{r['gflops']:.0f}",
            f"**{r['fraction']:.2f}** ({r['quartiles'][0]:.2f} - {r['quartiles'][1]:.2f})",
        ]
        for name, r in found.items()
    ]
    return table("case | parameters | update, s | limit, GFLOP/s | fraction (quartiles)", rows)


def growth(found: dict[str, Any]) -> str:
    rows = []
    for axis, r in found.items():
        seconds = ", ".join(f"{s:.2f}" for s in r["ours"]["seconds"])
        ends = f"{r['values'][0]} → {r['values'][-1]}"
        rows.append([axis, ends, seconds, spread(r["ours"]), spread(r["theirs"])])
    return table("axis | from → to | ours, s | ours, last / first (quartiles) | TRL, last / first (quartiles)", rows)


def growth_picture(found: dict[str, Any], path: Path) -> None:
    labels = {
        "K": "completions per prompt, K",
        "P": "prompt tokens, P",
        "R": "completion tokens, R",
        "V": "vocabulary, V",
    }
    figure, axes = plt.subplots(1, len(found), figsize=(12, 3), squeeze=False)
    for axis, (name, rows) in zip(axes[0], found.items(), strict=True):
        for system in ("theirs", "ours"):
            axis.loglog(rows[system]["values"], rows[system]["seconds"], "o-", label=NAMES[system])
        axis.set_xlabel(labels[name])
        axis.set_xticks(rows["values"], [f"{value}" for value in rows["values"]])
        axis.minorticks_off()
        axis.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        times = rows["ours"]["seconds"] + rows["theirs"]["seconds"]
        axis.set_ylim(min(times) / 1.3, max(times) * 1.3)
    axes[0, 0].set_ylabel("seconds per step")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def learning(found: dict[str, Any]) -> str:
    rows = []
    for style, row in found.items():
        ends = {name: [curve[-1] for curve in row[name].values()] for name in NAMES}
        text = {
            name: ", ".join(f"{seconds:.0f} s / {steps}" for steps, seconds, _ in runs) for name, runs in ends.items()
        }
        rows.append([style, text["theirs"], text["ours"], f"**{median(row['ratios']):.2f}**"])
    return table("settings | TRL: seconds / steps, seeds 0, 1, 2 | ours | TRL / ours, median", rows)


def learning_picture(found: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(9, 3), sharey=True, squeeze=False)
    for axis, (style, row) in zip(axes[0], found.items(), strict=True):
        for name, color in (("theirs", "C0"), ("ours", "C1")):
            for seed, curve in row[name].items():
                _, seconds, passed = zip(*curve, strict=True)
                axis.plot(seconds, passed, color=color, label=NAMES[name] if seed == "0" else None)
        axis.axhline(0.9, color="gray", linewidth=0.5)
        axis.set_title(f"{style} settings")
        axis.set_xlabel("seconds of training")
    axes[0, 0].set_ylabel("sampled pass@1, held out")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "compare": compare,
    "rollout": rollout,
    "head": head,
    "limit": limit,
    "memory": memory,
    "growth": growth,
    "learning": learning,
}
PICTURES = {"growth": growth_picture, "learning": learning_picture}


def placed(text: str, name: str, content: str) -> str:
    """The text with this content between the markers of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def run(directory: Path = HERE) -> None:
    """Put the tables of ``results`` between their markers in README.md, and the pictures beside the figures."""
    readme = directory / "README.md"
    text = readme.read_text(encoding="utf-8")
    for path in sorted(directory.glob("results/*/*.json")):
        kind, part = path.parent.name, path.stem
        if part not in TABLES:
            continue
        found = json.loads(path.read_text())
        found.pop("machine")
        text = placed(text, f"{kind} {part}", TABLES[part](found))
        if part in PICTURES:
            PICTURES[part](found, path.with_suffix(".png"))
    stages = directory / "results" / "gpu" / "stages" / ALL
    text = placed(text, "gpu stages", rendered(json.loads(stages.read_text()) if stages.exists() else {}))
    readme.write_text(text, encoding="utf-8")
