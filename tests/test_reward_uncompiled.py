import collections
import sys

import pytest
from sympy import Symbol
from sympy.parsing.sympy_parser import parse_expr
from sympy.utilities.lambdify import lambdify

from grpo_lightning.reward.uncompiled import call_uncompiled

REFUSED = "text that is read would become Python code"


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (eval, ["1 + 1"]),
        (eval, [b"Integer (open('x') )"]),
        (eval, ["Integer (3 )+x"]),
        (exec, ["import os"]),
        (compile, ["x", "/a/file.py", "exec"]),
        (exec, ["def monomial_mul(A, B=open('x')):\n    return 1"]),
        (parse_expr, ["x + 1"]),
        (lambdify, [Symbol("x"), Symbol("x") + 1]),
        (collections.namedtuple, ["N", "a b"]),
    ],
)
def test_text_does_not_become_code(function, arguments):
    with pytest.raises(RuntimeError, match=REFUSED):
        call_uncompiled(function, *arguments)
    function(*arguments[:1] if function is parse_expr else arguments) if function in (parse_expr, lambdify) else None


def test_it_holds_for_the_call_alone():
    assert eval("1 + 1") == 2
    with pytest.raises(ZeroDivisionError):
        call_uncompiled(lambda: 1 // 0)
    assert eval("1 + 1") == 2
    with pytest.raises(RuntimeError, match=REFUSED):
        call_uncompiled(lambda: call_uncompiled(int, "1") + eval("2"))


def test_modules_are_imported(tmp_path, monkeypatch):
    """Also such as make code of text of their own; what imports this call is no import in it."""
    (tmp_path / "imported_within.py").write_text("VALUE = eval('6 * 7')\n")
    (tmp_path / "imports_the_call.py").write_text(
        "from grpo_lightning.reward.uncompiled import call_uncompiled\n"
        "try:\n    VALUE = call_uncompiled(eval, '6 * 7')\nexcept RuntimeError as error:\n    VALUE = str(error)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert call_uncompiled(__import__, "imported_within").VALUE == 42
    assert __import__("imports_the_call").VALUE == REFUSED
    for name in ("imported_within", "imports_the_call"):
        del sys.modules[name]
