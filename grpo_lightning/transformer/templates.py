"""Chat templates, which may be a stranger's: they call filters, tests and functions of jinja2's own alone."""

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import jinja2
from markupsafe import escape, soft_str
from transformers.utils import chat_template_utils

_TABLES = ("DEFAULT_FILTERS", "DEFAULT_TESTS", "DEFAULT_NAMESPACE")
"""What every template may call, by name; programs may put functions of their own into these."""
_ONE_AT_A_TIME = threading.RLock()
_OF_JINJA = ("jinja2.filters", "jinja2.tests", "jinja2.utils")
_COMPARED = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)
_OF_PYTHON = {id(one) for one in (abs, callable, dict, escape, len, range, soft_str, *_COMPARED)}
"""Functions in jinja2's tables that come from elsewhere; some things cannot be compared or looked up."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Messages as the chat template of a tokenizer writes them.

    Args:
        tokenizer: One of transformers', or an object with its method.
        messages: With "role" and "content".
        options: What the template is given beside them.
    """
    with _own_tables():
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text


@lru_cache
def _compiled(template: str) -> Any:
    """As transformers does; what a program has had compiled is kept apart, as it may call the program's functions."""
    return chat_template_utils._cached_compile_jinja_template(template)


@contextmanager
def _own_tables() -> Iterator[None]:
    """Inside, templates that are compiled find nothing that a program has registered with jinja2.

    Its sandbox, which transformers takes, asks neither of filters nor of tests whether they may be called.
    """
    tables = {name: getattr(jinja2.defaults, name) for name in _TABLES}
    with _ONE_AT_A_TIME, patch.object(chat_template_utils, "_compile_jinja_template", _compiled):
        try:
            for name, table in tables.items():
                setattr(jinja2.environment, name, {key: one for key, one in table.items() if _is_own(one)})
            yield
        finally:
            for name, table in tables.items():
                setattr(jinja2.environment, name, table)


def _is_own(function: Any) -> bool:
    return getattr(function, "__module__", None) in _OF_JINJA or id(function) in _OF_PYTHON
