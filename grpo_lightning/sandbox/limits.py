"""What a program may take, and what comes of it."""

from dataclasses import dataclass

from grpo_lightning.allowed import integer, number, problems

RULES = {
    "seconds": number(lambda v: v > 0, "a number > 0"),
    "cpu_seconds": integer(1),
    "memory_mb": integer(64),
    "output_bytes": integer(1),
    "file_bytes": integer(0),
    "files": integer(0),
    "threads": integer(1),
}
"""What each limit may be."""


class Unavailable(RuntimeError):
    """The sandbox cannot be had on this machine, or did not hold when it was tried; nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What one program may take before it is ended.

    Raises:
        ValueError: On construction, naming the limit: it is out of range.
    """

    seconds: float
    """By the clock on the wall, from start to end: what a program may sleep. More than ``cpu_seconds``, since other
    processes take their share of a busy machine."""
    cpu_seconds: int
    """Of computing, all threads together; the kernel counts them, so that a busy machine changes little."""
    memory_mb: int
    """Address space in units of 2**20 bytes; Python itself takes about 40. A program gets a ``MemoryError`` there."""
    output_bytes: int = 2**20
    """Printed, of each of stdout and stderr."""
    file_bytes: int = 16 * 2**20
    """In all files that the program writes into its directory; one that grows beyond is an ``OSError``."""
    files: int = 64
    """In its directory at once."""
    threads: int = 32
    """At once, the first included."""

    def __post_init__(self) -> None:
        if wrong := problems(RULES, vars(self)):
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Outcome:
    """What a program did: ``Outcome(stdout="7", stderr="", ended="exit", code=0)`` for one that prints 7."""

    stdout: str
    """What it printed, at most ``output_bytes``; bytes that are no UTF-8 become U+FFFD."""
    stderr: str
    """The same of stderr, with the traceback of an exception."""
    ended: str
    """``exit`` by itself or with an exception, ``crash`` by a signal, or at a limit: ``time``, ``output``, ``threads``
    or ``files``. A program at its limit of memory has a ``MemoryError``, which is an exception like others."""
    code: int
    """Its exit status, 1 for an exception; of a signal its number, negative."""

    @property
    def is_well(self) -> bool:
        """Whether it came to its own end without an error."""
        return self.ended == "exit" and self.code == 0
