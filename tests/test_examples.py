"""What users copy runs as it stands."""

import re
import shlex
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.composed import ROOT

EXAMPLES = ROOT / "examples"


def commands():
    """Example -> the arguments of its command."""
    for path in sorted(EXAMPLES.glob("*.py")):
        [command] = re.findall(r"^python train\.py ((?:.*\\\n)*.*)$", path.read_text(), re.MULTILINE)
        yield path.stem, shlex.split(command.replace("\\\n", ""))


@pytest.mark.slow
def test_the_commands_of_examples_train(tmp_path):
    for name, arguments in commands():
        small = ["steps=2", "validation.every=2", "data.validation_size=8", "data.prompts_per_step=4", "logger=none"]
        directory = f"hydra.run.dir={tmp_path / name}"
        subprocess.run([sys.executable, "train.py", *arguments, *small, directory], cwd=ROOT, check=True)
        assert (tmp_path / name / "export" / "model.safetensors").exists(), name


def execute(name):
    """The outputs of a notebook's cells, a picture among them."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return outputs


@pytest.mark.slow
def test_the_notebook_of_two_settings_reads_the_same_from_both_files_and_finds_the_difference():
    outputs = execute("analyse.ipynb")
    _, differences, table = [output.data["text/plain"] for output in outputs if output.output_type == "execute_result"]
    assert all(float(line.split()[-1]) < 1e-5 for line in differences.splitlines()[1:-1])
    rows = [[*map(float, line.split())] for line in table.splitlines()[2:]]  # seed, 1e-4, 4e-4, difference
    assert [row[0] for row in rows] == [0, 1, 2]
    assert all(row[2] - row[1] == pytest.approx(row[3], abs=0.0011) and row[3] > 0.1 for row in rows)


@pytest.mark.slow
def test_the_notebook_learns_resumes_and_generates():
    outputs = execute("quickstart.ipynb")
    results = [output.data["text/plain"] for output in outputs if output.output_type == "execute_result"]
    assert float(results[-1]) > 0.5  # pass@1 of the shipped policy is about .25
    texts = [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
    assert any("<answer>" in text for text in texts)
    skipped = [text for text in texts if text.startswith("skipped")]
    print(*skipped or ["with the real model"])
    assert skipped or re.search(r"\d+$", texts[-1].strip())  # SmolLM2 says no number before
