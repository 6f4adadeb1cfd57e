"""Whom a policy talks to in completions of several turns."""

from typing import Protocol


class Partner(Protocol):
    """Replies to what the model has said.

    Every completion is told of by its number among those of one call of ``Policy.sample``.
    """

    @property
    def waits(self) -> bool:
        """Whether replies take time: they are asked for only once no completion can go on."""
        ...

    @property
    def role(self) -> str | None:
        """Who replies, user or tool; None: ``policy.reply_role``."""
        ...

    def said(self, row: int, text: str) -> None:
        """The model has ended a turn of a completion, of this text."""
        ...

    def reply(self, row: int) -> str | None:
        """What it is told; None: the completion is over. Asked once after every `said`."""
        ...

    def unread(self, row: int, problem: str) -> None:
        """The policy cannot read the last reply to a completion, which is over."""
        ...
