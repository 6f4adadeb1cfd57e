"""Which resolvers settings may use: none that makes parts of a text, which rules do not see, and none of others."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from omegaconf import grammar_parser
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import GrammarParseError

from grpo_lightning import start
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import trust

_MAKING = ("oc.create", "oc.decode")
_KNOWN = (
    *("hydra", "now", "oc.create", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.env"),
    *("oc.select", "python_version"),
)
_OF_VARIABLE = re.compile(r"\$\{oc\.decode:\s*\$\{oc\.env:\w+\}\s*\}")


def resolver_problems(composed: Mapping[str, Any]) -> list[str]:
    """The texts that would be made into lists and mappings, and the keys of which texts could be made.

    ``oc.dict.values`` makes a text of each key of a mapping, and resolves it.

    Args:
        composed: All settings but Hydra's own, not resolved.
    """
    odd = [one_line(f"{key[:200]}: allowed are keys without '$', ':', '{{' and '}}'") for key in _odd_keys(composed)]
    return odd + [
        one_line(
            f"{key}={value}: makes parts of a text; allowed in ${{…}} are names of settings, oc.env, oc.select, "
            "oc.dict.keys, oc.dict.values, ${oc.decode:${oc.env:NAME}} and resolvers of your own"
        )
        for key, value in trust.values(composed)
        if isinstance(value, str) and "${" in value and any(_makes(call) for call in _calls(value))
    ]


@contextmanager
def known_only() -> Iterator[None]:
    """Inside, OmegaConf calls its own resolvers and Hydra's, and none that a program has registered.

    One that evaluates its argument is usual, and strangers' settings have many ways to a text that is read twice.
    """
    known = {name: call for name, call in BaseContainer._resolvers.items() if name in _KNOWN}
    with patch.object(BaseContainer, "_resolvers", known):
        yield


class _Resolvers(dict[str, Any]):
    """All resolvers, of which settings that the command brings along find OmegaConf's own and Hydra's alone."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and (name in _KNOWN or not start.settings_from())


def keep_from_strangers() -> None:
    """For the rest of a command, have brought settings call no resolver that the user's own files register.

    They do so when they are imported, for a callback of Hydra's or for the first job of a sweep in this process.
    """
    BaseContainer._resolvers = _Resolvers(BaseContainer._resolvers)


def _odd_keys(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(key, str) and not set(key).isdisjoint("${}:"):
            yield key
        yield from _odd_keys(value)


def _makes(call: Any) -> bool:
    name = call.resolverName().getText()
    is_made_up = "$" in name or "oc.create" in name
    return is_made_up or (name in _MAKING and not _OF_VARIABLE.fullmatch(call.getText()))


def _calls(text: str) -> Iterator[Any]:
    """The resolvers that are called in a text, also in arguments of others."""
    try:
        nodes = [grammar_parser.parse(text)]
    except GrammarParseError:  # is told where it is resolved
        return
    while nodes:
        node = nodes.pop()
        if hasattr(node, "resolverName"):
            yield node
        nodes += getattr(node, "children", None) or ()
