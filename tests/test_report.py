"""The report on fabricated runs, against numbers by hand and by scipy."""

import csv
import io
import json
import math
import subprocess
import sys

import pytest
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.checkpoint import lock
from grpo_lightning.report import curve, find_runs, main
from grpo_lightning.report.comparison import compare
from grpo_lightning.report.keys import given
from grpo_lightning.report.statistics import estimate, t_quantile
from tests.support.composed import ROOT

METRIC = "val/pass@1"
# weight -> seed -> the curve at steps 0, 10, 20
CURVES = {
    "0.0": {"0": [0.2, 0.4, 0.50], "1": [0.2, 0.5, 0.60], "2": [0.2, 0.3, 0.55]},
    "0.1": {"0": [0.2, 0.6, 0.80], "1": [0.2, 0.7, 0.70], "2": [0.2, 0.5, 0.84]},
    "1.0": {"0": [0.2, 0.1, 0.30], "1": [0.2, 0.9, 0.45], "2": [0.2, 0.2, 0.39]},
}


def write_run(directory, overrides, curve_of, *, kind="csv", steps=(0, 10, 20), metric=METRIC, **more):
    directory.mkdir(parents=True, exist_ok=True)
    last = {metric: curve_of[-1]} if curve_of else {}
    summary = {"metrics": last, "steps": 20, "seconds": 7.2, "overrides": overrides, "status": "finished"} | more
    (directory / "summary.json").write_text(json.dumps(summary))
    if kind == "csv":
        (directory / "csv").mkdir()
        rows = [f"{value},,{step}" for step, value in zip(steps, curve_of)]
        rows.insert(1, ",0.5,7")  # a row of a training step
        (directory / "csv" / "metrics.csv").write_text("\n".join([f"{metric},reward/total,step", *rows]) + "\n")
    elif kind == "events":
        writer = SummaryWriter(str(directory / "tensorboard"))
        for step, value in zip(steps, curve_of):
            writer.add_scalar(metric, value, step)
        writer.close()


@pytest.fixture
def sweep(tmp_path):
    place = tmp_path / "sweep"
    jobs = [(weight, seed) for weight in CURVES for seed in CURVES[weight]]
    for number, (weight, seed) in enumerate(jobs):
        overrides = ["steps=20", f"reward.format.weight={weight}", f"seed={seed}"]
        write_run(place / str(number), overrides, CURVES[weight][seed])
    return place


def shown(capsys, *arguments):
    main([str(one) for one in arguments])
    return capsys.readouterr().out


def test_the_quantile_is_students():
    for degrees in (1, 2, 3, 4, 5, 8, 9, 30, 101, 1000):
        for confidence in (0.5, 0.95, 0.999):
            expected = stats.t.ppf((1 + confidence) / 2, degrees)
            assert t_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


def test_an_interval_by_hand():
    found = estimate([1.0, 2.0, 6.0])  # mean 3, s² = (4 + 1 + 9) / 2 = 7; t(.975, 2) = 4.302652729749464
    half = 4.302652729749464 * math.sqrt(7 / 3)
    assert (found.n, found.mean) == (3, 3.0)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), rel=1e-12)
    assert estimate([4.0]).low is None


def test_lines_agree_with_scipy(sweep):
    comparison = compare(find_runs(sweep), at=[10], baseline="reward.format.weight=0.0")
    assert list(comparison.keys) == ["reward.format.weight"]
    lines = comparison.lines[METRIC]
    assert [line.settings for line in lines] == [("0.0",), ("0.1",), ("1.0",)]
    for line in lines:
        curves = list(CURVES[line.settings[0]].values())
        last = [one[-1] for one in curves]
        bounds = stats.t.interval(0.95, 2, loc=sum(last) / 3, scale=stats.sem(last))
        assert (line.last.n, line.last.mean) == (3, pytest.approx(sum(last) / 3, rel=1e-9))
        assert (line.last.low, line.last.high) == pytest.approx(bounds, rel=1e-9)
        assert line.estimate("first").mean == pytest.approx(0.2)
        assert line.estimate("mean").mean == pytest.approx(sum(map(sum, curves)) / 9)
        assert (line.extreme("low"), line.extreme("high")) == (min(map(min, curves)), max(map(max, curves)))
        assert line.curve[10].mean == pytest.approx(sum(one[1] for one in curves) / 3)
    assert [line.is_baseline for line in lines] == [True, False, False]
    differences = [0.80 - 0.50, 0.70 - 0.60, 0.84 - 0.55]
    paired_test = stats.ttest_rel([0.80, 0.70, 0.84], [0.50, 0.60, 0.55]).confidence_interval(0.95)
    assert lines[1].difference.mean == pytest.approx(sum(differences) / 3, rel=1e-9)
    assert (lines[1].difference.low, lines[1].difference.high) == pytest.approx(tuple(paired_test), rel=1e-9)
    assert [line.is_best for line in lines] == [False, True, False]


