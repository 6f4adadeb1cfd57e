"""The report on fabricated runs, against numbers by hand and by scipy."""

import json
import math

import pytest
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.checkpoint import lock
from grpo_lightning.report import Estimate, compare, curve, estimate, find_runs, parse_overrides, student_t
from grpo_lightning.report.__main__ import main

METRIC = "val/pass@1"
# weight -> seed -> the curve at steps 0, 10, 20
CURVES = {
    "0.0": {"0": [0.2, 0.4, 0.50], "1": [0.2, 0.5, 0.60], "2": [0.2, 0.3, 0.55]},
    "0.1": {"0": [0.2, 0.6, 0.80], "1": [0.2, 0.7, 0.70], "2": [0.2, 0.5, 0.84]},
    "1.0": {"0": [0.2, 0.1, 0.30], "1": [0.2, 0.9, 0.45], "2": [0.2, 0.2, 0.39]},
}


def write_run(directory, overrides, points, *, kind="csv", steps=(0, 10, 20), **more):
    directory.mkdir(parents=True, exist_ok=True)
    last = {METRIC: points[-1]} if points else {}
    summary = {"metrics": last, "steps": 20, "seconds": 7.2, "overrides": overrides, "status": "finished"} | more
    (directory / "summary.json").write_text(json.dumps(summary))
    if kind == "csv":
        (directory / "csv").mkdir()
        rows = [f"{value},,{step}" for step, value in zip(steps, points)]
        rows.insert(1, ",0.5,7")  # a row of a training step
        (directory / "csv" / "metrics.csv").write_text("\n".join([f"{METRIC},reward/total,step", *rows]) + "\n")
    elif kind == "events":
        writer = SummaryWriter(str(directory / "tensorboard"))
        for step, value in zip(steps, points):
            writer.add_scalar(METRIC, value, step)
        writer.close()


@pytest.fixture
def sweep(tmp_path):
    place = tmp_path / "sweep"
    jobs = [(weight, seed) for weight in CURVES for seed in CURVES[weight]]
    for number, (weight, seed) in enumerate(jobs):
        overrides = ["steps=20", f"reward.format.weight={weight}", f"seed={seed}"]
        write_run(place / str(number), overrides, CURVES[weight][seed])
    return place


def printed(capsys, *arguments):
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_intervals_are_students():
    for degrees in (1, 2, 9, 10, 30, 1000):
        assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)
    result = estimate([1.0, 2.0, 6.0])  # mean 3, s² = (4 + 1 + 9) / 2 = 7; t(.975, 2) = 4.302652729749464
    half = 4.302652729749464 * math.sqrt(7 / 3)
    assert (result.n, result.mean) == (3, 3.0)
    assert (result.low, result.high) == pytest.approx((3 - half, 3 + half), rel=1e-5)
    assert estimate([4.0]).low is None


def test_intervals_of_rates_stay_within_their_bounds(tmp_path):
    """Wilson: at both ends (mean - p)² = t² · p (1 - p) / N, and s² = mean (1 - mean) n / N."""
    for values in ([0.9, 1.0, 1.0], [0.0, 0.02], [0.80, 0.70, 0.84]):
        result = estimate(values, is_rate=True)
        n, mean, variance = len(values), sum(values) / len(values), stats.tvar(values)
        trials = mean * (1 - mean) * n / variance
        for p in (result.low, result.high):
            assert 0 <= p <= 1
            assert (mean - p) ** 2 == pytest.approx(stats.t.ppf(0.975, n - 1) ** 2 * p * (1 - p) / trials, rel=1e-4)
        assert result.low < result.mean < result.high
    assert estimate([0.9, 1.0, 1.0]).high > 1
    assert estimate([1.0, 1.0], is_rate=True) == Estimate(2, 1.0, 1.0, 1.0)
    for seed, value in enumerate([0.9, 1.0, 1.0]):
        write_run(tmp_path / str(seed), [f"seed={seed}"], [0.5, value], steps=(0, 10))
    [line] = compare(find_runs(tmp_path), curves=True).lines[METRIC]
    assert line.last == line.curve[10] == estimate([0.9, 1.0, 1.0], is_rate=True)


