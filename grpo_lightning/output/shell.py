"""Words of a command that is told to users, as a shell reads them back."""

import re
import shlex
from typing import Any

from grpo_lightning import start
from grpo_lightning.output.terminal import printable

_QUOTED = str.maketrans({"'": "'\"'\"'", "\\": "'\"\\\\\"'", "!": "'\\!'"})
"""What has no plain meaning between single quotes: a backslash is one there to bash and dash, and not to fish; csh puts
earlier words for ``!`` there."""

_PLAIN = re.compile(r"[\w/.:+@%-]+", re.ASCII)
_NO_KEY = re.compile(r"[^\w.+-]+")


def shell_word(text: str) -> str:
    """``text`` as a shell reads it back, in one line: control characters and ends of lines as escapes in ``$'…'``.

    A shell that knows no ``$'…'``, such as dash, reads another name, and nothing behind it; fish refuses the line.
    """
    # At a tabulator a shell may complete the word that is pasted, which ends it.
    if text == " ".join(text.splitlines()) and text == printable(text) and "\t" not in text:
        return text if shlex.quote(text) == text else f"'{text.translate(_QUOTED)}'"
    plain = text.replace("\\", "\\\\").replace("'", "\\x27").replace("!", "\\x21")
    return "$'" + "".join(one if one.isprintable() else _escape(one) for one in plain) + "'"


def typed(key: str, value: Any) -> str:
    """A setting that a file may have said, as a user would type it: ``'reward=[exact,format]'``.

    Hydra and a shell read it as the same text, or a list of such, and as nothing else: typed as it stands,
    a text could be a mapping to Hydra that says whose code is trusted.
    """
    if isinstance(value, list | tuple):
        return shell_word(f"{typed_key(key)}=[{','.join(hydra_text(str(one)) for one in value)}]")
    return shell_word(f"{typed_key(key)}={hydra_text(str(value))}")


def program() -> str:
    """How the command line is started, such as ``python train.py``, in words of a shell."""
    return " ".join(map(shell_word, start.program()))


def typed_key(key: str) -> str:
    """A dotted key that a file may have said, as users would type it: nothing in it is a value."""
    return _NO_KEY.sub("…", key)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def hydra_text(value: str) -> str:
    """``value`` as Hydra reads it back: a text, but for numbers and the like, which have no quotes.

    Where it holds ``${``, which would be given a meaning, it is told as ``$…{``: as a name, that of nothing.
    """
    value = value.replace("${", "$…{")
    if _PLAIN.fullmatch(value):
        return value
    if not {*'"\\'} & {*value}:
        return f'"{value}"'
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)  # backslashes count before a quote only
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"
