"""Secrets stay out of what is logged and written."""

import pytest

import grpo_lightning as grpo
from grpo_lightning.console import REDACTED, redact, redact_config, redact_overrides
from tests.support.running import SMALL


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
