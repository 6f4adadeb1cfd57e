"""What a shell shows of real runs: on a terminal, through a pipe, in a sweep and after a crash."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from grpo_lightning import __version__, cli
from grpo_lightning.checkpoint.resume import resume_command
from grpo_lightning.config.settings import known_keys, value_at
from tests.support.composed import CONF, ROOT, composed
from tests.support.running import SMALL

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
HEAVY = {"torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "reasoning_gym", "sympy"}
REWARDS = """
import ctypes
calls = []

def ok(completions, **k):
    return [1.0] * len(completions)

def crash(completions, **k):
    ctypes.string_at(0)

def fails(completions, **k):
    calls.append(1)
    if len(calls) > 4:
        raise KeyError('lost')
    return [1.0] * len(completions)
"""
OWN = ("reward=[format,custom]", "trainer=cpu", "steps=3", "hydra.run.dir=run")


def command(place: Path, *words: str) -> list[str]:
    (place / "mine.py").write_text(REWARDS)
    flags = [word for word in words if word == "-m"]
    own = OWN[: 3 if flags else 4]
    return [sys.executable, str(ROOT / "train.py"), *flags, *SMALL[:11], *own, *(w for w in words if w != "-m")]


def start(place: Path, *words: str, **options) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command(place, *words), cwd=place, env=ENVIRONMENT, **pipes)


def reward(name: str) -> str:
    return f"reward.custom.function._target_=mine.{name}"


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.slow
def test_a_crash_in_c_code_says_where_it_was(tmp_path):
    run = start(tmp_path, reward("crash"))
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == -signal.SIGSEGV
    assert re.search(r'mine.py", line \d+ in crash', errors)


@pytest.mark.slow
def test_an_error_leaves_its_sentence_and_its_traceback(tmp_path):
    run = start(tmp_path, reward("fails"), "callbacks.progress.every=1")
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 1
    assert "Traceback" not in errors
    assert "reward 'custom' raised KeyError: 'lost'" in errors
    assert summary(tmp_path / "run")["error"].startswith("reward 'custom' raised KeyError: 'lost'")
    logged = (tmp_path / "run" / "train.log").read_text()
    for text in ("step 1/3", "Traceback (most recent call last)", "in fails"):
        assert text in logged


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_a_run(tmp_path):
    words = shlex.join(command(tmp_path, reward("ok"), "callbacks.progress.every=1"))
    line = ["bash", "-c", f"{words} 2>&1 | head -2; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "0"
    assert len(done.stdout.splitlines()) == 3
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "step 3/3" in (tmp_path / "run" / "train.log").read_text()


def on_a_terminal(columns: int, *words: str) -> tuple[str, int]:
    """What is written to a terminal of so many columns, and the exit status."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES")}
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen([sys.executable, "train.py", *SMALL, *words], cwd=ROOT, env=environment, **streams)
    os.close(follower)
    written = bytearray()
    with suppress(OSError):  # when the terminal's other end is closed
        while block := os.read(leader, 65536):
            written += block
    os.close(leader)
    return written.decode(), process.wait(60)


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_one_line_at_a_time(tmp_path):
    written, status = on_a_terminal(80, "steps=30", "validation.every=10", f"hydra.run.dir={tmp_path}")
    assert status == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part) for part in re.split(r"[\r\n]+", written)]
    bars = [line for line in lines if line.startswith("step ")]
    assert len(bars) > 1
    assert all(len(line) <= 80 for line in bars)
    last = [line for line in bars if line.startswith("step 30/30")][-1]
    assert re.search(r" done +custom \S+  pass@1 \S+ ", last)
    assert "\x1b[2A" not in written  # as Rich moves over a bar that has become two lines
    others = [line for line in lines if line and not line.startswith("step ")]
    loading = [line for line in others if line.startswith("loading ")]  # before each silence of seconds
    assert loading[0] == "loading PyTorch and Lightning"
    assert loading[-1].startswith("loading policy")
    long = [line for line in others if len(line) > 80]
    assert all("train.py" in line or str(tmp_path) in line for line in long)  # to be copied, so never cut
    [outcome] = [line for line in others if line.startswith("pass@1")]
    assert re.match(r"pass@1 \S+ → \S+ \(best \S+ at \d+\) · \d+ s$", outcome)
    kept = OmegaConf.to_container(OmegaConf.load(tmp_path / ".hydra" / "config.yaml"), resolve=False)
    assert {name: sorted(part) if isinstance(part, dict) else part for name, part in kept.items()} == {
        name: sorted(part) if isinstance(part, dict) else kept[name] for name, part in composed(*SMALL).items()
    }


@pytest.mark.slow
def test_a_sweep_says_what_its_jobs_share_only_once_and_leaves_a_directory_per_job(tmp_path):
    sweep = ("steps=2", "algorithm=grpo,dapo", "rollout.max_tries=1", f"hydra.sweep.dir={tmp_path}")
    words = [sys.executable, "train.py", "-m", *SMALL, *sweep]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stderr.splitlines()
    assert len([line for line in lines if line.startswith("changed: policy.hidden_size=16")]) == 1
    second = lines[lines.index(f"directory: {tmp_path}/algorithm=dapo") :]
    assert any(line.startswith("pass@1 ") for line in second)
    assert len([line for line in lines if line.startswith("pass@1 ")]) == 2
    assert not [line for line in lines if line.startswith(("exported", "continue"))]
    assert re.search(r"#1 : .*algorithm=dapo", done.stderr)
    jobs = [tmp_path / f"algorithm={name}" for name in ("grpo", "dapo")]
    assert [summary(job)["choices"]["algorithm"] for job in jobs] == ["grpo", "dapo"]
    assert summary(jobs[1])["choices"]["reward"] == ["custom", "format", "soft_overlong"]
    files = (".hydra/config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt", "export/model.safetensors")
    assert all((job / name).exists() for job in jobs for name in files)


