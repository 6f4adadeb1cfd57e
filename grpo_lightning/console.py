"""What a run prints and writes as text: without control characters and secrets, and files whole or not at all.

Secret are the values of keys that are named so (``token``, ``api_key``, ``password``, …) and texts that look like the
keys of well-known services.
"""

import json
import logging
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_lightning import __version__

log = logging.getLogger(__name__)

WIDTH = 80
"""Columns that a line fits into, except for a path or a command that is longer by itself."""
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
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def _is_secret(key: str) -> bool:
    """Whether a key or the name of a variable says that its value is secret."""
    return bool(_SECRET_KEY.search(key)) and not _PLAIN_KEY.search(key)


def redact(text: str) -> str:
    """``text`` without keys of well-known services and without the values of settings that are named as secrets."""
    text = _TOKEN.sub(REDACTED, text)
    text = _PAIR.sub(lambda match: f"{match[1]}{REDACTED}" if _is_secret(match[2]) else match[0], text)
    return _SETTING.sub(lambda match: f"{match[1]}={REDACTED}" if _is_secret(match[1]) else match[0], text)


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without secrets; references such as ``${oc.env:HF_TOKEN}`` stay."""
    return {key: _redact_value(value, _is_secret(str(key))) for key, value in config.items()}


def _redact_value(value: Any, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact_value(item, is_secret or _is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(item, is_secret) for item in value]
    is_reference = isinstance(value, str) and value.startswith("${") and value.endswith("}")
    if is_secret and value is not None and not is_reference:
        return REDACTED
    return redact(value) if isinstance(value, str) else value


def redact_overrides(words: Sequence[str]) -> list[str]:
    """Overrides without secrets, such as the values of ``logger.api_key=abc`` and ``logger={api_key: abc}``."""
    redacted = []
    for word in words:
        key, sign, value = word.partition("=")
        names = [key.rpartition(".")[2].lstrip("+~"), *(_NAME.findall(value) if "{" in value else ())]
        redacted.append(redact(f"{key}={REDACTED}" if sign and any(map(_is_secret, names)) else word))
    return redacted


def escape_control(text: str) -> str:
    """``text`` with its control characters, which may rewrite a terminal, as escapes; tabs and ends of lines stay."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def single_line(text: str) -> str:
    r"""A text on one line: control characters are escaped, line breaks become ``\n``."""
    return "\\n".join(escape_control(text).splitlines())


def escape_formula(value: Any) -> Any:
    """A cell of a CSV file: an apostrophe stands before a text that spreadsheets would run as a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def format_number(value: float, digits: int) -> str:
    """A number with so many decimals, as in .979, or where that says nothing with as many leading digits and one."""
    if value and not 0.5 * 10**-digits <= abs(value) < 10:
        return drop_leading_zero(f"{value:.{digits + 1}g}")
    return drop_leading_zero(f"{value:.{digits}f}")


def drop_leading_zero(number: str) -> str:
    """``number`` without the zero before its point."""
    return number.replace("0.", ".", 1) if number.startswith(("0.", "-0.")) else number


def wrap(text: str) -> list[str]:
    """``text`` in lines that fit a terminal; a word that does not, such as a path, stays whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def print_line(line: str) -> None:
    """Print a line to stderr, if anybody reads it: a run outlives ``2>&1 | head``."""
    with suppress(BrokenPipeError):
        print(redact(escape_control(line)), file=sys.stderr, flush=True)


def log_line(line: str) -> None:
    """Print a line to stderr, and write it to the log file of the run, if there is one."""
    print_line(line)
    log.info("%s", line, extra={"printed": True})


def describe_error(error: BaseException) -> str:
    """The message of an exception as a sentence; kinds other than ValueError and the like are named."""
    text, kind = str(error).strip(), type(error)
    is_plain = kind.__module__.startswith("grpo_lightning") or kind in (ValueError, RuntimeError, FloatingPointError)
    sentence = text if text and is_plain else f"{kind.__name__}: {text}" if text else kind.__name__
    return redact(escape_control(sentence))