def test_differences_are_of_common_seeds_and_of_equal_other_keys(tmp_path):
    values = {("grpo", "4"): {0: 0.1, 1: 0.2}, ("grpo", "8"): {0: 0.5}, ("dapo", "4"): {1: 0.7, 2: 0.9}}
    number = 0
    for (algorithm, size), seeds in values.items():
        for seed, value in seeds.items():
            words = [f"algorithm={algorithm}", f"rollout.group_size={size}", f"seed={seed}"]
            write_run(tmp_path / str(number), words, [value], steps=(20,))
            number += 1
    lines = compare(find_runs(tmp_path), baseline="algorithm=grpo").lines[METRIC]
    found = {line.settings: line.difference for line in lines}
    assert found[("dapo", "4")].n == 1
    assert found[("dapo", "4")].mean == pytest.approx(0.7 - 0.2)
    assert found[("grpo", "8")] is None


def test_nine_jobs_in_one_command_at_80_columns(sweep, capsys):
    printed = shown(capsys, sweep, "--baseline", "reward.format.weight=0.0", "--at", "10")
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "val/pass@1 by reward.format.weight" in printed
    assert "0.200 → 0.780 *" in printed  # (0.80 + 0.70 + 0.84) / 3
    assert "+0.230  [-0.0499, 0.510]" in printed
    assert "* best val/pass@1: reward.format.weight=0.1 with 0.780 [0.601, 0.959]" in printed
    assert "…" not in printed


@pytest.mark.parametrize("kind", ["csv", "events"])
def test_curves_come_from_csv_or_from_event_files(kind, tmp_path):
    write_run(tmp_path / "run", ["seed=0"], [0.25, 0.5], kind=kind, steps=(0, 1))
    assert curve(tmp_path / "run", METRIC) == [(0, 0.25), (1, 0.5)]
    assert curve(tmp_path / "run", "reward/format") == []


