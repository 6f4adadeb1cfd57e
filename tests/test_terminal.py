"""What is printed and logged: no control characters, no secrets, and no reason for a run to end."""

import errno
import logging
import shlex
import sys
from io import StringIO

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from grpo_lightning.advantage import centered
from grpo_lightning.config import ConfigError
from grpo_lightning.config.redaction import escape_control, single_line
from grpo_lightning.config.shell import format_override, quote_value, shell_quote
from grpo_lightning.output.terminal import (
    FileFormatter,
    Lasting,
    TerminalFormatter,
    TerminalHandler,
    say,
    sentence,
    unseen,
)

TOKEN = "hf_" + 24 * "a"


def test_control_characters_are_shown_as_escapes():
    for text, shown in (
        ("plain äß漢字 🙂", "plain äß漢字 🙂"),
        ("two\tcolumns\nand lines", "two\tcolumns\nand lines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\x00\x7f", "\\x00\\x7f"),
    ):
        assert escape_control(text) == shown
    assert single_line("a\nb\x1b") == "a\\nb\\x1b"


def test_errors_are_sentences():
    with pytest.raises(ValueError, match="a group needs") as own:
        centered(torch.zeros(2, 1))
    assert sentence(own.value) == str(own.value)
    assert sentence(ConfigError(["a: b"])) == "the settings cannot work:\n  a: b"
    assert sentence(RuntimeError(f"a\x1b[2J {TOKEN}\n")) == "a\\x1b[2J REDACTED"
    assert sentence(KeyError("x")) == "KeyError: 'x'"
    assert sentence(ValueError()) == "ValueError"


def test_logs_have_tracebacks_in_the_file_only(monkeypatch):
    def record():
        try:
            raise KeyError(f"evil\x1b[2J {TOKEN}")
        except KeyError:
            return logging.LogRecord("x", logging.INFO, "f", 1, "failed\x07", (), sys.exc_info())

    one = record()
    told = TerminalFormatter("[%(levelname)s] %(message)s").format(one)
    assert told == "[INFO] failed\\x07"
    for written in (FileFormatter("%(message)s").format(one), FileFormatter("%(message)s").format(record())):
        assert written.startswith("failed\\x07\nTraceback")
        assert written.endswith("KeyError: 'evil\\x1b[2J REDACTED'")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in TerminalFormatter("%(message)s").format(record())


def test_what_is_said_is_printed_once_and_logged(capsys, monkeypatch):
    log, logged, shown = logging.getLogger("grpo_lightning"), StringIO(), TerminalHandler()
    shown.addFilter(unseen())
    handlers = [logging.StreamHandler(logged), shown]
    for handler in handlers:
        log.addHandler(handler)
    monkeypatch.setattr(log, "level", logging.INFO)
    try:
        say(f"step 3 \x1b {TOKEN}")
        log.warning("once")
    finally:
        for handler in handlers:
            log.removeHandler(handler)
    assert capsys.readouterr().err == "step 3 \\x1b REDACTED\nonce\n"
    assert logged.getvalue().splitlines()[-1] == "once"


class Gone(StringIO):
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
        stream = Lasting(Gone(errno.EPIPE, file))
        assert stream.write("text") == 4
        stream.flush()
        print("to nobody", file=file, flush=True)
        assert stream.getvalue() == ""
        full = Lasting(Gone(errno.ENOSPC, file))
        for use in (lambda: full.write("x"), full.flush):
            with pytest.raises(OSError, match="gone"):
                use()
    assert (tmp_path / "x").read_text() == ""


def test_offered_words_are_what_a_shell_and_hydra_read_back():
    parser = OverridesParser.create()
    for value in (
        "plain/a-b_1.ckpt",
        "a b",
        "a'b",
        'a"b',
        "a\\'b\\",
        "${x}/y",
        "a,b=c",
        "[a]",
        "{a: 1}",
        "",
        "1e-4",
        "ä",
    ):
        [word] = shlex.split(format_override("a.b", value))
        found = OmegaConf.create({"x": parser.parse_override(word).value()})
        assert str(getattr(found.x, "text", found.x)) in (value, str(float(value)) if value == "1e-4" else value)
    assert format_override("reward", ["exact", "format"]) == "'reward=[exact,format]'"
    assert shell_quote("a") == "a"
    assert quote_value("a b") == '"a b"'
