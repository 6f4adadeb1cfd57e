"""Words of a command that is told to users, as a shell reads them back."""

import re
import shlex

from grpo_lightning.output.terminal import printable

_QUOTED = str.maketrans({"'": "'\"'\"'", "\\": "'\"\\\\\"'"})
"""What has no plain meaning between single quotes: a backslash there is one to bash and dash, and not to fish."""


def shell_word(text: str) -> str:
    """``text`` as a shell reads it back, in one line: control characters and ends of lines as escapes in ``$'…'``.

    A shell that knows no ``$'…'``, such as dash, reads another name, and nothing behind it; fish refuses the line.
    """
    if text == " ".join(text.splitlines()) and text == printable(text):
        return text if shlex.quote(text) == text else f"'{text.translate(_QUOTED)}'"
    plain = text.replace("\\", "\\\\").replace("'", "\\x27")
    return "$'" + "".join(one if one.isprintable() else _escape(one) for one in plain) + "'"


def setting_word(text: str) -> str:
    """`shell_word`, of a setting that is told to users: ``reward=[accuracy,format]`` stays as people write it."""
    return text if re.fullmatch(r"[\w.]+=\[[\w.,-]*\]", text, re.ASCII) else shell_word(text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
