"""Redaction of secrets in everything that is logged or written.

Secret are the values of keys that are named so (``token``, ``api_key``, ``password``, …) and texts that look like the
keys of well-known services.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "REDACTED"
"""Stands where a secret was."""

_SECRET_KEY = re.compile(
    r"(^|[_.\-])(auth|authorization|bearer|cookie|credentials?|passphrase|passwd|password|pwd|secrets?|tokens?)$"
    r"|(api|access|private|secret|signing|encryption|ssh|auth)_?keys?$|(token|secret|password|credential)s?$",
    re.IGNORECASE,
)
_PLAIN_KEY = re.compile(
    r"(max_new|batch|num|max|min|total|prompt|completion|special|stop)_?tokens$|(^|[_.\-])(bos|eos|pad|unk)_token$",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,}|\bsk-[\w\-]{8,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w\-]{16,}|\bxox[abeoprs]-[\w\-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w\-]{30,}"
    r"|\bwandb_v1_\w{16,}|(?<=[kK][eE][yY][=:])[0-9a-f]{40}\b|(?<=[kK][eE][yY]: )[0-9a-f]{40}\b"
    r"|(?<![\w-])eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+|(?<=\bBearer )[\w.~+/=\-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^/\s@]+(?=@)"
)
"""Keys of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, W&B, and JWTs, PEM keys and users of URLs."""
_SETTING = re.compile(r"(?<![\w.-])((?:[\w-]+\.)+[\w-]+|[A-Z][A-Z0-9_]+)=(\S+?)(?=[:;,'\")\]}]*(?:\s|$))")
"""A dotted key or a variable with its value, as errors repeat them."""
_PAIR = re.compile(r"([{,]\s?['\"]?([\w.-]{1,64})['\"]?: ?)(?:'[^']*'|\"[^\"]*\"|[^\s,{}\[\]]+)")
"""A key in a mapping with its value, as errors repeat them."""
_NAME = re.compile(r"([\w.-]+)['\"]?\s*:")
"""A key in a mapping."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def is_secret_key(key: str) -> bool:
    """Whether a key or the name of a variable says that its value is secret."""
    return bool(_SECRET_KEY.search(key)) and not _PLAIN_KEY.search(key)


def redact(text: str) -> str:
    """``text`` without keys of well-known services and without the values of settings that are named as secrets."""
    text = _TOKEN.sub(REDACTED, text)
    text = _PAIR.sub(lambda match: f"{match[1]}{REDACTED}" if is_secret_key(match[2]) else match[0], text)
    return _SETTING.sub(lambda match: f"{match[1]}={REDACTED}" if is_secret_key(match[1]) else match[0], text)


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without secrets; references such as ``${oc.env:HF_TOKEN}`` stay."""
    return {key: _redact_value(value, is_secret_key(str(key))) for key, value in config.items()}


def redact_overrides(words: Sequence[str]) -> list[str]:
    """Overrides without secrets, such as the values of ``logger.api_key=abc`` and ``logger={api_key: abc}``."""
    return [redact(_word(word)) for word in words]


def _word(word: str) -> str:
    key, sign, value = word.partition("=")
    names = [key.rpartition(".")[2].lstrip("+~"), *(_NAME.findall(value) if "{" in value else ())]
    return f"{key}={REDACTED}" if sign and any(map(is_secret_key, names)) else word


def _redact_value(value: Any, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact_value(item, is_secret or is_secret_key(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(item, is_secret) for item in value]
    is_reference = isinstance(value, str) and value.startswith("${") and value.endswith("}")
    if is_secret and value is not None and not is_reference:
        return REDACTED
    return redact(value) if isinstance(value, str) else value


def escape_control(text: str) -> str:
    """``text`` with its control characters, which may rewrite a terminal, as escapes; tabs and ends of lines stay."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def single_line(text: str) -> str:
    r"""`escape_control`, with ends of lines as ``\n``."""
    return "\\n".join(escape_control(text).splitlines())
