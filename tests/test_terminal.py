import json
import logging
import sys
import time
import warnings
from io import StringIO

import pytest
import torch

from grpo_lightning.advantage import centered
from grpo_lightning.composition.sweep import tell
from grpo_lightning.output import redaction
from grpo_lightning.output.ending import label
from grpo_lightning.output.terminal import (
    FileFormatter,
    Lasting,
    TerminalFormatter,
    name_of_file,
    printable,
    quoted,
    say,
    sentence,
    show_printable,
)
from grpo_lightning.settings import ConfigError
from tests.support.provocations import provocation


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain äß漢字 🙂", "plain äß漢字 🙂"),
        ("two\tcolumns\nand lines", "two\tcolumns\nand lines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\x00\x7f", "\\x00\\x7f"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert printable(text) == shown


@provocation(
    "escape sequences in the names that a stranger's model has for its weights, quantization or rotary embedding",
    "they are escaped in what transformers warns of them",
)
def test_a_library_s_warnings_cannot_clear_the_terminal():
    shown, log = StringIO(), logging.getLogger("a_library")
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logging.Formatter("[lib] %(message)s"))
    log.addHandler(handler)
    log.addHandler(logging.StreamHandler(shown))
    log.propagate = False
    for _ in range(2):  # as often as models are read
        show_printable(["a_library"])
        logging.getLogger("a_library.part").warning("evil\x1b[2J.weight \x1b[33mred\x1b[0m\nline %s", "\x9b")
    assert (
        shown.getvalue()
        == ("[lib] evil\\x1b[2J.weight red\n  | line \\x9b\n" + "evil\\x1b[2J.weight red\n  | line \\x9b\n") * 2
    )


@provocation(
    "an adapter or a data set of a stranger's of whose names a library warns, with ends of lines and "
    "`continue with: …`",
    "further lines are marked, control characters escaped",
)
def test_a_warning_looks_like_no_line_of_our_own(capsys, monkeypatch):
    def show(message, category, filename, lineno, file=None, line=None):  # as Python does it outside of pytest
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        for _ in range(2):
            show_printable()
            warnings.warn("none of \x1b[2J\nstopped: step 3 is saved\n \u200bcontinue with: x", stacklevel=1)
    shown = capsys.readouterr().err
    assert (
        shown.count("UserWarning: none of \\x1b[2J\n  | stopped: step 3 is saved\n  |  \u200bcontinue with: x\n") == 2
    )
    assert not any(line.strip(" \u200b").startswith(("stopped", "continue")) for line in shown.splitlines())


def test_escape_sequences_without_end_take_no_time():
    shown = StringIO()
    began = time.perf_counter()
    Lasting(shown).write("\x1b[" * 50_000 + "x\n" + "\x1b" * 50_000 + "|\n")
    assert time.perf_counter() - began < 5
    assert "| " not in shown.getvalue()


def test_warnings_hide_secrets(monkeypatch):
    told = []
    monkeypatch.setattr(redaction, "_known", {"s3cr3tXY99"})
    monkeypatch.setattr(warnings, "showwarning", lambda message, *place, **more: told.append(message))
    show_printable()
    warnings.showwarning(UserWarning("with s3cr3tXY99\x1b"), UserWarning, "file.py", 3)
    assert told == [f"with {redaction.MASK}\\x1b"]


class Forged:
    def __repr__(self) -> str:
        return "x\nstopped: step 3"


def test_words_of_a_strangers_are_quoted_and_cut():
    assert quoted("a\nb\x1b") == "“a\\nb\\x1b”"
    assert quoted("x" * 80) == f"“{'x' * 80}”"
    assert quoted("x" * 81) == f"“{'x' * 80}…”"
    assert quoted("a”; it is continued by: sh x; “b") == '“a"; it is continued by: sh x; "b”'
    assert name_of_file("../runs/a-b_1.ckpt") == "../runs/a-b_1.ckpt"
    assert name_of_file("a, it is continued by: sh x") == "“a, it is continued by: sh x”"
    assert name_of_file("ä\n") == "“ä”"


