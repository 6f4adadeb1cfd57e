import logging
from io import StringIO

import pytest

from grpo_lightning.output.terminal import printable, show_printable
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
        show_printable("a_library")
        logging.getLogger("a_library.part").warning("evil\x1b[2J.weight \x1b[33mred\x1b[0m\nline %s", "\x9b")
    assert (
        shown.getvalue()
        == ("[lib] evil\\x1b[2J.weight red\nline \\x9b\n" + "evil\\x1b[2J.weight red\nline \\x9b\n") * 2
    )
