"""Texts in CSV files, which people open in spreadsheets."""

import re
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Of formulas, also as full-width characters."""
_INSIDE = re.compile(r"""([;\t\r\n]["'\s]*)(?=[=+@\uff1d\uff0b\uff20]|[-\uff0d]\S)""")
"""Where a formula would begin if a cell ended in a text: where the comma is in numbers, cells end with a semicolon."""


def no_formula(value: Any) -> Any:
    """The same, or a text with an apostrophe before what spreadsheets would take for a formula, which may run programs.

    Args:
        value: Of any type; a text that is a number stays.
    """
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    value = _INSIDE.sub(r"\1'", value)
    return f"'{value}" if value.startswith(_BEGINNINGS) else value
