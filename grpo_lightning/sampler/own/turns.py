"""What else than its own end tokens decides when a completion ends, and whether it goes on with another turn."""

from collections.abc import Sequence
from typing import Protocol


class StopTest(Protocol):
    """Says which completions end for another reason than an end token."""

    tail: int
    """How many tokens, the new one included, it has to see to judge a new one."""

    def __call__(self, ends: Sequence[Sequence[int]], news: Sequence[int]) -> list[int]:
        """How many of the new tokens of each completion belong to it, 0 where none of them ends it.

        Args:
            ends: [n] the last tokens of each completion, ``tail`` for each of the new ones or all there are.
            news: [n] how many of them are new.
        """
        ...


class Talk(Protocol):
    """Replies to completions."""

    waits: bool
    """Whether replies take time: they are asked for only once no completion can go on. When that is depends on the
    tokens alone, so that a rollout is the same however long the replies take."""

    def said(self, row: int, ids: list[int]) -> None:
        """A completion has ended a turn of these tokens; called once for each turn."""
        ...

    def reply(self, row: int) -> list[int] | None:
        """The tokens that it reads next, at least one; None: it is over."""
        ...
