"""The README and docs/ name all there is, point only at what exists, and the example in Python runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pydoc import locate

import pytest
import yaml

from grpo_lightning.config import check_config
from grpo_lightning.config.rules import REWARD, RULES
from grpo_lightning.environment.tools import Tools
from tests.support import prepared
from tests.support.composed import CONF, ROOT, composed
from tests.support.running import small_run
from tests.test_readme import FENCE, PAGES, README

LINKING = [*PAGES, ROOT / "benchmarks" / "README.md", ROOT / "CHANGELOG.md"]
TEXT = {path: path.read_text(encoding="utf-8") for path in LINKING}
SETTINGS = TEXT[ROOT / "docs" / "settings.md"]
METRICS = TEXT[ROOT / "docs" / "metrics.md"]
STAGES = ("sft_tiny", "sft_tiny_flawed", "calculator_taught", "guess_taught", "smollm2_reasoning_taught")
"""Supervised stages that other pages tell of."""
TO_BE_WRITTEN = {"conf/reward/short.yaml", "conf/experiment/mine.yaml", "my_conf/experiment/mine.yaml"}
"""Files that a page tells people to make."""


def anchors(text):
    """What GitHub calls a page's headings in links to them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_choice_of_every_part_is_documented():
    for path in CONF.glob("*/*.yaml"):
        if path.parent.name == "experiment":
            assert f"`{path.stem}`" in TEXT[README] or path.stem in STAGES, path
        elif path.stem not in ("base", "taught"):
            assert f"`{path.stem}`" in SETTINGS or f"={path.stem}`" in SETTINGS, path


def test_every_setting_with_a_rule_is_documented():
    keys = [*RULES, *(f"reward.NAME.{setting}" for setting in REWARD)]
    assert [key for key in keys if f"`{key}`" not in SETTINGS] == []


def test_every_metric_of_a_run_is_documented(tmp_path):
    cells = [row.split("|")[1] for row in METRICS.splitlines() if row.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    patterns = [re.escape(name).replace("NAME", "[^/]+").replace("PATH", ".+").replace("@k", r"@\d+") for name in names]
    metrics = small_run(tmp_path, "rollout=dynamic_sampling").metrics
    assert len(metrics) > 35
    assert [metric for metric in metrics if not any(re.fullmatch(one, metric) for one in patterns)] == []


def test_links_lead_somewhere():
    for page, text in TEXT.items():
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), f"{page}: {target}"
            assert found.is_relative_to(ROOT), f"{page}: {target}"
            assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), f"{page}: {target}"


def test_files_and_objects_that_a_page_names_exist():
    paths = re.compile(r"(?<![\w./-])(?:grpo_lightning|conf|tests|docs|benchmarks)/[\w/]*(?:\.\w+)?")
    for page in PAGES:
        for path in paths.findall(TEXT[page]):
            assert (ROOT / path).exists() or path in TO_BE_WRITTEN, f"{page}: {path}"
        rows = page.name == "reliability.md"  # which has names that are refused, too
        for dotted in [] if rows else re.findall(r"grpo_lightning(?:\.\w+)+", TEXT[page]):
            assert dotted.endswith(".py") or locate(dotted) is not None, f"{page}: {dotted}"


def script(directory, code):
    """What a program of ``code`` prints, run in an empty directory."""
    (directory / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_python_example_runs_as_printed(tmp_path):
    [example] = [block for language, block in FENCE.findall(TEXT[README]) if language == "python"]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    assert 0.9 < float(script(tmp_path, example).splitlines()[-1]) <= 1.0


@pytest.mark.slow
def test_the_examples_of_the_page_on_python_run_as_printed(tmp_path):
    blocks = [block for language, block in FENCE.findall(TEXT[ROOT / "docs" / "python.md"]) if language == "python"]
    assert len(blocks) == 5
    (tmp_path / "blocks").mkdir()
    for number, block in enumerate(blocks):
        (tmp_path / "blocks" / f"{number}.py").write_text(block, encoding="utf-8")
    printed = script(  # one after the other in one process, each as a program of its own
        tmp_path,
        "import pathlib, runpy\n"
        "for path in sorted(pathlib.Path('blocks').iterdir()):\n"
        "    print('#', path.stem)\n"
        "    runpy.run_path(str(path), run_name='__main__')\n",
    )
    outputs = [part.splitlines()[1:] for part in printed.split("# ")[1:]]
    assert [len(lines) for lines in outputs[:4]] == [1, 0, 1, 2]
    assert 0.0 <= float(outputs[4][-1]) <= 1.0  # below Lightning's own progress
    assert float(outputs[2][0]) > 0.4  # of 8 of 32 tokens, a random policy draws a quarter


@pytest.mark.slow
def test_the_example_of_an_experiment_is_taken_as_printed(tmp_path):
    (example,) = [block for language, block in FENCE.findall(TEXT[ROOT / "docs" / "your_own.md"]) if language == "yaml"]
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    (tmp_path / "my_conf" / "experiment" / "mine.yaml").write_text(example)
    words = ["--config-dir", "my_conf", "experiment=mine", "optimizer.lr=1e-4", "--cfg", "job"]
    done = prepared.run([str(ROOT / "train.py"), *words], cwd=tmp_path)
    config = yaml.safe_load(done.stdout)
    assert config["steps"] == 60
    assert float(config["optimizer"]["lr"]) == 1e-4
    assert list(config["reward"]) == ["accuracy", "format", "length", "soft_overlong"]  # the last one is dapo's
    assert config["reward"]["length"]["weight"] == 0.2
    assert config["loss"]["surrogate"]["epsilon_high"] == 0.28


def test_the_examples_of_ready_made_environments_run_as_printed(tmp_path, monkeypatch):
    page = TEXT[ROOT / "docs" / "episodes.md"]
    blocks = [block for language, block in FENCE.findall(page) if language == "python"]
    (game,) = [block for block in blocks if "lake.jsonl" in block]
    (tool,) = [block for block in blocks if "# my_tools.py" in block]
    monkeypatch.chdir(tmp_path)
    exec(game, {})
    rows = [json.loads(line) for line in (tmp_path / "lake.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == list(range(1000))
    assert rows[3]["prompt"].startswith("Game 3. Walk from S to G")
    assert "\n[S]FFF\n" in rows[3]["prompt"]
    (line,) = [line for line in page.splitlines() if line.startswith("python train.py environment=gymnasium")]
    check_config(composed(*shlex.split(line.replace("=FILE", "=lake.jsonl"))[2:]))
    names: dict = {}
    exec(tool, names)
    told = Tools([names["weather"]])
    (call,) = [block for _, block in FENCE.findall(page) if block.startswith("<tool_call>")]
    assert told(turns=[call]) == '{"city": "Rome", "sun": true}'
