import pytest

from grpo_lightning.output.terminal import printable


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
