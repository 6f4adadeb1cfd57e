"""Calls in which no text becomes Python code, whatever a library makes of it."""

import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ALLOWED = re.compile(
    rb"from sympy import \*|[A-Z][a-z]+ \('?[0-9.eE+-]+'? ?\)|def monomial_[a-z]+\([ABk, ]+\):\n.*", re.DOTALL
)
"""What sympy writes itself: a number that it has as text, and arithmetic of exponents, whose names are its own."""

_is_guarded: ContextVar[bool] = ContextVar("_is_guarded", default=False)


def call_uncompiled(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What ``function`` returns; while it runs, Python compiles no text but modules that it imports and sympy's own.

    Raises:
        RuntimeError: Other text was to be compiled, and the function does not catch errors.
    """
    before = _is_guarded.set(True)
    try:
        return function(*arguments, **named)
    finally:
        _is_guarded.reset(before)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "compile" or not _is_guarded.get():
        return
    text = arguments[0].encode() if isinstance(arguments[0], str) else arguments[0] or b""  # None for a syntax tree
    if not _ALLOWED.fullmatch(text) and not _is_import(sys._getframe()):
        raise RuntimeError("text that is read would become Python code")


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported within the guarded call in which this is."""
    while frame is not None and frame.f_code is not call_uncompiled.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


sys.addaudithook(_refuse)