@pytest.mark.parametrize("composed", [False, True])
def test_totals_of_other_weights_name_no_best(tmp_path, capsys, composed):
    for weight, seed in ((0.1, 0), (0.1, 1), (1.0, 0), (1.0, 1)):
        place = tmp_path / f"{weight}_{seed}"
        metrics = {METRIC: 0.5 + weight / 10, "reward/total": 1 + weight, "reward/format": 0.9 - weight / 2}
        write_run(place, [f"reward.format.weight={weight}", f"seed={seed}"], [], kind="none", metrics=metrics)
        if composed:
            (place / ".hydra").mkdir()
            rewards = {"format": {"weight": weight, "function": {"_target_": "f"}}}
            (place / ".hydra" / "config.yaml").write_text(json.dumps({"reward": rewards}))
    comparison = compare(find_runs(tmp_path))
    best = {metric: [line.label for line in lines if line.best] for metric, lines in comparison.lines.items()}
    low, high = "reward.format.weight=0.1", "reward.format.weight=1.0"
    assert best == {METRIC: [high], "reward/total": [], "reward/format": [low]}
    text = printed(capsys, tmp_path, "--metric", "reward/total")
    assert "reward/total names no best" in text
    assert "*" not in text.replace("**", "")


def test_lines_that_are_equal_name_no_best(tmp_path):
    for rate in ("1e-4", "2e-4"):
        write_run(tmp_path / rate, [f"optimizer.lr={rate}"], [0.2, 0.4], steps=(0, 10))
    assert not any(line.best for line in compare(find_runs(tmp_path)).lines[METRIC])


def test_lines_agree_with_scipy(sweep):
    comparison = compare(find_runs(sweep), at=[10], baseline="reward.format.weight=0.0")
    assert list(comparison.keys) == ["reward.format.weight"]
    lines = comparison.lines[METRIC]
    assert [line.settings["reward.format.weight"] for line in lines] == ["0.0", "0.1", "1.0"]
    for line in lines:
        curves = list(CURVES[line.settings["reward.format.weight"]].values())
        last = [values[-1] for values in curves]
        assert (line.last.n, line.last.mean) == (3, pytest.approx(sum(last) / 3, rel=1e-9))
        assert line.last == estimate(last, is_rate=True)
        assert line.first == pytest.approx(0.2)
        assert line.mean == pytest.approx(sum(map(sum, curves)) / 9)
        assert line.highest == max(map(max, curves))
        assert line.curve[10].mean == pytest.approx(sum(values[1] for values in curves) / 3)
    paired = stats.ttest_rel([0.80, 0.70, 0.84], [0.50, 0.60, 0.55]).confidence_interval(0.95)
    assert lines[0].difference is None
    assert lines[1].difference.mean == pytest.approx((0.30 + 0.10 + 0.29) / 3, rel=1e-9)
    assert (lines[1].difference.low, lines[1].difference.high) == pytest.approx(tuple(paired), rel=1e-4)
    assert [line.best for line in lines] == [False, True, False]


def test_differences_are_of_common_seeds_and_of_equal_other_keys(tmp_path):
    values = {("grpo", "4"): {0: 0.1, 1: 0.2}, ("grpo", "8"): {0: 0.5}, ("dapo", "4"): {1: 0.7, 2: 0.9}}
    for (algorithm, size), seeds in values.items():
        for seed, value in seeds.items():
            words = [f"algorithm={algorithm}", f"rollout.group_size={size}", f"seed={seed}"]
            write_run(tmp_path / "_".join(words), words, [value], steps=(20,))
    lines = compare(find_runs(tmp_path), baseline="algorithm=grpo").lines[METRIC]
    differences = {tuple(line.settings.values()): line.difference for line in lines}
    assert differences[("dapo", "4")].n == 1
    assert differences[("dapo", "4")].mean == pytest.approx(0.7 - 0.2)
    assert differences[("grpo", "8")] is None