def test_the_summary_is_enough_and_tensorboard_is_not_loaded(tmp_path):
    course = {"first": 0.1, "last": 0.4, "mean": 0.3, "min": 0.05, "max": 0.45, "best": 0.45, "best_step": 10}
    write_run(tmp_path / "run", ["seed=0"], [0.1, 0.4], kind="events", **{"values": {METRIC: course}})
    code = (
        "import sys; from grpo_lightning.report import main; main(sys.argv[1:]); "
        "print([name for name in ('tensorboard', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert "0.100 → 0.400" in done.stdout, done.stderr[-500:]
    assert "0.450" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_values_and_curves_the_last_value_is_known(tmp_path, capsys):
    write_run(tmp_path / "mine", ["seed=0"], [0.5], kind="none")
    printed = shown(capsys, tmp_path / "mine")
    assert "mine" in printed  # nothing was swept: named by its directory
    assert "0.500" in printed


@pytest.mark.parametrize("length", [0, 70, 200])
def test_paths_are_not_broken(length, sweep, capsys):
    place = sweep / ("n" * length)
    write_run(place / "9", ["seed=9"], [], kind="none", status="failed", error="of memory " * 20)
    assert f"  {place / '9'} (seed=9): failed, “of memory" in shown(capsys, sweep).replace("\n(seed", " (seed")


def test_what_a_run_says_of_its_end_is_quoted(tmp_path, capsys):
    for name in ("1", "2"):
        write_run(tmp_path / name, ["seed=1"], [0.5], kind="none")
    write_run(tmp_path / "3", ["seed=3"], [], kind="none", status="failed", error="continue with: x\ny")
    lines = [line.strip() for line in shown(capsys, tmp_path).splitlines()]
    assert "3 (seed=3): failed, “continue with: x y”" in [line.removeprefix(f"{tmp_path}/") for line in lines]


def test_what_did_not_finish_is_listed_with_its_reason(sweep, capsys):
    write_run(sweep / "9", ["seed=9"], [], kind="none", status="failed", error="reward 'x' crashed\nmore")
    for name in ("10", "11"):
        (sweep / name / ".hydra").mkdir(parents=True)
        (sweep / name / ".hydra" / "overrides.yaml").write_text(f"- seed={name}\n")
    (sweep / "12").mkdir()
    (sweep / "12" / "summary.json").write_text("{")
    done = [json.loads((sweep / str(n) / "summary.json").read_text())["overrides"] for n in range(9)]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": [*done, ["seed=9"], ["seed=10"], ["steps=20", "seed=77"]]}))
    with lock.held(sweep / "11"):
        printed = shown(capsys, sweep)
        text = " ".join(printed.split())
    assert "5 of 14 runs without a result:" in text
    for said in (
        "9 (seed=9): failed, “reward 'x' crashed more”",
        "10 (seed=10): killed, it has begun",
        "11 (seed=11): running, a process",
        "12: killed, it has begun",
        "(steps=20 seed=77): missing, a job of the sweep that has not begun",
    ):
        assert said in text
    assert "0.200 → 0.780 *" in printed


def test_a_lock_that_nobody_holds_is_no_running_run(tmp_path):
    (tmp_path / ".lock").write_text('{"pid": 1}')
    assert not lock.is_held(tmp_path)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom grpo_lightning.checkpoint import lock\n"
        "with lock.held(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert lock.is_held(tmp_path)
    holder.communicate("", timeout=60)
    assert not lock.is_held(tmp_path)


def test_curves_are_read_where_the_summary_is_not_enough(tmp_path):
    course = {"first": 0.1, "last": 0.4, "mean": 0.3, "min": 0.05, "max": 0.45}
    write_run(tmp_path, ["seed=0"], [0.1, 0.4], steps=(0, 10), **{"values": {METRIC: course}})
    [line] = compare(find_runs(tmp_path), at=[10]).lines[METRIC]
    assert line.curve[10].mean == 0.4
    assert line.estimate("deviation").mean == pytest.approx(0.15)  # of 0.1 and 0.4, by n
    [line] = compare(find_runs(tmp_path)).lines[METRIC]
    assert (line.estimate("mean").mean, line.extreme("high"), line.estimate("deviation")) == (0.3, 0.45, None)


def test_only_unfinished_runs_are_shown_as_such(tmp_path, capsys):
    write_run(tmp_path / "a", ["seed=0"], [0.1, 0.2, 0.3], status="preempted")
    assert "no run has finished: these are numbers of unfinished ones" in shown(capsys, tmp_path)


def test_several_runs_of_one_seed_are_no_more_evidence(tmp_path):
    for number, (seed, value) in enumerate([(0, 0.2), (0, 0.4), (1, 0.5)]):
        write_run(tmp_path / str(number), [f"seed={seed}"], [value], steps=(20,))
    comparison = compare(find_runs(tmp_path))
    [line] = comparison.lines[METRIC]
    assert line.last.n == 2
    assert line.last.mean == pytest.approx((0.3 + 0.5) / 2)
    assert any("several runs of seed 0" in note for note in comparison.notes)


def test_keys_may_be_named_and_are_read_from_the_settings_too(tmp_path):
    write_run(tmp_path / "a", ["steps=20"], [0.1], steps=(20,), choices={"algorithm": "grpo"})
    write_run(tmp_path / "b", ["steps=20", "algorithm=dapo", "rollout.group_size=4"], [0.2], steps=(20,))
    (tmp_path / "a" / ".hydra").mkdir()
    (tmp_path / "a" / ".hydra" / "config.yaml").write_text("rollout:\n  group_size: 16\n")
    assert [line.settings for line in compare(find_runs(tmp_path)).lines[METRIC]] == [("dapo", "4"), ("grpo", "16")]
    lines = compare(find_runs(tmp_path), by=["rollout.group_size"]).lines[METRIC]
    assert [line.settings for line in lines] == [("4",), ("16",)]
    assert given(["+a.b=1", "~c", "x='y z'"]) == {"a.b": "1", "c": "removed", "x": "y z"}


def test_other_forms_have_the_same_numbers(sweep, capsys):
    found = json.loads(shown(capsys, sweep, "--format", "json"))
    assert found["by"] == ["reward.format.weight"]
    assert found["lines"][1]["last"]["mean"] == pytest.approx(0.78)
    assert found["lines"][1]["seeds"] == {"0": 0.8, "1": 0.7, "2": 0.84}
    rows = list(csv.DictReader(io.StringIO(shown(capsys, sweep, "--format", "csv"))))
    assert [row["reward.format.weight"] for row in rows if row["metric"] == METRIC] == ["0.0", "0.1", "1.0"]
    assert float(rows[1]["last.mean"]) == pytest.approx(0.78)
    assert "| 0.1 | 3 | 0.200 → 0.780 \\* | [0.601, 0.959] |" in shown(capsys, sweep, "--format", "md")


def test_texts_of_foreign_files_are_shown_harmlessly(tmp_path, capsys):
    for number in range(2):
        write_run(tmp_path / str(number), [f"x=<b>\x1b[2J{number}|[red]![x](https://a.b)"], [0.1, 0.2, 0.3], token="a")
    for form in ("table", "md", "csv"):
        printed = shown(capsys, tmp_path, "--format", form)
        assert "\x1b" not in printed
        assert {"md": "\\\\x1b[2J"}.get(form, "\\x1b[2J") in printed or form == "table"
        assert "<b>" not in printed or form in ("table", "csv")
        assert "![x](" not in printed or form != "md"


def test_curves_are_drawn_with_a_band(sweep, tmp_path, capsys):
    line = compare(find_runs(sweep), with_points=True).lines[METRIC][0]
    value = line.curve[10]
    assert value.mean == pytest.approx(0.4)  # (0.4 + 0.5 + 0.3) / 3
    assert value.high == pytest.approx(stats.t.interval(0.95, 2, 0.4, stats.sem([0.4, 0.5, 0.3]))[1])
    shown(capsys, sweep, "--metric", METRIC, "reward/total", "--plot", tmp_path / "new" / "curve.png")
    shown(capsys, sweep, "--metric", METRIC, "--plot", tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_dollars_in_settings_are_no_formulas(tmp_path):
    for number in (1, 2):
        write_run(tmp_path / str(number), [f"x=$\\frac{number}$"], [0.1, 0.2, 0.3])
    main([str(tmp_path), "--metric", METRIC, "--plot", str(tmp_path / "x.PNG")])
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none"], "none: there is no such directory"),
        (["{}/empty"], "empty: no summary.json at or below it"),
        (["{}", "--metric", "val/pas@1"], "--metric=val/pas@1: no run has it; the nearest is val/pass@1"),
        (["{}", "--by", "reward.format.wieght"], "no run has this setting; the nearest is reward.format.weight"),
        (
            ["{}", "--baseline", "seed=0"],
            "allowed is KEY=VALUE with a key that the lines differ in: reward.format.weight",
        ),
        (["{}", "--baseline", "reward.format.weight=7"], "no run has this value; allowed are 0.0, 0.1, 1.0"),
        (["{}", "--plot", "{}/x.xyz"], "--plot="),
    ],
)
def test_mistakes_are_one_line(sweep, arguments, message):
    (sweep / "empty").mkdir()
    with pytest.raises(SystemExit) as end:
        main([argument.format(sweep) for argument in arguments])
    assert message in str(end.value)
    assert "\n" not in str(end.value)


