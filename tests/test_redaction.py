import functools
import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from grpo_lightning.composition import environment
from grpo_lightning.output import redaction
from grpo_lightning.output.redaction import HIDDEN, MASK, hide, redacted, redacted_words, remember, remember_words
from grpo_lightning.output.terminal import one_line
from grpo_lightning.reward.engine import pool
from grpo_lightning.reward.engine.foreign import described, told
from tests.support.composed import ROOT


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(redaction, "_known", set())
    monkeypatch.setattr(redaction, "_keys", set())


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "api_key", "apikey", "api_keys", "secret", "client_secret", "password"),
        *("private_key", "ssh_key", "access_key", "auth", "authorization", "credentials", "bearer", "tokens", "cookie"),
    ],
)
def test_values_of_keys_that_name_secrets_are_hidden(key):
    nested = {"logger": {key: "abc1"}, "listed": [{key: ["one1", "two2"]}], key: {"deep": {"er": "x"}}}
    shown = redacted(nested)
    assert shown["logger"][key] == HIDDEN
    assert shown["listed"] == [{key: [HIDDEN, HIDDEN]}]
    assert shown[key] == {"deep": {"er": HIDDEN}}


@pytest.mark.parametrize(
    "key",
    [
        *("max_new_tokens", "microbatch_tokens", "batch_tokens", "special_tokens", "eos_token", "num_tokens", "author"),
        *("tokenizer", "keyword", "keywords", "monkey"),
        *("checkpoint", "key", "path", "token_mean"),
    ],
)
def test_other_keys_keep_their_values(key):
    assert redacted({"a": {key: 7, "x": {key: "value"}}}) == {"a": {key: 7, "x": {key: "value"}}}


