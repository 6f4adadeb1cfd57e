"""What ``pip install .`` brings: the settings' files, the shipped policy, and a command that works from anywhere."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.support.composed import CONF, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return next(place.glob("grpo_lightning-*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_all_that_a_run_needs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"grpo_lightning/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")} <= names
    assert "grpo_lightning/config/aliases.yaml" in names
    for needed in ("py.typed", "policy/tiny/model.safetensors", "policy/tiny/chat_template.jinja"):
        assert f"grpo_lightning/{needed}" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "conf/")) for name in names)
    assert wheel.name.startswith("grpo_lightning-0.2.0-")


@pytest.mark.slow
def test_the_command_works_from_an_empty_directory_with_functions_of_its_own(wheel, tmp_path):
    site, place = tmp_path / "site", tmp_path / "empty"
    place.mkdir()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (place / "my_rewards.py").write_text("def short(completions, **columns):\n    return [1.0] * len(completions)\n")
    small = ["steps=2", "data.prompts_per_step=2", "rollout.group_size=4", "data.validation_size=4"]
    own = ["reward=[format,custom]", "reward.custom.function._target_=my_rewards.short", "reward.custom.timeout=20"]
    done = subprocess.run(
        [str(site / "bin" / "grpo-lightning"), *small, *own, "hydra.run.dir=run"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (place / "run" / "summary.json").exists()
    assert (place / "run" / "train.log").exists()
