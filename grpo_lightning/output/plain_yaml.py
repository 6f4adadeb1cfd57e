"""YAML that may be a stranger's: what a program has registered for a tag, such as ``!env``, is not called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import yaml

_KINDS = (yaml.constructor.SafeConstructor, yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
_OWN = ("yaml.constructor", "omegaconf._utils")


@contextmanager
def standard_tags() -> Iterator[None]:
    """Inside, safe loaders of YAML, and those that are derived from them, know the standard's tags alone."""
    with ExitStack() as stack:
        for kind in _KINDS:
            for name in ("yaml_constructors", "yaml_multi_constructors"):
                known = {tag: call for tag, call in getattr(kind, name).items() if call.__module__ in _OWN}
                stack.enter_context(patch.object(kind, name, known))
        yield
