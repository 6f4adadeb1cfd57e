"""What is printed, logged and written: no control characters, no secrets, and no reason for a run to end."""

import errno
import logging
from io import StringIO

import pytest

from grpo_lightning import __version__
from grpo_lightning.config import ConfigError
from grpo_lightning.console import (
    LineFormatter,
    PipeSafeStream,
    TerminalHandler,
    describe_error,
    end_banner,
    escape_formula,
    log_line,
    start_banner,
    wrap,
    write_atomic,
)

TOKEN = "hf_" + 24 * "a"
DEFAULTS = {"algorithm": "grpo", "loss": "grpo", "policy": "tiny", "reward": ["accuracy", "format"]}
CONFIG = {"mode": "fit", "steps": 120, "seed": 0, "checkpoint": None, "run_dir": "runs/a", "sweep_metric": "val/pass@1"}
SIZES = (
    "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per rollout; 120 rollouts = "
    "15360 completions, 120 optimizer steps in total"
)


def test_the_start_says_what_differs_from_the_default_and_what_was_asked_for():
    assert start_banner(CONFIG, [], DEFAULTS, DEFAULTS, SIZES) == [
        f"grpo-lightning {__version__}: fit, 120 steps, seed 0",
        "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per",
        "  rollout; 120 rollouts = 15360 completions, 120 optimizer steps in total",
        "directory: runs/a (settings: .hydra/config.yaml)",
    ]
    choices = {"loss": "dapo", "policy": "tiny", "reward": ["accuracy", "length"], "algorithm": "dapo", "sweep": "mine"}
    words = ["+trainer.benchmark=true", "~reward.format", "steps=9", "seed=7", "algorithm=dapo", "logger.token=hf_abc"]
    config = CONFIG | {"mode": "validate", "checkpoint": "last"}
    assert start_banner(config, words, choices, DEFAULTS, SIZES) == [
        f"grpo-lightning {__version__}: validate, seed 0, from checkpoint=last",
        "trainer.benchmark: true",
        "reward.format: left out",
        "algorithm: dapo",
        "logger.token: REDACTED",
        "loss: dapo",
        "reward: accuracy, length",
        "sweep: mine",
        "directory: runs/a (settings: .hydra/config.yaml)",
    ]
    assert [len(line) for line in wrap("memory: " + "much " * 20)] == [77, 31]
    assert wrap("a" * 90) == ["a" * 90]


VALUES = {
    "val/pass@1": {"first": 0.2612, "last": 0.9712, "best": 0.9791, "best_step": 100, "first_step": 0, "last_step": 9},
    "reward/accuracy": {"first": 0.25, "last": 0.75},
    "loss/total": {"first": 2.5, "last": 0.125},
}