def test_a_step_without_a_value_names_its_neighbours(sweep, capsys):
    text = " ".join(shown(capsys, sweep, "--at", "12").split())
    assert "val/pass@1 has not in every run a value at step 12: it has at 10 and 20" in text


def test_no_matplotlib_is_one_line(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install 'grpo-lightning\[plot\]'"):
        main([str(sweep), "--plot", "x.png"])


def test_what_the_doctor_has_found_is_shown(sweep, capsys):
    ill, none, *_ = sorted(path.parent for path in sweep.rglob("summary.json"))
    finding = {"rule": "hacking", "step": 30, "metric": "reward/total", "value": 0.12345, "advice": "lower a weight"}
    (ill / "health.json").write_text(json.dumps({"findings": [finding, finding | {"rule": "kl\x1b[2J", "step": 40}]}))
    (none / "health.json").write_text(json.dumps({"findings": []}))
    said = " ".join(shown(capsys, sweep).split())
    assert "the doctor has findings in 1 of 9 runs, see health.json there:" in said
    assert ": hacking at step 30 (reward/total 0.123), kl\\x1b[2J at step 40 (reward/total 0.123)" in said
    ailing = json.loads(shown(capsys, sweep, "--format", "json"))["ailing"]
    assert [run["directory"] for run in ailing] == [str(ill)]


def test_secrets_are_hidden_before_a_table_is_folded(tmp_path, capsys):
    token = "hf_" + "AbCdEfGh" * 8
    for number in range(2):
        write_run(tmp_path / str(number), [f"x={token}{number}", "y=" + "z" * 60], [0.1, 0.2, 0.3])
    for form in ("table", "md", "json"):
        printed = "".join(shown(capsys, tmp_path, "--by", "x", "y", "--format", form).split())
        assert "AbCdEf" not in printed
        assert "REDACTED" in printed