def test_help_fits_a_screen_and_names_every_choice_and_true_defaults():
    text = OmegaConf.load(CONF / "train.yaml").hydra.help.template
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 80
    words = set(re.findall(r"[\w]+", text))
    files = {path for path in CONF.glob("*/*.yaml") if path.stem not in ("base", "taught", "live", "plain", "rows")}
    assert {path.stem for path in files} | {path.parent.name for path in files} - {"validation"} <= words
    settings = re.findall(r"^  ([\w.]+)=(\S*)  +\w", text, re.MULTILINE)
    assert len(settings) >= 39
    known, config = known_keys(CONF), composed()
    for key, value in settings:
        assert key in known or key == "hydra.run.dir" or "NAME" in key or key.endswith("_target_"), key
        default = value_at(config, key)
        if value and default is not None and not key.startswith(("hydra", "reward", "trainer.precision")):
            assert yaml.safe_load(value) == default or float(value) == default, key


@pytest.mark.slow
def test_the_command_line_answers_without_torch():
    for words, status, text in (
        (["--help"], 0, "algorithm    cispo dapo distillation"),
        (["--help-all", "steps=3"], 0, "steps: 3"),
        (["--version"], 0, f"grpo-lightning {__version__}"),
        (["experiment=deepseekmath", "policy=gpt2", "--cfg", "job"], 0, "path: openai-community/gpt2"),
        (["experiment=calculator"], 1, "experiment=calculator_taught hydra.run.dir=runs/calculator_taught` makes"),
        (["--lr", "1e-3"], 1, "--lr: settings are KEY=VALUE"),
        (["rollout.group_sise=4", "stepps=3"], 1, "stepps=3: unknown; the nearest is steps=3"),
        (["trusted=trl", "steps=-1"], 1, "steps=-1: must be"),
        (["reward=[accuracy,formt]"], 1, "the nearest is format"),
        (["loss.kl._target_=os.system"], 1, "loss.kl._target_=os.system"),
        (["-m", "hydra.run.dir=x"], 1, "hydra.run.dir=x: it has no effect with -m; use hydra.sweep.dir=x"),
        (["+hydra.callbacks.x={_target_: os.system}"], 1, "hydra.callbacks.x._target_=os.system"),
    ):
        command = [sys.executable, "-X", "importtime", "train.py", *words]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        lines = done.stderr.splitlines()
        imported = {line.split("|")[-1].strip().split(".")[0] for line in lines if line.startswith("import time:")}
        assert (done.returncode, imported & HEAVY) == (status, set()), (words, lines[-5:])
        assert text in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_runs_of_one_second_have_directories_of_their_own_and_odd_names_are_taken(tmp_path):
    (tmp_path / "größe.jsonl").write_text("\n".join(f'{{"prompt": "Säge {n}", "answer": "x"}}' for n in range(30)))
    words = [sys.executable, str(ROOT / "train.py"), *SMALL[:11], "steps=0", "logger=false", "data=jsonl"]
    words = [word for word in words if not word.startswith("data.train_size")]
    more = ["data.path=größe.jsonl", "reward=[format]", "trainer.profiler=simple", "task_name=Größe"]
    started = [subprocess.Popen([*words, *more], cwd=tmp_path, env=ENVIRONMENT) for _ in range(2)]
    assert [process.wait(300) for process in started] == [0, 0]
    assert len(list((tmp_path / "runs").glob("*/*/summary.json"))) == 2


def test_the_command_that_continues_a_run_comes_through_shell_and_hydra(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    for place in ("/a b/lr=0.1", "/it's", "/t(1),[2]{3}:4", '/q"q', "/$(touch x)"):
        line = resume_command(["steps=3", "data.path='x y'"], Path(place), checkpoint=f"{place}/best.ckpt")
        words = shlex.split(line)
        assert words[:4] == ["python", "train.py", "steps=3", "data.path='x y'"]
        directory, checkpoint = OverridesParser.create().parse_overrides(words[4:])
        assert (directory.key_or_group, directory.value()) == ("hydra.run.dir", place)
        assert (checkpoint.key_or_group, checkpoint.value()) == ("checkpoint", f"{place}/best.ckpt")
    given = ["+checkpoint=x", "steps=3", "checkpoint=last", "hydra.run.dir=q", "run_dir=r", "a.api_key=abcdefgh"]
    end = "a.api_key=REDACTED hydra.run.dir=/d checkpoint=last"
    assert resume_command(given, Path("/d")) == f"python train.py steps=3 {end}"
    assert resume_command(given, Path("/d"), steps=6) == f"python train.py {end.replace('hydra', 'steps=6 hydra')}"
    options = ["--config-dir", "my conf", "-cn=own", "hydra.searchpath=[file://conf]"]
    monkeypatch.setattr("sys.argv", ["/bin/grpo-lightning", *options, "steps=3", "-m"])
    words = shlex.split(resume_command(["steps=3"], Path("/d")))
    assert words == ["grpo-lightning", *options, "steps=3", "hydra.run.dir=/d", "checkpoint=last"]


def test_threads_that_wait_sleep_sooner_on_a_busy_machine(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "_BEGAN", (10.0, 100.0, 1.0))
    for machine, spins in ((102.9, "1500"), (103.1, "100")):  # in 2 s this process took 2, others 0.9 or 1.1
        monkeypatch.setattr(cli, "_cpu_seconds", lambda machine=machine: (12.0, machine, 3.0))
        cli._limit_spinning()
        assert os.environ.pop("GOMP_SPINCOUNT") == spins
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cli._limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