def test_the_end_says_how_it_went_and_what_it_leaves_behind(tmp_path):
    def first(metric, values=VALUES):
        summary = {"values": values, "seconds": 43.4}
        return end_banner(summary, CONFIG | {"sweep_metric": metric}, tmp_path / "absent", "again")

    told = "pass@1 .261 → .971 (best .979 at 100) · 43 s"
    assert first("val/pass@1") == first("val/absent") == [told]
    assert first("reward/accuracy") == ["accuracy .250 → .750 · 43 s"]
    assert first("val/pass@1", {"loss/total": VALUES["loss/total"]}) == ["loss 2.500 → .125 · 43 s"]
    assert first("val/pass@1", {"val/pass@1": VALUES["val/pass@1"] | {"first_step": 9}}) == ["pass@1 .971 · 43 s"]
    assert first("val/pass@1", {}) == ["43 s"]

    summary = {"values": VALUES, "seconds": 43.4, "metrics": {"val/pass@1": 0.5, "val/maj@4": 0.25, "loss/total": 1.0}}
    for name in ("export", "tensorboard", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert end_banner(summary, CONFIG, tmp_path, "again", is_job=True) == [told]
    lines = end_banner(summary, CONFIG, tmp_path, "again")
    assert " ".join(" ".join(lines).split()) == (
        f"{told} exported to {tmp_path}/export look at it with: tensorboard --logdir {tmp_path} continue with: again"
    )
    long = tmp_path / ("d" * 90)
    (long / "export").mkdir(parents=True)
    assert end_banner(summary, CONFIG, long, "again") == [told, "exported to", f"  {long}/export"]
    assert end_banner(summary, CONFIG | {"mode": "export"}, tmp_path, "again") == []
    config = CONFIG | {"mode": "validate"}
    assert end_banner(summary, config, tmp_path, "again") == ["validated: pass@1 .500 · maj@4 .250 · 43 s"]
    many = summary | {"metrics": {f"val/pass@{k}": 0.5 for k in (1, 2, 4, 8, 16, 32)}}
    assert len(end_banner(many, config, tmp_path, "again")) == 8  # a line for each


def test_errors_are_sentences():
    assert describe_error(ConfigError(["a: b"])) == "the settings cannot work:\n  a: b"
    assert describe_error(RuntimeError(f"a\x1b[2J {TOKEN}\n")) == "a\\x1b[2J REDACTED"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(ValueError()) == "ValueError"


def test_logs_have_tracebacks_in_the_file_only(capsys, caplog, monkeypatch):
    log, logged = logging.getLogger("grpo_lightning"), StringIO()
    handlers = [logging.StreamHandler(logged), TerminalHandler()]
    for handler in handlers:
        handler.setFormatter(LineFormatter("%(message)s"))
        log.addHandler(handler)
    caplog.set_level(logging.INFO, "grpo_lightning")
    try:
        log_line(f"step 3 \x1b {TOKEN}")  # is printed once
        try:
            raise KeyError(f"evil\x1b[2J {TOKEN}")
        except KeyError:
            log.exception("failed\x07")
        printed = capsys.readouterr().err
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        log.error("again", exc_info=ValueError("x"))
        assert capsys.readouterr().err == "again\nValueError: x\n"
    finally:
        for handler in handlers:
            log.removeHandler(handler)
    assert printed == "step 3 \\x1b REDACTED\nfailed\\x07\n"
    lines = logged.getvalue().splitlines()
    assert lines[:3] == ["step 3 \\x1b REDACTED", "failed\\x07", "Traceback (most recent call last):"]
    assert "KeyError: 'evil\\x1b[2J REDACTED'" in lines


class ClosedStream(StringIO):
    """A stream whose reader has ended."""

    def __init__(self, number, file):
        super().__init__()
        self.number, self.file = number, file

    def write(self, text):
        raise OSError(self.number, "gone")

    def flush(self):
        raise OSError(self.number, "gone")

    def fileno(self):
        return self.file.fileno()


def test_a_program_outlives_the_reader_of_its_output(tmp_path):
    with (tmp_path / "x").open("w") as file:
        stream = PipeSafeStream(ClosedStream(errno.EPIPE, file))
        assert stream.write("text") == 4
        stream.flush()
        print("to nobody", file=file, flush=True)
        assert stream.getvalue() == ""
        full = PipeSafeStream(ClosedStream(errno.ENOSPC, file))
        for use in (lambda: full.write("x"), full.flush):
            with pytest.raises(OSError, match="gone"):
                use()
    assert (tmp_path / "x").read_text() == ""


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "summary.json"
    for text in ("{}", b"{ }"):
        write_atomic(file, text)
    assert file.read_bytes() == b"{ }"
    (tmp_path / "folder" / "x").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "summary.json"]


def test_no_text_of_a_csv_file_is_a_formula():
    texts = ["=cmd|' /C calc'!A0", "@x", "+x", "-x", "\t=x", "\r=x"]
    assert [escape_formula(text) for text in texts] == [f"'{text}" for text in texts]
    plain = ["a=b", "-2", "+1.5e-3", "-.5", "", "1", 3, -2.5, None]
    assert [escape_formula(value) for value in plain] == plain
