"""What is printed, logged and written: no control characters and no secrets."""

import logging
from io import StringIO

import pytest

import grpo_lightning as grpo
from grpo_lightning import __version__
from grpo_lightning.config import ConfigError
from grpo_lightning.console import (
    REDACTED,
    LineFormatter,
    TerminalHandler,
    describe_error,
    end_banner,
    escape_formula,
    log_line,
    redact,
    redact_config,
    redact_overrides,
    start_banner,
    wrap,
    write_atomic,
)
from tests.support.running import SMALL

TOKEN = "hf_" + 24 * "a"
CONFIG = {"mode": "fit", "steps": 120, "seed": 0, "checkpoint": None, "run_dir": "runs/a", "sweep_metric": "val/pass@1"}
SIZES = "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per rollout; 120 rollouts"


def test_the_start_says_what_was_chosen_and_asked_for():
    choices = {"loss": "dapo", "correction": "none", "reward": ["accuracy", "length"], "algorithm": "dapo"}
    words = ["+trainer.benchmark=true", "~reward.format", "algorithm=dapo", "logger.token=hf_abc"]
    assert start_banner(CONFIG, words, choices, SIZES) == [
        f"grpo-lightning {__version__}: fit, 120 steps, seed 0",
        "loss=dapo reward=accuracy+length algorithm=dapo",
        "changed: +trainer.benchmark=true ~reward.format logger.token=REDACTED",
        "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per",
        "  rollout; 120 rollouts",
        "directory: runs/a (settings: .hydra/config.yaml)",
    ]
    assert wrap("a" * 90) == ["a" * 90]


VALUES = {
    "val/pass@1": {"first": 0.2612, "last": 0.9712, "best": 0.9791, "best_step": 100, "first_step": 0, "last_step": 9},
    "reward/accuracy": {"first": 0.25, "last": 0.75},
    "loss/total": {"first": 2.5, "last": 0.125},
}


def test_the_end_says_how_it_went_and_what_it_leaves_behind(tmp_path):
    told = "pass@1 .261 → .971 (best .979 at 100) · 43 s"
    assert end_banner({"values": {}, "seconds": 43.4}, CONFIG, tmp_path / "absent", "again") == ["43 s"]
    summary = {"values": VALUES, "seconds": 43.4, "metrics": {"val/pass@1": 0.5, "val/maj@4": 0.25, "loss/total": 1.0}}
    for name in ("export", "tensorboard", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert end_banner(summary, CONFIG, tmp_path, "again", is_job=True) == [told]
    lines = end_banner(summary, CONFIG, tmp_path, "again")
    assert " ".join(" ".join(lines).split()) == (
        f"{told} exported to {tmp_path}/export look at it with: tensorboard --logdir {tmp_path} continue with: again"
    )
    assert end_banner(summary, CONFIG | {"mode": "export"}, tmp_path, "again") == []
    config = CONFIG | {"mode": "validate"}
    assert end_banner(summary, config, tmp_path, "again") == ["validated: pass@1 .500 · maj@4 .250 · 43 s"]


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


def test_values_of_keys_that_name_secrets_are_hidden():
    for key in (
        *("token", "hf_token", "HF_TOKEN", "api_key", "apikey", "api_keys", "secret", "client_secret", "password"),
        *("private_key", "ssh_key", "access_key", "auth", "authorization", "credentials", "bearer", "tokens", "cookie"),
    ):
        shown = redact_config({"logger": {key: "abc1"}, "listed": [{key: ["one1", 22]}], key: {"deep": {"er": "x"}}})
        assert shown == {
            "logger": {key: REDACTED},
            "listed": [{key: [REDACTED, REDACTED]}],
            key: {"deep": {"er": REDACTED}},
        }, key


def test_other_keys_keep_their_values():
    for key in (
        *("max_new_tokens", "microbatch_tokens", "batch_tokens", "special_tokens", "eos_token", "num_tokens", "author"),
        *("tokenizer", "keyword", "keywords", "monkey", "checkpoint", "key", "path", "token_mean"),
    ):
        assert redact_config({"a": {key: 7, "x": {key: "value"}}}) == {"a": {key: 7, "x": {key: "value"}}}, key
    kept = {"auth": "${oc.env:KEY}", "token": None}
    assert redact_config(kept) == kept


def test_keys_of_well_known_services_are_hidden_wherever_they_stand():
    for text in (
        *("hf_abcdefghijklmnopqrst", "sk-abcdefghijkl", "sk-proj-abc_def-ghi", "ghp_abcdefghijklmnopqrstuv"),
        *("github_pat_11ABCDEFG0abcdefghijkl", "xoxb-123456789012-abc", "AKIAABCDEFGHIJKLMNOP"),
        *("glpat-abcdefghijklmnopqrst", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSM"),
        "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----",
    ):
        assert redact(f"a {text} b") == f"a {REDACTED} b"
        assert redact_config({"listed": [f"--with={text}"]}) == {"listed": [f"--with={REDACTED}"]}


def test_what_stands_behind_a_name_is_hidden():
    for text, told in (
        ("http://me:pass@host:80/x and http://host:80/", "http://<H>@host:80/x and http://host:80/"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer <H>"),
        (f"wandb api_key: {'0a' * 20} of", "wandb api_key: <H> of"),
        (f"WANDB_API_KEY={'0a' * 20}", "WANDB_API_KEY=<H>"),
        (f"commit {'0a' * 20}", f"commit {'0a' * 20}"),
        ("logger.wandb.api_key=abc123: must be", "logger.wandb.api_key=<H>: must be"),
        ("rollout.max_new_tokens=32 and token=count(x)", "rollout.max_new_tokens=32 and token=count(x)"),
    ):
        assert redact(text) == told.replace("<H>", REDACTED)


def test_overrides_lose_the_values_of_secret_keys():
    for word, told in (
        ("+logger.api_key=abc", "+logger.api_key=H"),
        ("steps=3", "steps=3"),
        ("x=sk-abcdefghijkl", "x=H"),
        ("+x.y={_target_: a.b, api_key: 1234567890123}", "+x.y=H"),
        ("x={n: {max_new_tokens: 1}}", "x={n: {max_new_tokens: 1}}"),
    ):
        assert redact_overrides([word]) == [told.replace("H", REDACTED)]


@pytest.mark.slow
def test_what_comes_from_the_environment_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTE", "of-no-known-form")
    settings = (*SMALL, "+reward.custom.function.note=${oc.env:NOTE}")
    grpo.compose(*settings, run_dir=tmp_path).fit()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"last.ckpt", "model.safetensors", "config.yaml", "summary.json"} <= {path.name for path in files}
    assert not [path for path in files if b"of-no-known-form" in path.read_bytes()]
    monkeypatch.setenv("NOTE", "another")  # it is no part of what a run is continued by
    run = grpo.compose(*settings, "steps=2", "checkpoint=last", run_dir=tmp_path)
    run.fit()
    assert run.module.completed_steps == 2