class LineFormatter(logging.Formatter):
    """Formats records without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(escape_control(super().format(record)))


class TerminalHandler(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``: while a progress bar is shown, above it. `log_line` has printed its own.

    Tracebacks are in the log file only, unless HYDRA_FULL_ERROR=1.

    Args:
        stream: Not used; Hydra hands one over.
    """

    def __init__(self, stream: object = None) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """What is written to."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if os.environ.get("HYDRA_FULL_ERROR") != "1":
            record = logging.makeLogRecord(vars(record) | {"exc_info": None, "exc_text": None, "stack_info": None})
        if not getattr(record, "printed", False):
            super().emit(record)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write under, which takes its place at the end: there is the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``, all of it or nothing; a string as UTF-8.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file by a new one, or leave it as it is and warn."""
    try:
        write_atomic(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:  # a full disk: not a second error that would hide the first
        log.warning("%s cannot be written: %s", path, error.strerror)


def write_summary(directory: Path, summary: Mapping[str, Any], *, mode: str = "fit") -> None:
    """Write ``summary.json``; a preflight, or a later validation or export of a directory, has one of its own name.

    Args:
        directory: The run's.
        summary: "metrics", "values" (of each metric over the run), "steps", "seconds", "started", "choices" (group of
            conf/ -> name or names), "overrides", "status" and "error".
        mode: What the run did.
    """
    path = directory / "summary.json"
    if mode == "preflight" or (mode != "fit" and path.exists()):
        path = directory / f"summary_{mode}.json"
    write_json(path, summary)


def utc_now() -> str:
    """The time, as in 2026-01-31T23:59:59+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def start_banner(
    config: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any], sizes: str
) -> list[str]:
    """The lines that say what a run was set to, what that amounts to, and where it writes.

    Args:
        config: The settings.
        overrides: What the user changed.
        choices: The parts of the run: group of conf/ -> name, or names.
        sizes: What the settings amount to, in words.
    """
    steps = f", {config['steps']} steps" if config["mode"] == "fit" else ""
    start = f", from checkpoint={config['checkpoint']}" if config["checkpoint"] is not None else ""
    named = {group: "+".join(name) if isinstance(name, list) else name for group, name in choices.items()}
    parts = [f"{group}={name}" for group, name in named.items() if name not in ("", "none", "default")]
    changed = [word for word in redact_overrides(overrides) if word.partition("=")[0] not in choices]
    return [
        f"grpo-lightning {__version__}: {config['mode']}{steps}, seed {config['seed']}{start}",
        *wrap(" ".join(parts)),
        *(wrap(f"changed: {' '.join(changed)}") if changed else ()),
        *(wrap(sizes) if config["mode"] == "fit" else ()),
        *_on_one_line(f"directory: {config['run_dir']}", "(settings: .hydra/config.yaml)"),
    ]


def end_banner(
    summary: Mapping[str, Any], config: Mapping[str, Any], directory: Path, command: str, *, is_job: bool = False
) -> list[str]:
    """The lines that end a run: the outcome, what it leaves behind, and how to go on.

    Args:
        summary: As in ``summary.json``.
        config: The run's settings.
        directory: The run's directory.
        command: The one that continues the run.
        is_job: Whether it is one of a sweep, which ends with one line.
    """
    seconds = f"{summary['seconds']:.0f} s"
    if config["mode"] == "validate":
        metrics = {name: value for name, value in summary["metrics"].items() if name.startswith("val/")}
        parts = [f"{metric_label(name)} {format_number(value, 3)}" for name, value in metrics.items()]
        return wrap("validated: " + " · ".join([*parts, seconds]))
    if config["mode"] != "fit":
        return []
    lines = [" · ".join([*_change(summary["values"], config["sweep_metric"]), seconds])]
    if is_job:
        return lines
    if (directory / "export").is_dir():
        lines += _on_one_line("exported to", str(directory / "export"))
    if (directory / "tensorboard").is_dir():
        lines += _on_one_line("look at it with:", f"tensorboard --logdir {shlex.quote(str(directory))}")
    if (directory / "checkpoints" / "last.ckpt").exists():
        lines += _on_one_line("continue with:", command)
    return lines


def _change(values: Mapping[str, Any], metric: str) -> list[str]:
    """First, last and best value of a metric of ``summary.json``, or of the next best one that has values."""
    name = next((name for name in (metric, "val/pass@1", "reward/total", "loss/total") if name in values), None)
    if name is None:
        return []
    value = values[name]
    first = "" if value.get("first_step", 0) == value.get("last_step", 1) else f"{format_number(value['first'], 3)} → "
    best = f" (best {format_number(value['best'], 3)} at {value['best_step']})" if first and "best" in value else ""
    return [f"{metric_label(name)} {first}{format_number(value['last'], 3)}{best}"]


def metric_label(name: str) -> str:
    """What a metric is called on a line: ``pass@1`` for ``val/pass@1``, ``accuracy`` for ``reward/accuracy``."""
    name = name.removeprefix("val/")
    return {"reward/total": "reward", "loss/total": "loss"}.get(name) or name.removeprefix("reward/")


def _on_one_line(first: str, second: str) -> list[str]:
    """One line, or where that does not fit two: what is to be copied is never cut."""
    line = f"{first} {second}"
    return [line] if len(line) <= WIDTH else [first, f"  {second}"]


def is_first_process() -> bool:
    """Whether this process writes and prints, by the launchers' variables; known before processes are in contact."""
    numbers = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ]
    return not numbers or numbers[0] == "0"
