"""Secrets stay out of everything that is shown or written.

Secret are the values of keys that are named so (``token``, ``api_key``, ``auth``, …), texts that look like the tokens
of well-known services, and whatever settings take from the environment. What was found once is hidden in all later
texts, too: overrides, messages, tracebacks.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "REDACTED"
"""Stands where a secret was: a word that is one to every shell, as it may stand in a command that is told to users."""
FORMERLY = "<redacted>"
"""The same in what version 0.1 has written."""
SHORTEST = 4
"""Characters of the shortest secret that is looked for inside other texts; shorter ones would be found by chance."""

_LONG_NUMBER = 8  # digits of a number of the environment that is looked for in texts; shorter ones are sizes, steps

_KEY = re.compile(
    r"(^|[_.\-])(auth|authorization|bearer|cookie|credentials?|passphrase|passwd|password|pwd|secrets?|tokens?)$"
    r"|(api|access|private|secret|signing|encryption|ssh|auth)_?keys?$|(token|secret|password|credential)s?$",
    re.IGNORECASE,
)
_NOT_KEY = re.compile(
    r"(max_new|batch|num|max|min|total|prompt|completion|special)_?tokens$|(^|[_.\-])(bos|eos|pad|unk)_token$",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(hf_|api_org_)[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_\-]{8,}|\b(ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w\-]{16,}|\bxox[abeoprs]-[\w\-]{10,}|\b(AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w\-]{30,}|\bwandb_v1_\w{16,}|\beyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)

_OFFERED = re.compile(r"trusted=(\[[^\];:\n]*(\]|(?=[;:\n])|$)|\S*)")
"""What a message offers to trust, which is no name if that is hidden: it would be another one's."""
_HIDDEN_OF_IT = re.compile(r"[^'\"\\$`\s=]+")
"""What is replaced in a secret: without its other characters the words of a command would not be what they were."""

_COMMANDS = """
python train.py -m -P grpo_lightning.report grpo_lightning.replay PYTHONPATH torchrun --nproc_per_node ... DIRECTORY
hydra.run.dir hydra.sweep.dir checkpoint=last --cfg job timeout -s TERM 4h
tensorboard --logdir chmod u+r pip install -r requirements-vllm.txt
grpo-lightning[gymnasium] grpo-lightning[mlflow] grpo-lightning[plot] grpo-lightning[wandb]
hydra-joblib-launcher hydra-optuna-sweeper hydra-submitit-launcher
"""
"""The words of all commands that messages offer."""
_shown: set[str] = set(_COMMANDS.split())
_known: set[str] = set()
_keys: set[str] = set()


def remember(config: Mapping[str, Any], *, keys: Collection[str] = (), texts: Collection[str] = ()) -> None:
    """Take note of the secrets among resolved settings, so that `hide` finds them in any text.

    Args:
        config: Nested settings.
        keys: Dotted keys whose values are secret whatever they are called, such as those of the environment.
        texts: What is secret besides.
    """
    _keys.update(keys)
    _known.update(
        text
        for text in (*_secrets(config, "", False), *texts)
        if len(text) >= SHORTEST and text not in (HIDDEN, FORMERLY)
    )


def show(words: Collection[str]) -> None:
    """Take note of words in which nothing is hidden: what the user has typed, and commands that are told to users.

    A stranger's ``token`` may be a piece of one, without which it would be another command.
    """
    _shown.update(words)


def show_overrides(words: Sequence[str]) -> None:
    """Take note of overrides in which nothing is hidden: those that the user has typed, but for any with a secret."""
    _shown.update(word for word in words if not _names_a_secret(word))


def _names_a_secret(word: str) -> bool:
    """Whether an override such as ``note={api_key: abc}`` may give a secret, at any depth."""
    names = re.findall(r"[\w.-]+(?=\s*[:=])", re.sub(r"[\\'\"]", "", word))
    return any(_is_secret(part) for name in names for part in name.split("."))


def hide(text: str) -> str:
    """``text`` with all known secrets, and what looks like the token of a service, replaced by ``HIDDEN``.

    Quotes in them, what a shell reads like quotes, and white space stay where they are: a secret may be a stranger's
    word, made to stand in a command that is told to users, whose words would be others without it.
    """
    for secret in sorted((one for one in _known if one not in HIDDEN), key=len, reverse=True):
        text = text.replace(secret, _masked(secret))
    text = _TOKEN.sub(lambda found: _masked(found.group()), text)
    return _OFFERED.sub(lambda found: "trusted=[…]" if HIDDEN in found.group() else found.group(), text)


def _masked(secret: str) -> str:
    return _HIDDEN_OF_IT.sub(lambda found: found[0] if _is_shown(found[0]) else HIDDEN, secret)


def _is_shown(piece: str) -> bool:
    is_small = piece.isdecimal() and len(piece) < SHORTEST
    return is_small or any(piece in one for one in _shown)


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without their secrets, the remembered keys among them."""
    return {key: _redacted(value, str(key), _is_secret(str(key))) for key, value in config.items()}


def remember_words(words: Sequence[str]) -> None:
    """Take note of the secrets among overrides such as ``logger.api_key=abc``, of lists and mappings of each part."""
    for word in words:
        key, _, value = word.partition("=")
        if _is_secret(_last(key)):
            _known.update(text for text in (value, *re.split(r"[\s,:{}\[\]'\"]+", value)) if len(text) >= SHORTEST)


def redacted_words(words: Sequence[str]) -> list[str]:
    """Overrides such as ``logger.api_key=abc`` without the values of keys that name secrets."""
    return [hide(_word(word)) for word in words]


def _word(word: str) -> str:
    key, sign, _ = word.partition("=")
    return f"{key}={HIDDEN}" if sign and _is_secret(_last(key)) else word


def _last(key: str) -> str:
    return key.rpartition(".")[2].lstrip("+~")


def _is_secret(key: str) -> bool:
    return bool(_KEY.search(key)) and not _NOT_KEY.search(key)


def _redacted(value: Any, key: str, is_secret: bool) -> Any:
    is_secret = is_secret or key in _keys
    if isinstance(value, Mapping):
        return {
            name: _redacted(one, f"{key}.{name}", is_secret or _is_secret(str(name))) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(one, f"{key}.{index}", is_secret) for index, one in enumerate(value)]
    if is_secret and value is not None and not _is_reference(value):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value


def _secrets(value: Any, key: str, is_secret: bool) -> Iterator[str]:
    is_secret = is_secret or key in _keys
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _secrets(one, f"{key}.{name}" if key else str(name), is_secret or _is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _secrets(one, f"{key}.{index}", is_secret)
    elif is_secret and isinstance(value, str) and not _is_reference(value):
        yield value
    elif key in _keys and isinstance(value, int) and len(str(value)) >= _LONG_NUMBER:
        yield str(value)


def _is_reference(value: Any) -> bool:
    """Whether a value only says where another one is, as ``${oc.env:HF_TOKEN}`` does in settings as composed."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
