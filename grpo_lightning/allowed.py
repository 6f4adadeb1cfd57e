"""What a value may be, said once: beside the part that takes it, for its own check and for that of the settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_lightning.output.shell import typed

LIVE = "grpo_lightning.composition.part"
"""Stands in settings for an object that a program has given to compose, by its name."""
REPLY_ROLES = ("user", "tool")
"""Who may reply to a model."""


@dataclass(frozen=True)
class Rule:
    """What a value must be: ``test`` accepts it, ``allowed`` says so in words."""

    test: Callable[[Any], bool]
    allowed: str
    null: bool = False

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with ``key=value``, and what is allowed instead; None if nothing is wrong."""
        if value is None and self.null:
            return None
        if value is not None and self.test(value):
            return None
        null = " or null" if self.null else ""
        return f"{key}={'null' if value is None else value}: allowed is {self.allowed}{null}"


def integer(low: int, high: int | None = None, *, null: bool = False) -> Rule:
    """A whole number, at least ``low`` and, unless it is None, at most ``high``."""
    return Rule(
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low and (high is None or v <= high),
        f"an integer >= {low}" if high is None else f"an integer from {low} to {high}",
        null,
    )


def number(test: Callable[[float], bool], allowed: str, *, null: bool = False) -> Rule:
    """A finite number that passes ``test``."""
    return Rule(
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and test(v), allowed, null
    )


def is_pair(value: Any) -> bool:
    """Whether a value is a list of two finite numbers."""
    is_finite = number(lambda _: True, "").test
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_finite, value))


def choice(*values: Any, null: bool = False) -> Rule:
    """One of ``values``."""
    return Rule(lambda v: v in values and not isinstance(v, bool), "one of " + ", ".join(map(str, values)), null)


def flag() -> Rule:
    """True or false."""
    return Rule(lambda v: isinstance(v, bool), "true or false")


def problems(rules: Mapping[str, Rule], values: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """What is wrong with ``values``, each named by its key behind ``prefix``."""
    reported = (rules[name].problem(f"{prefix}{name}", value) for name, value in values.items() if name in rules)
    return [problem for problem in reported if problem]


DATA = {
    "prompts_per_step": integer(1),
    "tries": integer(1),
    "steps": integer(0),
    "validate_every": integer(0, null=True),
    "validation_size": integer(1),
    "validation_batch_size": integer(1),
    "max_prompt_length": integer(1, null=True),
    "num_workers": integer(0),
}
"""Number of the data -> what it may be."""


def model_path() -> Rule:
    """A directory that exists, or what can be a name of the hub, see `local_or_hub`."""

    def is_found(value: Any) -> bool:
        if isinstance(value, Mapping):  # a text of a program
            return True
        try:
            return isinstance(value, str) and bool(value.startswith("pkg://") or local_or_hub(value, ""))
        except ValueError:
            return False

    return Rule(is_found, "text: a directory that exists, or NAME or ORG/NAME of the hub")


def local_or_hub(path: str, key: str) -> str:
    """``path`` with ``~`` as the home directory; one that can only be of this machine has to exist.

    A name of the hub is NAME or ORG/NAME. What begins with ``/``, ``.`` or ``~``, ends with a slash, has two slashes or
    more, or whose first part is a directory here, is a path: the hub is not asked for it.

    Args:
        path: A directory or a file, or a name of the hub.
        key: Of the setting, for the message.

    Raises:
        ValueError: There is no such path; names the nearest that there is.
    """
    expanded = Path(path).expanduser() if path.startswith("~") else Path(path)
    first = expanded.parts[0] if expanded.parts else ""
    is_local = path.startswith(("/", ".", "~", "\\")) or path.endswith("/") or path.count("/") > 1
    if not (is_local or ("/" in path and Path(first).is_dir())) or expanded.exists():
        return str(expanded) if path.startswith("~") else path
    there = [one.name for one in expanded.parent.iterdir()] if expanded.parent.is_dir() else []
    near = get_close_matches(expanded.name, there, n=1)
    hint = f" (there is {typed(key, expanded.parent / near[0])})" if near else ""
    raise ValueError(
        f"{key}={path!r}: no such file or directory{hint}; allowed is one that exists, or NAME or ORG/NAME of the hub"
    )


def turns_fault(messages: Sequence[Mapping[str, str]]) -> str | None:
    """Why chat messages are not turns of a model, each but the last with one reply; None where they are."""
    for number, message in enumerate(messages):
        allowed = REPLY_ROLES if number % 2 else ("assistant",)
        if message["role"] not in allowed:
            return f"message {number + 1} is the {message['role']}'s and should be the {' or '.join(allowed)}'s"
        if not number % 2 and not message["content"]:
            return f"message {number + 1} is empty"
    return None if len(messages) % 2 else "it does not end with a message of the assistant"
