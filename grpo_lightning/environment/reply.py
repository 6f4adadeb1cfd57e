"""Replies that say more than their text."""


class BadCall(str):
    """A reply that says what is wrong with what the model has asked for; it is counted as ``episode/bad_calls``."""

    __slots__ = ()
