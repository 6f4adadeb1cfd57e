"""Chat templates, which may be a stranger's: they call filters, tests and functions of jinja2's own alone."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import jinja2
from markupsafe import escape, soft_str

_TABLES = ("DEFAULT_FILTERS", "DEFAULT_TESTS", "DEFAULT_NAMESPACE")
"""What every template may call, by name; programs may put functions of their own into these."""
_OF_JINJA = ("jinja2.filters", "jinja2.tests", "jinja2.utils")
_OF_PYTHON = (
    *(abs, callable, dict, escape, len, range, soft_str),
    *(operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne),
)
"""Functions in jinja2's tables that come from elsewhere."""


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


@contextmanager
def _own_tables() -> Iterator[None]:
    """Inside, templates that are compiled find nothing that a program has registered with jinja2.

    Its sandbox, which transformers takes, asks neither of filters nor of tests whether they may be called.
    """
    with ExitStack() as stack:
        for name in _TABLES:
            own = {key: one for key, one in getattr(jinja2.defaults, name).items() if _is_own(one)}
            stack.enter_context(patch.object(jinja2.environment, name, own))
        yield


def _is_own(function: Any) -> bool:
    return getattr(function, "__module__", None) in _OF_JINJA or any(function is one for one in _OF_PYTHON)
