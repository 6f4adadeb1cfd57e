"""Conditions between rewards."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Gate:
    """A condition on the score of a reward, such as format > 0."""

    reward: str
    comparison: str
    number: float

    @classmethod
    def parse(cls, condition: str | None) -> "Gate | None":
        """The condition that a text describes; None for None.

        Raises:
            ValueError: The text describes none.
        """
        if condition is None:
            return None
        match = _CONDITION.fullmatch(condition) if isinstance(condition, str) else None
        if match is None:
            raise ValueError(
                f"only_if={condition!r}: allowed is a reward, one of {' '.join(_COMPARE)} and a number, "
                'such as "format > 0"'
            )
        try:
            return cls(match[1], match[2], float(match[3]))
        except ValueError as error:
            raise ValueError(f"only_if={condition!r}: {error}") from error

    def holds(self, score: float | None) -> bool:
        """Whether the condition holds for a score of its reward; never where the reward does not apply."""
        return score is not None and _COMPARE[self.comparison](score, self.number)
