"""Secrets stay out of everything that is shown or written.

Secret are the values of keys that are named so (``token``, ``api_key``, ``auth``, …), texts that look like the tokens
of well-known services, and whatever settings take from the environment. What was found once is hidden in all later
texts, too: overrides, messages, tracebacks.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "REDACTED"
"""Stands where a secret was, in what is written: a word that is one to every shell."""
MASK = f"{HIDDEN}-{token_hex(4)}"
"""The same in messages of this process, which offer commands.

A secret may be a stranger's word, made to stand in a command, which is another one without it. Nobody can have called a
file, a folder or a package like this before, so that the other command leads nowhere.
"""
FORMERLY = "<redacted>"
"""The same in what version 0.1 has written."""
SHORTEST = 4
"""Characters of the shortest secret that is looked for inside other texts; shorter ones would be found by chance."""

_LONG_LINE = 8  # characters of a line of a secret that is looked for by itself
_LONG_NUMBER = 8  # digits of a number that is looked for in texts; shorter ones are sizes, steps
_SPECIAL = re.compile(r"[\\()\[\]{}:=,\s]")

_KEY = re.compile(
    r"(^|[_.\-])(auth|authorization|bearer|cookie|credentials?|passphrase|passwd|password|pwd|secrets?|tokens?)$"
    r"|(api|access|private|secret|signing|encryption|ssh|auth)_?keys?$|(token|secret|password|credential)s?$",
    re.IGNORECASE,
)
_NOT_KEY = re.compile(
    r"(max_new|batch|num|max|min|total|prompt|completion|special|stop)_?tokens$|(^|[_.\-])(bos|eos|pad|unk)_token$",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(hf_|api_org_)[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_\-]{8,}|\b(ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w\-]{16,}|\bxox[abeoprs]-[\w\-]{10,}|\b(AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w\-]{30,}|\bwandb_v1_\w{16,}|\beyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)

_NAME = re.compile(r"([\w.-]+)['\"]?\s*:")
"""A key in a mapping."""
_NO_SECRETS = ("auto", "false", "none", "null", "true")
_PAIR = re.compile(r"([\w.-]+)['\"]?\s*:\s*['\"]?([^\s,{}\[\]'\"]+)")
"""A key and its value in a mapping, also in one that is not well written."""

_HIDDEN_OF_IT = re.compile(r"[^'\"\\$`\s=]+")
"""What is replaced in a secret: without its other characters the words of a command would not be what they were."""

_HIDDEN_ALREADY = re.compile(rf"{HIDDEN}(-[0-9a-f]{{8}})?")
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
        form
        for text in (*_secrets(config, "", False), *texts)
        if len(text) >= SHORTEST and text not in (HIDDEN, FORMERLY) and text.lower() not in _NO_SECRETS
        for form in _forms(text)
    )


def known() -> list[str]:
    """All texts that are hidden, for `remember` in another process."""
    return sorted(_known)


def _forms(text: str) -> Iterator[str]:
    """A secret as it may stand in other texts: with what is no plain letter escaped, and of several lines each."""
    yield text
    for written in (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text)):
        yield written[1:-1]
    for safe in ("", "/", "!#$%&'()*+,/:;=?@[]~"):  # as libraries put it into an address, whole or in parts
        yield quote(text, safe=safe, errors="surrogatepass")
    yield quote_plus(text, errors="surrogatepass")
    yield _SPECIAL.sub(r"\\\g<0>", text)  # as an override of Hydra's may have it
    yield text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    yield from (line for line in text.splitlines() if len(line) >= _LONG_LINE)
    if len(stripped := text.strip()) >= _LONG_LINE:
        yield stripped


def hide(text: str, mask: str = MASK) -> str:
    """``text`` with all known secrets, and what looks like the token of a service, replaced.

    Quotes in them, what a shell reads like quotes, and white space stay where they are, so that all words of a command
    remain words.

    Args:
        text: Of any length.
        mask: Stands for each secret: `HIDDEN` in what is written, which is the same whenever it is written.
    """
    shown, begin = list[str](), 0
    for start, stop in _merged(_spans(text)):
        shown += text[begin:start], _HIDDEN_OF_IT.sub(mask, text[start:stop])
        begin = stop
    return "".join((*shown, text[begin:]))


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """(begin, end) of all that is secret in a text; they may overlap."""
    already = [found.span() for found in _HIDDEN_ALREADY.finditer(text)]
    for secret in _known:
        for found in re.finditer(f"(?={re.escape(secret)})", text):
            span = found.start(), found.start() + len(secret)
            if not any(begin <= span[0] and span[1] <= end for begin, end in already):
                yield span
    yield from (found.span() for found in _TOKEN.finditer(text))


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Those that overlap as one, in order."""
    begin = end = 0
    for start, stop in sorted(spans):
        if start >= end:
            if end:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end:
        yield begin, end


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without their secrets, the remembered keys among them."""
    return {key: _redacted(value, str(key), names_secret(str(key))) for key, value in config.items()}


def remember_words(words: Sequence[str]) -> None:
    """Take note of the secrets among overrides such as ``logger.api_key=abc``, of lists and mappings of each part."""
    for word in words:
        key, _, value = word.partition("=")
        found = [text for name, text in _PAIR.findall(value) if "{" in value and names_secret(name)]
        if names_secret(_last(key)):
            found += [value, *re.split(r"[\s,:{}\[\]'\"]+", value)]
        _known.update(text for text in found if len(text) >= SHORTEST and text.lower() not in _NO_SECRETS)


def redacted_words(words: Sequence[str]) -> list[str]:
    """Overrides without the values of those with secrets, as ``logger.api_key=abc`` or ``logger={api_key: abc}``."""
    return [hide(_word(word), HIDDEN) for word in words]


def _word(word: str) -> str:
    key, sign, value = word.partition("=")
    is_secret = names_secret(_last(key)) or ("{" in value and any(map(names_secret, _NAME.findall(value))))
    return f"{key}={HIDDEN}" if sign and is_secret else word


def _last(key: str) -> str:
    return key.rpartition(".")[2].lstrip("+~")


def names_secret(key: str) -> bool:
    """Whether a key, or the name of a variable, says that its value is secret."""
    return bool(_KEY.search(key)) and not _NOT_KEY.search(key)


def _redacted(value: Any, key: str, is_secret: bool) -> Any:
    is_secret = is_secret or key in _keys
    if isinstance(value, Mapping):
        return {
            name: _redacted(one, f"{key}.{name}", is_secret or names_secret(str(name))) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(one, f"{key}.{index}", is_secret) for index, one in enumerate(value)]
    if is_secret and value is not None and not _is_reference(value):
        return HIDDEN
    return hide(value, HIDDEN) if isinstance(value, str) else value


def _secrets(value: Any, key: str, is_secret: bool) -> Iterator[str]:
    is_secret = is_secret or key in _keys
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _secrets(one, f"{key}.{name}" if key else str(name), is_secret or names_secret(str(name)))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _secrets(one, f"{key}.{index}", is_secret)
    elif is_secret and isinstance(value, str) and not _is_reference(value):
        yield value
    elif is_secret and isinstance(value, int | float) and len(str(value)) >= _LONG_NUMBER:
        yield str(value)


def _is_reference(value: Any) -> bool:
    """Whether a value only says where another one is, as ``${oc.env:HF_TOKEN}`` does in settings as composed."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
