"""What becomes of settings that a command brings along, once all files and the command's own words are one."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.composition.brought_files import TRUSTED, is_plain_code, parameters, values_of
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings.trust import is_of_library
from grpo_lightning.settings.walk import at


def whole_problems(
    composed: Mapping[str, Any], brought: Mapping[str, Mapping[str, Any]], words: Sequence[str] = ()
) -> list[str]:
    """What settings that are brought along give to code for which they were not allowed to say it.

    Code of the user's is given nothing of theirs, and what they may say beside a plain function goes to such a one.

    Args:
        composed: All settings, not resolved.
        brought: Name of a file, or an override -> what it says, not resolved.
        words: The user's overrides; what these say is theirs alone.
    """
    given = {word.partition("=")[0].lstrip("+~") for word in words}
    found = {(source, *one) for source, said in brought.items() for one in _strays(composed, said, given)}
    return [
        f"{one_line(source)}: {one_line(key)} would be given to {one_line(target)}; allowed is this setting on the "
        f"command line, or {TRUSTED}=true there if you know what is brought along"
        for source, key, target in sorted(found)
    ]


def _strays(composed: Mapping[str, Any], said: Mapping[str, Any], given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Keys, and the code that would be given what is said there or below it."""
    values = dict(values_of({key: value for key, value in said.items() if key != "hydra"}))
    for key in (*values, *(str(key).lstrip("+") for key in parameters(said.get("hydra")))):
        *node, name = key.split(".")
        now = str(at(composed, [*node, "_target_"]))
        if name == "_target_" and is_plain_code(str(values.get(key))) and not is_plain_code(now):
            yield ".".join(node), now
        if not name.startswith("_") and key not in given:
            above = [at(composed, [*node[:count], "_target_"]) for count in range(1, len(node) + 1)]
            targets = [str(target) for target in above if target is not None and "$" not in str(target)]
            yield from ((key, target) for target in targets if not is_of_library(target))
