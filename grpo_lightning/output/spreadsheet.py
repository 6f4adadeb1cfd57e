"""Texts in CSV files, which people open in spreadsheets."""

import re
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Of formulas, also as full-width characters."""


def no_formula(value: Any) -> Any:
    """The same, or a text behind an apostrophe that spreadsheets would take for a formula, which may run programs.

    Args:
        value: Of any type; a text that is a number stays.
    """
    is_formula = isinstance(value, str) and value.startswith(_BEGINNINGS)
    return f"'{value}" if is_formula and not _NUMBER.fullmatch(value) else value
