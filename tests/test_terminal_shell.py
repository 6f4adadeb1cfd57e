"""What a shell shows of real runs: on a terminal, through a pipe, in a sweep."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from omegaconf import OmegaConf

from tests.support.composed import ROOT, composed
from tests.support.running import SMALL

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def command(*words):
    flags = [word for word in words if word == "-m"]
    return [sys.executable, "train.py", *flags, *SMALL, *(word for word in words if word != "-m")]


def on_a_terminal(columns, *words):
    """What is written to a terminal of so many columns, and the exit status."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command(*words), cwd=ROOT, env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    written = bytearray()
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not block:
            break
        written += block
    os.close(leader)
    return written.decode(), process.wait(60)


@pytest.mark.slow
def test_a_terminal_of_80_columns_shows_one_line_at_a_time(tmp_path):
    written, status = on_a_terminal(80, "steps=30", "validation.every=10", f"hydra.run.dir={tmp_path}")
    assert status == 0
    lines = [_ESCAPE.sub("", part) for part in re.split(r"[\r\n]+", written)]
    bars = [line for line in lines if line.startswith("step ")]
    assert len(bars) > 1
    assert all(len(line) <= 80 for line in bars)
    last = [line for line in bars if line.startswith("step 30/30")][-1]
    assert re.search(r" done +custom \S+  pass@1 \S+ ", last)
    assert "\x1b[2A" not in written  # as Rich moves over a bar that has become two lines
    others = [line for line in lines if line and not line.startswith("step ")]
    whole = [line for line in others if len(line) > 80]
    assert all("train.py" in line or str(tmp_path) in line for line in whole)  # to be copied, so never cut
    [outcome] = [line for line in others if line.startswith("pass@1")]
    assert re.match(r"pass@1 \S+ → \S+ \(best \S+ at \d+\) · \d+ s$", outcome)
    kept = OmegaConf.to_container(OmegaConf.load(tmp_path / ".hydra" / "config.yaml"), resolve=False)
    assert {name: sorted(part) if isinstance(part, dict) else part for name, part in kept.items()} == {
        name: sorted(part) if isinstance(part, dict) else kept[name] for name, part in composed(*SMALL).items()
    }


@pytest.mark.slow
def test_a_sweep_says_what_its_jobs_share_only_once(tmp_path):
    words = ("-m", "steps=2", "algorithm=grpo,dapo", "rollout.max_tries=1", f"hydra.sweep.dir={tmp_path}")
    done = subprocess.run(command(*words), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[WARNING]")]
    assert len([line for line in lines if line.startswith("policy.hidden_size: 16")]) == 1
    second = lines[lines.index(f"directory: {tmp_path}/algorithm=dapo") :]
    assert any(line.startswith("pass@1 ") for line in second)
    assert len([line for line in lines if line.startswith("pass@1 ")]) == 2
    assert not [line for line in lines if line.startswith(("exported", "continue"))]
    assert re.search(r"#1 : .*algorithm=dapo", done.stdout)
    jobs = ("algorithm=grpo", "algorithm=dapo")
    choices = [json.loads((tmp_path / job / "summary.json").read_text())["choices"] for job in jobs]
    assert [one["algorithm"] for one in choices] == ["grpo", "dapo"]
    assert choices[1]["reward"] == ["custom", "format", "soft_overlong"]
