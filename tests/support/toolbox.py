"""Functions as a user's tools might be, good and bad ones; importable, since they are pickled by name."""

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Optional

import numpy as np

from grpo_lightning.environment import BadCall
from grpo_lightning.environment.tools import EndEpisode


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number, which is one if left out.
    """
    return a + b


def echo(value: Any) -> Any:
    """Returns its argument.

    Args:
        value: Anything.
    """
    return value


def now() -> str:
    """Says what time it is."""
    return "noon"


class Color(Enum):
    RED = "red"
    BLUE = "blue"


def paint(
    color: Color,
    sizes: list[int],
    place: tuple[int, str],
    finish: Literal["matt", "glossy"] = "matt",
    layers: Optional[int] = None,  # noqa: UP045
    prices: dict[str, float] | None = None,
) -> str:
    """Paints.

    Args:
        color: Of the paint.
        sizes: Of what is painted.
        place: Row and name.
        finish: Of the surface.
        layers: How many.
        prices: By shop.
    """
    return repr((color, sizes, place, finish, layers, prices))


def look_up(key: str, table: dict, rng, hint="no hint") -> str:
    """Looks a word up.

    Args:
        key: The word.
    """
    return f"{table.get(key, hint)} {rng.randrange(1000)}"


def finish(answer: int, number: int) -> EndEpisode | str:
    """Ends the game.

    Args:
        answer: The number that is meant.
    """
    return EndEpisode(1.0 if answer == number else 0.0) if answer else EndEpisode()


def _recurse(n=0):
    return _recurse(n + 1)


_FAULTS: dict[str, Callable[[], Any]] = {
    "value": lambda: int("no"),
    "exit": lambda: exit(3),
    "recursion": _recurse,
    "long": lambda: int("no " * 10_000),
    "surrogate": lambda: "a\ud800b",
    "numpy": lambda: {"mean": np.float32(0.5), "all": np.arange(3), "set": {2, 1}},
    "cut": lambda: "x" * 2001,
    "refused": lambda: BadCall("not today"),
}


def misbehave(how: str) -> Any:
    """Does not do what it should.

    Args:
        how: In which way.
    """
    return _FAULTS[how]()


class Shelf:
    """What a program of the user's makes, whose method is a tool."""

    def __init__(self, words):
        self._words = words

    def find(self, index: int) -> str:
        """Finds a word.

        Args:
            index: Its place.
        """
        return self._words[index]
