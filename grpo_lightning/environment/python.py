"""Environment of Python: the model writes cells of code, which run in the sandbox, and reads what they print."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from grpo_lightning.config.rules import flag, integer, problems
from grpo_lightning.environment.base import BadCall
from grpo_lightning.environment.tools import Call, calls
from grpo_lightning.reward.accuracy import fenced_blocks, strip_thoughts
from grpo_lightning.sandbox.client import Limits, run

_RULES = {"max_output": integer(100), "as_tool": flag()}
_LANGUAGES = ("py", "python", "python3")
_MAX_CELL = 100_000  # characters
_MAX_ERROR = 500  # characters of the line that says what was raised
_MAX_CALLS = 8  # of a turn
_DONE = 97
_NAME = "python"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Runs Python code. What earlier calls have defined is still there. Only what is printed, and "
        "the value of the last line, is seen.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}

_PROGRAM = """
def __main(cells, done):
    import ast, os, sys, traceback
    out, names = sys.stdout, {"__name__": "__main__", "__builtins__": __builtins__}
    kept, said, nothing = os.dup(1), os.dup(2), os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 2)
    form, ends, write, again = traceback.format_exception_only, os._exit, os.write, os.dup2
    for number, text in enumerate(cells, start=1):
        again(kept if number == len(cells) else nothing, 1)
        out = open(1, "w", closefd=False) if out.closed else out
        sys.stdout, line, at, file = out, None, None, f"<cell {number}>"
        try:
            tree, last = ast.parse(text, file), None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, file, "exec"), names)
            value = None if last is None else eval(compile(last, file, "eval"), names)
            if value is not None:
                print(repr(value), file=out)
        except BaseException as error:
            line, step = form(type(error), error)[-1].strip(), error.__traceback__
            while step is not None:
                at = step.tb_lineno if step.tb_frame.f_code.co_filename == file else at
                step = step.tb_next
            at = error.lineno if isinstance(error, SyntaxError) and error.filename == file else at
            line += "" if at is None else f" (line {at})"
        try:
            out.flush()
        except BaseException:
            pass
    if line is not None:
        write(said, line.encode(errors="replace"))
    ends(done)
import json
__main(json.loads(%r), %d)
"""
"""The cells one after the other, with the names that those before have defined. What all but the last print goes to
nowhere. The status says that the last has come to its end, with or without an exception, whose line is on stderr."""


class Python:
    """Environment in which the model writes Python, and reads what it prints.

    A turn's code are its complete blocks between ```python (or py, python3) and ```, outside of its thoughts, or calls
    of the tool ``python`` as in `grpo_lightning.environment.tools`; a turn without ends the episode, and the rewards
    judge it. All code of a turn is one cell. The reply is what the cell prints, with the value of its last line if that
    is an expression, as in a notebook, and the last line of the exception if it raises one.

    Nothing is kept between two turns: all cells so far run again, in a sandbox of their own (`grpo_lightning.sandbox`),
    and the names that earlier ones have defined are there. A cell that a limit ends, or that ends the program itself,
    leaves nothing behind. Its time is counted together with that of the cells before it.

    Args:
        seconds: By the clock, for all cells so far.
        cpu_seconds: Of computing, for all cells so far.
        memory_mb: Of address space, in units of 2**20 bytes.
        max_output: The most characters of output in a reply; of more the middle is left out.
        as_tool: Whether the chat template shows the model a tool ``python``, and replies are a tool's.

    Raises:
        ValueError: On construction, naming the setting that is out of range.
    """

    def __init__(
        self, *, seconds: float, cpu_seconds: int, memory_mb: int, max_output: int = 2000, as_tool: bool = False
    ) -> None:
        if errors := problems(_RULES, {"max_output": max_output, "as_tool": as_tool}):
            raise ValueError("; ".join(errors))
        self._limits = Limits(seconds=seconds, cpu_seconds=cpu_seconds, memory_mb=memory_mb)
        self._max_output = max_output
        self.tools: list[dict[str, Any]] | None = [_SCHEMA] if as_tool else None
        """The JSON schemas that the chat template shows."""
        self.role = "tool" if as_tool else None
        """Role of the replies; None: what the policy's settings say."""

    def __call__(self, *, turns: Sequence[str]) -> str | None:
        """What the code in the last turn prints; None if it has none."""
        *before, last = map(_cell, turns)
        if last is None or isinstance(last, BadCall):
            return last
        cells = [cell for cell in before if cell is not None and not isinstance(cell, BadCall)]
        output, error, _ = _run((*cells, last), self._limits)
        printed = _shorten(output.rstrip("\n"), self._max_output)
        return "\n".join(part for part in (printed, error) if part) or "(no output)"


def _cell(turn: str) -> str | None:
    """The code of a turn; a `BadCall` where it cannot be run, and None where there is none."""
    blocks = fenced_blocks(strip_thoughts(turn), _LANGUAGES)
    if not blocks:
        for call in calls(turn, limit=_MAX_CALLS):
            if isinstance(call, BadCall):
                return call
            if not _is_code(call):
                return BadCall(f'error: the only tool is {_NAME}, and its only argument is "code", a text')
            blocks.append(f"{call.arguments['code']}\n")
    text = "".join(blocks)
    if len(text) > _MAX_CELL:
        return BadCall(f"error: the code has {len(text)} characters; the limit is {_MAX_CELL}")
    return text if blocks else None


def _is_code(call: Call) -> bool:
    return call.name == _NAME and list(call.arguments) == ["code"] and isinstance(call.arguments["code"], str)


@functools.lru_cache(maxsize=512)
def _run(cells: tuple[str, ...], limits: Limits) -> tuple[str, str, bool]:
    """Run the last of some cells, after those before it that have come to their end.

    The result is cached, as it is the same every time, unless a cell asks for the time or for the system's chance.

    Returns:
        What it prints; the exception or the limit that ended it, if any; and whether that ended the whole program.
    """
    finished = [cell for number, cell in enumerate(cells[:-1], start=1) if not _run(cells[:number], limits)[2]]
    outcome = run(_PROGRAM % (json.dumps([*finished, cells[-1]]), _DONE), "", limits)
    printed = _shorten(outcome.stdout, _MAX_CELL)
    if outcome.ended == "exit" and outcome.code == _DONE:
        return printed, _shorten(outcome.stderr, _MAX_ERROR), False
    reason = {
        "time": f"ended: all cells together may take {limits.seconds:g} s, and {limits.cpu_seconds} s of computing",
        "exit": f"ended with status {outcome.code}",
        "crash": f"ended by signal {-outcome.code}",
    }.get(outcome.ended, f"ended by the limit on {outcome.ended}")
    return printed, f"({reason}; what this cell has defined is lost)", True


def _shorten(text: str, limit: int) -> str:
    """The text without its middle, where it is too long."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]}\n… ({len(text) - limit} characters left out) …\n{text[-tail:]}"