@pytest.mark.parametrize(
    "text",
    [
        *("hf_abcdefghijklmnopqrst", "sk-abcdefghijkl", "sk-proj-abc_def-ghi", "ghp_abcdefghijklmnopqrstuv"),
        *("github_pat_11ABCDEFG0abcdefghijkl", "xoxb-123456789012-abc", "AKIAABCDEFGHIJKLMNOP"),
        *("glpat-abcdefghijklmnopqrst", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSM"),
    ],
)
def test_tokens_of_well_known_services_are_hidden_wherever_they_stand(text):
    assert hide(f"a {text} b") == f"a {MASK} b"
    assert redacted({"listed": [f"--with={text}"]}) == {"listed": [f"--with={HIDDEN}"]}


def test_passwords_in_addresses_and_private_keys_are_hidden():
    assert hide("http://me:pass@host:80/x and http://host:80/") == f"http://{MASK}@host:80/x and http://host:80/"
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----"
    begin = f"{HIDDEN} {HIDDEN} {HIDDEN} {HIDDEN}"
    assert hide(f"<{key}>", HIDDEN) == f"<{begin}\n{HIDDEN}\n{begin}>"


def test_quotes_and_white_space_of_secrets_stay_where_they_are():
    remember({"token": "ab'cd\"ef\\gh$ij`k", "tokens": ["'\"'\"'", "no quotes"]})
    assert hide("<ab'cd\"ef\\gh$ij`k>", HIDDEN) == "<H'H\"H\\H$H`H>".replace("H", HIDDEN)
    assert hide("'a'\"'\"'b'") == "'a'\"'\"'b'"
    assert hide("<no quotes>", HIDDEN) == f"<{HIDDEN} {HIDDEN}>"
    assert hide("://me:pa's'@x", HIDDEN) == f"://{HIDDEN}'{HIDDEN}'@x"


def test_secrets_that_overlap_are_hidden_as_one():
    remember({"tokens": ["abcd", "cdefgh", "ghgh", "xyz1", "1234", "bcd "]})
    assert hide("<abcdefghgh> abc <ghghgh>xyz1 12 xyz1234", HIDDEN) == "<H> abc <H>H 12 H".replace("H", HIDDEN)
    assert hide("abcdxyz1", HIDDEN) == HIDDEN * 2
    remember({"tokens": ["<abcdef", "ef>tail", "1REDACTED"]})
    assert hide("<abcdef>tail") == MASK
    assert hide("<abcdef> a1REDACTED") == f"{MASK}> a{MASK}"


def test_what_is_hidden_stays_as_it_is():
    remember({"tokens": ["REDA", "ACTE", MASK[-6:], "x REDACTED", "ED-"]})
    once = f"{HIDDEN} {MASK} {HIDDEN}-0123abcd"
    assert hide(once) == once
    assert hide("ACTE", HIDDEN) == HIDDEN
    assert hide(f"x {MASK}", HIDDEN).count(HIDDEN) >= 2


def test_what_is_a_secret_in_the_settings_is_hidden_in_every_text():
    remember({"a": {"auth": ["p1", "q12345"]}, "b": {"plain": "visible"}, "c": {"env": "from-outside"}}, keys=["c.env"])
    assert hide("p1 q12345 visible from-outside") == f"p1 {MASK} visible {MASK}"
    assert redacted({"c": {"env": 7}, "d": "x from-outside"}) == {"c": {"env": HIDDEN}, "d": f"x {HIDDEN}"}


def test_a_secret_is_hidden_however_it_is_written():
    remember({"token": 'pa"ss\\w0rd-55'}, texts=["user: me\npw: s3cr3tpw-XYZ\n", "line-of-its-own\n"])
    for text in ('pa"ss\\w0rd-55', repr('pa"ss\\w0rd-55'), json.dumps(['pa"ss\\w0rd-55'])):
        assert "w0rd" not in hide(text)
    secret = "user: me\npw: s3cr3tpw-XYZ\n"
    for text in (
        secret,
        repr(secret),
        json.dumps(secret),
        secret.replace("\n", "\\n"),
        "pw: s3cr3tpw-XYZ",
        one_line(secret),
    ):
        assert "s3cr3t" not in hide(text)
    assert "of-its" not in hide("a line-of-its-own here")


def test_a_secret_is_hidden_in_an_address():
    remember({"password": "Tr0ub4dor&3/x y+z=ä", "token": "a\udc80\ud800b&"})
    for text in (
        *("Tr0ub4dor%263%2Fx%20y%2Bz%3D%C3%A4", "Tr0ub4dor%263/x%20y%2Bz%3D%C3%A4"),
        *("Tr0ub4dor&3/x%20y+z=%C3%A4", "Tr0ub4dor%263%2Fx+y%2Bz%3D%C3%A4"),
    ):
        assert hide(f"no answer from /?user=me&pw={text}&more=1", "X") == (
            f"no answer from /?user=me&pw={'X=X' if '=' in text else 'X'}&more=1"
        )


def test_a_reference_to_the_environment_is_no_secret():
    assert redacted({"auth": "${oc.env:KEY}"}) == {"auth": "${oc.env:KEY}"}


def test_overrides_lose_the_values_of_secret_keys():
    words = ["+logger.api_key=abc", "steps=3", "++a.auth=[k1,k234]", "x=sk-abcdefghijkl", "~token"]
    assert redacted_words(words) == [
        f"+logger.api_key={HIDDEN}",
        "steps=3",
        f"++a.auth={HIDDEN}",
        f"x={HIDDEN}",
        "~token",
    ]
    remember_words(words)
    assert hide("k234 k1", HIDDEN) == f"{HIDDEN} k1"


def test_a_long_number_of_the_environment_is_hidden_in_every_text_and_a_short_one_is_not():
    remember({"a": {"pin": 48151623, "steps": 2000}, "b": 48151624}, keys=["a.pin", "a.steps"])
    assert hide("48151623 48151624 2000") == f"{MASK} 48151624 2000"


def test_no_other_process_has_the_same_mask():
    told = "from grpo_lightning.output import redaction; print(redaction.MASK)"
    others = {
        subprocess.run(
            [sys.executable, "-P", "-c", told],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for _ in range(2)
    }
    assert len(others | {MASK}) == 3
    assert all(redaction._HIDDEN_ALREADY.fullmatch(mask) for mask in others | {MASK})


@pytest.mark.parametrize(
    "word",
    [
        "+note={api_key: s3cr3tXY99}",
        "+note=[{a: 1, 'api_key': s3cr3tXY99}]",
        "+wandb.auth.header=s3cr3tXY99",
        "+note={auth: {a: s3cr3tXY99}}",
        "+note.api_key=s3cr3tXY99",
    ],
)
def test_a_secret_is_hidden_in_the_words_that_say_it(word):
    remember({"token": "s3cr3tXY99"})
    assert "s3cr3tXY99" not in hide(word)


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("MINE", "hunter2!x", True),
        ("MINE", "Hunter22", True),
        ("HF_TOKEN", "abcd", True),
        ("MY_PASSWORD", "abc", False),  # would be found by chance
        ("MINE", "hunter2", False),
        ("MINE", "qwen2.5_1-5b", True),
        ("MINE", "qwen2.5_1-b", False),
        ("MINE", "12345678", False),
        ("MINE", "1234-5678!", False),
        ("WANDB_NAME", "Mine no.1", False),
        ("WANDB_NAME", "Mine number 1", True),
    ],
)
def test_a_value_of_the_environment_is_hidden_in_a_longer_one(name, value, is_hidden, monkeypatch):
    monkeypatch.setenv(name, value)
    address = OmegaConf.create({"url": f"https://u:${{oc.env:{name}}}@host/x"}).url
    assert address == f"https://u:{value}@host/x"
    assert (value not in redaction.hide(f"login with {value} refused")) is is_hidden


