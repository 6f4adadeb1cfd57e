"""What a chat template is given beside messages: a template may come with a stranger's model, and use what it gets."""

from collections.abc import Mapping, Sequence
from typing import Any


def template_arguments(system_prompt: str | None, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further arguments of a chat template, whose mappings and lists are plain ones.

    Those of settings' libraries have methods, which resolve texts and could make objects of them.

    Args:
        system_prompt: What messages begin with.
        template_kwargs: As a user gives them.

    Raises:
        ValueError: The system prompt is no text.
    """
    if not isinstance(system_prompt, str | None):
        raise ValueError(f"policy.system_prompt: a {type(system_prompt).__name__}; allowed are texts and null")
    return {str(name): _plain(value) for name, value in (template_kwargs or {}).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return value
