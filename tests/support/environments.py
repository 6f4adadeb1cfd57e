"""Environments of the tests: of a module, so that worker processes can import them."""

import ctypes
import os
import signal

from grpo_lightning.environment import BadCall, Environment, Episodes


def episodes_of(function, columns=None, size=None, **settings):
    """Episodes of one environment, with settings of its own."""
    columns = columns or {}
    size = size or len(next(iter(columns.values()), "1"))
    environment = Environment(function, **{"max_turns": 4, "max_failed": 1.0, **settings})
    return Episodes(environment, ["p"] * size, columns, [(0, 0, row) for row in range(size)])


def replies_to(episodes, row, *texts):
    """The replies to a row's turns."""
    replies = []
    for text in texts:
        episodes.step(row, text)
        replies.append(episodes.reply(row))
    return replies


seen = []
"""What `noting` was called with, in this process."""


def guess(turns, number):
    """Say whether a number is higher or lower; 1 for the number, None for what is no number."""
    said = turns[-1].strip()
    if said == str(number):
        return 1.0
    if not said.isdigit():
        return None
    return "higher" if int(said) < number else ("lower", 0.25)


def noting(turns, number, mood="plain", **others):
    """Keep what it was given, and change all of it."""
    seen.append((list(turns), number, mood, {name: repr(value) for name, value in others.items() if name != "rng"}))
    turns.append("changed")
    others["parts"].append("changed")
    others["replies"].append("changed")
    return "go on"


def drawn(turns, rng):
    """Reply with a random number."""
    return str(rng.randrange(10**9))


class Lying:
    """A value of no kind, which shows itself as nothing."""

    def __repr__(self):
        raise KeyError("no representation")


def returning(turns, what):
    """Return what a column names."""
    import numpy as np

    return {
        "true": True,
        "nan": float("nan"),
        "list": ["text", 0.5],
        "unscored": ("text", None),
        "int": 2,
        "numpy": np.float32(0.5),
        "numpy_text": np.str_("text"),
        "bad_scored": (BadCall("no such tool"), -0.5),
        "surrogate": "a\ud83d b \udcff",
        "control": "\x00\x1b[2J\u202e\r\n",
        "giant": "x" * 3_000_000,
    }[what]


def ends_itself(turns, how):
    """Do what a column names."""
    if how == "raise":
        raise KeyError("\x1b[31mred")
    if how == "lie":
        return Lying()
    if how == "hang_in_c":
        ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def countdown(start, rng=None):
    """Count down with the model: a generator."""
    left = start
    said = yield
    while said != "stop":
        left -= int(said)
        if left <= 0:
            return 1.0 if left == 0 else -1.0
        said = yield (f"{left} left", 0.125) if left % 2 else f"{left} left"


def shop(goal, rng):
    """Draw its goods at random."""
    said, stock = (yield), rng.sample(["egg", "oil", "tea", "rye", "fig"], 3)
    while said != "done":
        said = yield " ".join(stock)
    return float(goal in stock)


def forgetful(start, calls=[]):  # noqa: B006
    """End earlier when it is played again."""
    calls.append(1)
    yield
    if len(calls) < 2:
        yield "go on"


def hasty(start):
    """Speak first."""
    yield "hello"


def replying_at_the_end(start):
    """Return a reply."""
    yield
    return "reply"


async def later(turns):
    """Be a coroutine."""
    return 1.0


class Tool:
    """An environment that is an object."""

    role = "tool"
    tools = ({"type": "function", "function": {"name": "add", "description": "Sums up ${a} and ${b}."}},)

    def __init__(self, most):
        self.most = most

    def __call__(self, turns):
        return float(len(turns)) if len(turns) >= self.most else "more"