@pytest.mark.parametrize(
    "word",
    [
        "x={api_key: s3cr3tXY99}",
        "+a.b={c: {auth: {d: s3cr3tXY99}}}",
        "++x={token: 's3cr3tXY99'}",
        'x={_target_: a.b, password: "s3cr3tXY99"},{password: other}',
        "x=choice({n: 1},{password: s3cr3tXY99})",
        "x={n: 1},{auth: {d: s3cr3tXY99}}",
        "x=[{n: 1},{api_keys: [abcd, s3cr3tXY99]}]",
        "x=shuffle([{api_key: s3cr3tXY99}])",
        "x={api_key: s3cr3tXY99, not closed",
        "x=sort({'api_key' : \"s3cr3tXY99\"},{api_key: abcd})",  # which Hydra cannot
        "x.api_key=s3cr3tXY99",
    ],
)
def test_secrets_of_words_are_known_by_keys_within_what_they_set(word):
    environment.remember_words(["broken={", word, "y=1"])
    assert "s3cr3tXY99" not in hide(f"login with s3cr3tXY99: {word}")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("{_target_: a.b, api_key: 1234567890123}", ["1234567890123"]),
        ("{api_key: 1234}", []),  # a number that would be found by chance
        (r"{api_key: hunter2\,xyzzy\,plugh}", ["hunter2,xyzzy,plugh", r"hunter2\,xyzzy\,plugh"]),
        ("{a: {token: [x y, {b: zz9-plural}]},c: 1}", ["zz9-plural"]),
    ],
)
def test_an_override_with_a_secret_in_a_mapping_is_not_written(value, parts):
    assert redacted_words([f"+x.y={value}", "x={max_new_tokens: 5}", "x={a: 1}"]) == [
        "+x.y=REDACTED",
        "x={max_new_tokens: 5}",
        "x={a: 1}",
    ]
    environment.remember_words([f"+x.y={value}"])
    for part in parts:
        assert part not in hide(f"login with {part} refused")
    assert "xyzzy" not in hide(f"+x.y={value}")


@pytest.mark.parametrize("word", ["x.token=true", "x.auth=None", "x={token: null}", "x.stop_tokens=[user,assistant]"])
def test_words_that_are_no_secrets_stay_what_they_are(word):
    environment.remember_words([word])
    text = "trainer.precision=bf16-true policy.trust_remote_code=true none null at user/assistant"
    assert hide(text) == text


@pytest.mark.parametrize("word", ["x='your token: yes'", "x=password: 5", "x={n: {max_new_tokens: 1}}"])
def test_other_overrides_are_written_as_they_are(word):
    assert redacted_words([word]) == [word]


def test_no_secret_is_cut_before_it_is_hidden(monkeypatch):
    secret = "k-" + 40 * "y"
    remember({"token": secret})
    for length in (250, 262, 280, 285, 297):
        text = described(ValueError("x" * length + secret + "z" * 400))
        assert len(text) == 300
        assert "yy" not in text
        pending = pool.submit(functools.partial(float, "x" * length + secret), [{}], seconds=60)
        [failure] = pending.result()
        assert failure.message.startswith("ValueError: could not convert")
        assert "yy" not in failure.message
    assert len(told(ValueError("x" * 100_000))) == 30_000


@pytest.mark.parametrize(
    ("name", "given", "is_hidden"),
    [
        ("MLFLOW_TRACKING_URI", None, False),
        ("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db", True),
        ("A_TOKEN", None, True),  # what stands in its place may be one, too
    ],
)
def test_what_stands_in_place_of_a_variable_that_is_not_set_is_shown(name, given, is_hidden, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    for text in (f'${{oc.env:{name},"sqlite:///mlflow.db"}}', f'${{oc.env: {name} , "sqlite:///mlflow.db"}}'):
        cfg = OmegaConf.create({"logger": {"mlflow": {"address": text}}})
        resolved = OmegaConf.to_container(cfg, resolve=True)
        assert resolved["logger"]["mlflow"]["address"] == "sqlite:///mlflow.db"
        environment.remember_secrets(cfg, resolved)
        assert ("mlflow.db" not in redaction.hide("at sqlite:///mlflow.db: it")) is is_hidden
        assert (redacted(resolved) != resolved) is is_hidden
        redaction._known.clear()
        redaction._keys.clear()


def test_keys_of_the_environment_with_a_slash_are_hidden(monkeypatch, tmp_path):
    key, place = "wJalrXUtnFEMI/K7MDENG+bPx", str(tmp_path)
    monkeypatch.setenv("A_KEY", key)
    monkeypatch.setenv("A_PLACE", place)
    monkeypatch.setenv("A_RELATIVE_PLACE", os.path.relpath(place))
    for name in ("A_KEY", "A_PLACE", "A_RELATIVE_PLACE"):
        assert OmegaConf.create({"x": f"${{oc.env:{name}}}"}).x == os.environ[name]
    assert key not in redaction.hide(f"loss={key}: allowed", "REDACTED")
    assert redaction.hide(f"at {place}/x", "REDACTED") == f"at {place}/x"