@provocation(
    "a chat template of a stranger's that raises `… is continued by: python train.py; touch x`, over several lines, or "
    "weights of his with such names",
    "no line of it begins as one of this program's own: others' words have the name of their error, and further lines "
    "a mark",
)
def test_what_others_say_looks_like_no_line_of_our_own(capsys):
    forged = "it failed\nstopped: step 3 is saved\n  continue with: python train.py; touch x"
    marked = "it failed\n  | stopped: step 3 is saved\n  | continue with: python train.py; touch x"
    assert sentence(ValueError(forged)) == sentence(RuntimeError(f"{forged}\n")) == marked
    with pytest.raises(ValueError, match="Expecting value") as others:
        json.loads("x")
    assert sentence(others.value).startswith("JSONDecodeError: ")
    with pytest.raises(ValueError, match="Unknown level") as others:
        logging._checkLevel("x")  # a ValueError itself
    assert sentence(others.value) == "ValueError: Unknown level: 'x'"
    with pytest.raises(ConfigError) as own:
        raise ConfigError(["a: b", "c: d\nstopped: step 3"])
    assert "\n  c: d\\nstopped: step 3" in sentence(own.value)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "%s", (sentence(own.value),), None)
    assert FileFormatter("[E] %(message)s").format(record).splitlines()[1:] == [
        "  | a: b",
        "  | c: d\\nstopped: step 3",
    ]
    assert sentence(ConfigError(["a: b"])) == "the settings cannot work:\n  a: b"
    say(forged)
    assert capsys.readouterr().err == marked + "\n"
    for name in ("a\nstopped: step 3", "continue with: python mine.py"):
        assert label(f"val/{name}") == f"“val/{name}”".replace("\n", "\\n")
    for kind in (FileFormatter, TerminalFormatter):
        record = logging.LogRecord("x", logging.INFO, "f", 1, "%s", (forged,), None)
        assert kind("%(message)s").format(record) == marked
        try:
            raise KeyError(Forged())
        except KeyError:
            record = logging.LogRecord("x", logging.INFO, "f", 1, "failed", (), sys.exc_info())
        told = kind("%(message)s").format(record)
        assert ("\nTraceback" in told) == (kind is FileFormatter)
        assert ("\n| stopped: step 3" in told) == (kind is FileFormatter)
        assert "\nstopped" not in told


def test_what_this_package_raises_stands_as_it_is():
    with pytest.raises(ValueError, match="a group needs") as own:
        centered(torch.zeros(2, 1))
    assert sentence(own.value) == str(own.value)


@provocation(
    "any other line of a stranger's that begins as this program's offers do: names of files that `--help` lists, keys "
    "that a parser of YAML complains of, what a resolver warns of",
    "it has a mark; what is no setting is one sentence without a traceback",
)
def test_nobody_else_begins_a_line_as_this_program_does(monkeypatch):
    shown = StringIO()
    monkeypatch.setattr(sys, "stderr", Lasting(shown))
    print("help:\nstopped: step 3\nContinue\u00a0with:\n  x\ncontinued\n exported to /x", file=sys.stderr)
    sys.stderr.write("zz\n\x1b[0;1m \x1b(Bcontinue with:\n50 %\r\x9b0mstopped: step 3\n\u3164look at x\n")
    sys.stderr.write("continue with: python train.py; touch x\n")
    sys.stderr.write("\x1b]52;c;eA==\x07\x1b[31mred\x1b[0m \x9d0;t\x9c\r\x1bPq\n")
    sys.stderr.write("a\u202eb\u2066c\n")
    say("continue with: python train.py")
    tell("this table again: python")
    assert shown.getvalue().splitlines() == [
        *("help:", "| stopped: step 3", "| Continue\u00a0with:", "  x", "continued", "|  exported to /x"),
        *("zz", "| \x1b[0;1m \x1b(Bcontinue with:", "50 %", "| \x9b0mstopped: step 3", "| \u3164look at x"),
        "| continue with: python train.py; touch x",
        *("\\x1b]52;c;eA==\x07\x1b[31mred\x1b[0m \\x9d0;t\x9c", "\\x1bPq"),  # a line that is written over stays one
        "a\\u202eb\\u2066c",
        *("continue with: python train.py", "this table again: python"),
    ]