def test_a_sweep_is_printed_as_markdown_or_json(sweep, capsys):
    lines = printed(capsys, sweep, "--baseline", "reward.format.weight=0.0", "--at", "10", "12").splitlines()
    assert lines[0] == "**val/pass@1 by reward.format.weight**"
    # (0.80 + 0.70 + 0.84) / 3; at 10 (0.6 + 0.7 + 0.5) / 3
    assert lines[5] == "| 0.1                  | 3 | .200 → .780 * | [.566, .906] | .527 | .840    | .600  | -     |"
    assert ["|", "0.1", "|", "3", "|", "+0.2300", "|", "[-.050,", ".510]", "|"] in map(str.split, lines)
    assert lines[-1] == "* best val/pass@1: reward.format.weight=0.1 with .780 [.566, .906]"
    data = json.loads(printed(capsys, sweep, "--format", "json"))
    assert data["by"] == ["reward.format.weight"]
    assert data["lines"][1]["last"]["mean"] == pytest.approx(0.78)
    assert data["lines"][1]["seeds"] == {"0": 0.8, "1": 0.7, "2": 0.84}
    rows = printed(capsys, sweep, "--format", "csv").splitlines()
    assert rows[0].startswith("reward.format.weight,metric,seeds.0,seeds.1,seeds.2,last.n,last.mean,")
    assert rows[2].startswith("0.1,val/pass@1,0.8,0.7,0.84,3,0.77999")
    for words, message in (
        (["--by", "optimizer.lr"], "--by=optimizer.lr: no run has this setting"),
        (["--metric", "val/x"], "--metric=val/x: no run has it; there are val/pass@1"),
        (["--baseline", "reward.format.weight=7"], "no line has it; there are reward.format.weight=0.0; reward.f"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([str(sweep), *words])


def test_curves_come_from_csv_or_from_event_files(tmp_path):
    for kind in ("csv", "events"):
        write_run(tmp_path / kind, ["seed=0"], [0.25, 0.5], kind=kind, steps=(0, 1))
        assert curve(tmp_path / kind, METRIC) == [(0, 0.25), (1, 0.5)]
        assert curve(tmp_path / kind, "reward/format") == []


def test_the_summary_is_enough_unless_curves_are_asked_for(tmp_path):
    values = {"first": 0.1, "last": 0.4, "mean": 0.3, "min": 0.05, "max": 0.45}
    write_run(tmp_path / "run", ["seed=0"], [0.1, 0.4], steps=(0, 10), values={METRIC: values})
    [line] = compare(find_runs(tmp_path), at=[10]).lines[METRIC]
    assert (line.mean, line.highest, line.curve[10].mean) == (0.3, 0.45, 0.4)
    write_run(tmp_path / "last_only", ["seed=0"], [0.5], kind="none")
    [line] = compare(find_runs(tmp_path / "last_only")).lines[METRIC]
    assert (line.settings, line.last.mean, line.first) == ({"run": "last_only"}, 0.5, None)
    metrics = {METRIC: 0.5, "val/words/pass@1": 0.25, "val/words/maj@4": 0.5}  # of a mixture
    write_run(tmp_path / "mixture", ["seed=0"], [0.5], kind="none", metrics=metrics)
    assert compare(find_runs(tmp_path / "mixture")).lines.keys() == {METRIC, "val/words/pass@1"}


def test_unfinished_runs_are_listed_with_their_reason(sweep, capsys):
    write_run(sweep / "9", ["seed=9"], [], kind="none", status="failed", error="reward 'x' crashed\nmore")
    for name in ("10", "11"):
        (sweep / name / ".hydra").mkdir(parents=True)
        (sweep / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n")
    (sweep / "12").mkdir()
    (sweep / "12" / "summary.json").write_text("{")
    done = [json.loads((sweep / str(n) / "summary.json").read_text())["overrides"] for n in range(9)]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": [*done, ["seed=9"], ["seed=10"], ["steps=20", "seed=77"]]}))
    with lock.lock(sweep / "11"):
        text = printed(capsys, sweep)
    for part in (
        "5 of 14 runs without a result:",
        "9 (seed=9): failed, “reward 'x' crashed more”",
        "10 (seed=10): killed, it has begun",
        "11 (seed=11): running, a process",
        "12: killed, it has begun",
        "(steps=20 seed=77): missing, a job of the sweep that has not begun",
        ".200 → .780 *",
    ):
        assert part in text


def test_several_runs_of_one_seed_are_no_more_evidence(tmp_path):
    for number, (seed, value) in enumerate([(0, 0.2), (0, 0.4), (1, 0.5)]):
        write_run(tmp_path / str(number), [f"seed={seed}"], [value], steps=(20,))
    [line] = compare(find_runs(tmp_path)).lines[METRIC]
    assert (line.last.n, line.last.mean) == (2, pytest.approx((0.4 + 0.5) / 2))


def test_keys_may_be_named_and_are_read_from_the_settings_too(tmp_path):
    write_run(tmp_path / "a", ["steps=20"], [0.1], steps=(20,), choices={"algorithm": "grpo"})
    write_run(tmp_path / "b", ["steps=20", "algorithm=dapo", "rollout.group_size=4"], [0.2], steps=(20,))
    (tmp_path / "a" / ".hydra").mkdir()
    (tmp_path / "a" / ".hydra" / "config.yaml").write_text("rollout:\n  group_size: 16\n")
    for by, expected in (((), [("dapo", "4"), ("grpo", "16")]), (["rollout.group_size"], [("4",), ("16",)])):
        lines = compare(find_runs(tmp_path), by=by).lines[METRIC]
        assert [tuple(line.settings.values()) for line in lines] == expected
    assert parse_overrides(["+a.b=1", "~c", "x='y z'"]) == {"a.b": "1", "c": "removed", "x": "y z"}


def test_texts_of_runs_are_printed_harmlessly_and_without_secrets(tmp_path, capsys):
    token = "hf_" + "AbCdEfGh" * 8
    for number in range(2):
        write_run(tmp_path / str(number), [f"x=\x1b[2J{number}|", f"y={token}{number}"], [0.1, 0.2, 0.3])
    for form in ("table", "json"):
        text = printed(capsys, tmp_path, "--by", "x", "y", "--format", form)
        assert "\x1b" not in text
        assert "AbCdEf" not in text


def test_curves_are_drawn_with_a_band(sweep, tmp_path):
    value = compare(find_runs(sweep), curves=True).lines[METRIC][0].curve[10]
    assert value.mean == pytest.approx(0.4)  # (0.4 + 0.5 + 0.3) / 3
    assert value == estimate([0.4, 0.5, 0.3], is_rate=True)
    main([str(sweep), "--metric", METRIC, "reward/total", "--plot", str(tmp_path / "new" / "curve.png")])
    for number in range(3):  # the first line has no reward/total: the others keep their colors
        file = sweep / str(number) / "csv" / "metrics.csv"
        file.write_text(file.read_text().replace("reward/total", "reward/other"))
    main([str(sweep), "--metric", METRIC, "reward/total", "--plot", str(tmp_path / "curve.svg")])
    drawn = (tmp_path / "curve.svg").read_text()
    assert [drawn.count(f"stroke: {color}") for color in ("#1f77b4", "#ff7f0e", "#2ca02c")] == [2, 3, 3]  # with legend
    write_run(tmp_path / "other" / "0", ["seed=0"], [0.5], kind="none")
    with pytest.raises(SystemExit, match="no run has a curve of val/pass@1: these are kept by logger=tensorboard"):
        main([str(tmp_path / "other"), "--plot", str(tmp_path / "empty.png")])
    write_run(sweep / "9", ["reward.format.weight=$\\frac1$"], [0.1, 0.2, 0.3])  # is no formula
    main([str(sweep), "--metric", METRIC, "--plot", str(tmp_path / "curve.svg")])
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
