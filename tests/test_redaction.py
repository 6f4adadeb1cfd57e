import ast
import json
import re
from itertools import pairwise

import pytest

from grpo_lightning import start
from grpo_lightning.checkpoint.command import show_said
from grpo_lightning.output import redaction
from grpo_lightning.output.redaction import HIDDEN, hide, redacted, redacted_words, remember, remember_words
from tests.support.composed import ROOT
from tests.support.provocations import provocation


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
    assert hide(f"a {text} b") == f"a {HIDDEN} b"
    assert redacted({"listed": [f"--with={text}"]}) == {"listed": [f"--with={HIDDEN}"]}


def test_passwords_in_addresses_and_private_keys_are_hidden():
    assert hide("http://me:pass@host:80/x and http://host:80/") == f"http://{HIDDEN}@host:80/x and http://host:80/"
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----"
    begin = f"{HIDDEN} {HIDDEN} {HIDDEN} {HIDDEN}"
    assert hide(f"<{key}>") == f"<{begin}\n{HIDDEN}\n{begin}>"


def test_quotes_of_secrets_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(redaction, "_shown", {"train.py"})  # of which paths of other tests are none
    remember({"token": "ab'cd\"ef\\gh$ij`k", "tokens": ["'\"'\"'", "no quotes"]})
    assert hide("<ab'cd\"ef\\gh$ij`k>") == "<H'H\"H\\H$H`H>".replace("H", HIDDEN)
    assert hide("'a'\"'\"'b'") == "'a'\"'\"'b'"
    assert hide("<no quotes>") == f"<{HIDDEN} {HIDDEN}>"
    assert hide("://me:pa's'@x") == f"://{HIDDEN}'{HIDDEN}'@x"


def test_what_is_a_secret_in_the_settings_is_hidden_in_every_text():
    remember({"a": {"auth": ["p1", "q12345"]}, "b": {"plain": "visible"}, "c": {"env": "from-outside"}}, keys=["c.env"])
    assert hide("p1 q12345 visible from-outside") == f"p1 {HIDDEN} visible {HIDDEN}"
    assert redacted({"c": {"env": 7}, "d": "x from-outside"}) == {"c": {"env": HIDDEN}, "d": f"x {HIDDEN}"}


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
    assert hide("k234 k1") == f"{HIDDEN} k1"


def test_a_long_number_of_the_environment_is_hidden_in_every_text_and_a_short_one_is_not():
    remember({"a": {"pin": 48151623, "steps": 2000}, "b": 48151624}, keys=["a.pin", "a.steps"])
    assert hide("48151623 48151624 2000") == f"{HIDDEN} 48151624 2000"


def commands():
    """What messages of this package offer, as far as it stands in the source."""
    for file in sorted((ROOT / "grpo_lightning").rglob("*.py")):
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield from COMMAND.findall(node.value)


COMMAND = re.compile(r"\b(?:python -|torchrun -|pip install |tensorboard --|chmod ).*")


def test_nothing_is_hidden_in_commands_that_are_offered(monkeypatch):
    found = list(commands())
    assert len(found) > 6
    for line in found:
        command = re.split(r"[)'] | \(|; | brings", line)[0]
        words = command.split()
        monkeypatch.setattr(redaction, "_known", {command, *words, *(" ".join(pair) for pair in pairwise(words))})
        assert hide(command) == command, line
    monkeypatch.setattr(redaction, "_known", {"--nproc_per_node=2 train.py", "node=16"})
    assert hide("torchrun --nproc_per_node=2 train.py; --nproc_per_node=16") == (
        "torchrun --nproc_per_node=2 train.py; --nproc_per_node=16"
    )


@provocation(
    "settings of a stranger's whose `token` is the user's package, which a message offers to trust, and a folder of "
    "his called `REDACTED`",
    "no name is offered",
)
def test_no_other_package_is_offered_to_be_trusted(monkeypatch):
    monkeypatch.setattr(redaction, "_known", {"my_rewards"})
    assert hide("my_rewards.f: allowed is trusted=[my_rewards], or") == "REDACTED.f: allowed is trusted=[…], or"
    assert hide("allowed is trusted=[trl, my_rewards]") == "allowed is trusted=[…]"
    assert hide("allowed is trusted=[trl]") == "allowed is trusted=[trl]"
    for token in (
        "[my_rewards]",
        "[my_rewards",
        "my_rewards], if",
        "[my_rewards], if you",
        "=[my_rewards]",
        "d=[my_rewards],",
    ):
        monkeypatch.setattr(redaction, "_known", {token})
        for names in ("my_rewards", "trl, my_rewards"):
            told = hide(f"allowed is trusted=[{names}], if you know it")
            assert "trusted=[…]" in told or f"trusted=[{names}]" in told, told
            assert "REDACTED" not in told.replace("trusted=[…]", "").partition("trusted")[2].partition(" if")[0], told


def test_nothing_but_secrets_is_hidden_in_what_the_user_has_typed(monkeypatch):
    monkeypatch.setattr(redaction, "_shown", set(redaction._shown))
    monkeypatch.setenv("GRPO_LIGHTNING_GIVEN", "[]")
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", json.dumps(["python", "my/train.py", "--config-dir", "REDACTED"]))
    words = ["trusted=[my_package]", "logger.wandb.api_key=hunter22", "+note=hf_abcdefghijklmnopqrst"]
    start.note_words(redacted_words([*words, "policy.path=./mine"]))
    remember({"a_token": "my_package", "b": {"token": ["my/train.py", "h=./mine", "hunter22"]}})
    line = "python my/train.py --config-dir REDACTED 'trusted=[my_package]' policy.path=./mine"
    assert hide(line) != line
    show_said()
    assert hide(line) == line
    assert hide("hunter22, hf_abcdefghijklmnopqrst") == "REDACTED, REDACTED"


@pytest.mark.parametrize(
    "word",
    [
        "+note={api_key: s3cr3tXY99}",
        "+note=[{a: 1, 'api_key': s3cr3tXY99}]",
        "+note={a: {api\\_key : s3cr3tXY99}}",
        "+wandb.auth.header=s3cr3tXY99",
        "+note={auth: {a: s3cr3tXY99}}",
        "+note.api_key=s3cr3tXY99",
    ],
)
def test_what_the_user_types_of_a_secret_stays_hidden(word, monkeypatch):
    monkeypatch.setattr(redaction, "_shown", set(redaction._shown))
    monkeypatch.setenv("GRPO_LIGHTNING_GIVEN", "[]")
    start.note_words(redacted_words([word]))
    show_said()
    remember({"token": "s3cr3tXY99"})
    assert "s3cr3tXY99" not in hide(word)
