"""Which of OmegaConf's resolvers settings may use: none that makes parts of a text, where rules do not see them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError

from grpo_lightning.output.shell import typed
from grpo_lightning.output.terminal import one_line
from grpo_lightning.settings import trust

_MAKING = ("oc.create", "oc.decode")
_KNOWN = ("hydra", "now", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select")
"""OmegaConf's and Hydra's, whatever others a program has registered, such as one that evaluates its argument."""
_OF_VARIABLE = re.compile(r"\$\{oc\.decode:\s*\$\{oc\.env:\w+\}\s*\}")


def resolver_problems(composed: Mapping[str, Any]) -> list[str]:
    """The texts that would be made into lists and mappings.

    Args:
        composed: All settings but Hydra's own, not resolved.
    """
    return [
        one_line(
            f"{key}={value}: makes parts of a text; allowed in ${{…}} are names of settings, oc.env, oc.select, "
            "oc.dict.keys, oc.dict.values, ${oc.decode:${oc.env:NAME}} and resolvers of your own"
        )
        for key, value in trust.values(composed)
        if isinstance(value, str) and "${" in value and any(_makes(call) for call in _calls(value))
    ]


def foreign_resolver_problems(file: str, said: Any, prefix: str = "") -> list[str]:
    """The texts of a file that call a resolver which is the program's own, and keys of which one could be made.

    ``oc.dict.values`` makes a text of each key of a mapping, and resolves it.

    Args:
        file: Its name, for messages.
        said: What stands in it, not resolved.
        prefix: The key of all that.
    """
    odd = [
        f"{one_line(file)}: {key[:80]!r}: allowed are keys without '$', ':', '{{' and '}}'" for key in _odd_keys(said)
    ]
    return odd + [
        f"{one_line(file)}: {typed(key, value)} calls a resolver that is none of OmegaConf's or Hydra's; allowed "
        f"there are {', '.join(_KNOWN)}, and others on the command line, to compose and in conf/"
        for key, value in trust.values(said, prefix)
        if isinstance(value, str) and "${" in value
        if any(call.resolverName().getText() not in _KNOWN for call in _calls(value))
    ]


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
