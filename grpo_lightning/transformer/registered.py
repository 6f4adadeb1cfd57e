"""Classes that a program has registered with transformers: no model's files lead to them unasked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto

from grpo_lightning.output.terminal import one_line


class Registered(ValueError):
    """Files lead to a class that a program has registered."""


@contextmanager
def transformers_only(key: str) -> Iterator[None]:
    """Inside, what a model's files name is a configuration, model or tokenizer of transformers' own.

    Others are the user's, and would be given what stands in files that may be a stranger's.

    Args:
        key: Of the setting that names the files, for messages.

    Raises:
        Registered: They lead to another.
    """
    allowed = f"allowed is {key.rpartition('.')[0]}.trust_remote_code=true if you know these files"

    def checked(look: Callable[..., Any]) -> Callable[..., Any]:
        def found(*names: Any) -> Any:
            kinds = look(*names)
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                home = str(getattr(kind, "__module__", None) or "transformers")
                if home.partition(".")[0] != "transformers":
                    told = one_line(f"{getattr(kind, '__name__', kind)} of {home}")
                    raise Registered(f"{told} is no class of transformers' own; {allowed}")
            return kinds

        return found

    mappings = (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping)
    with (
        patch.object(mappings[0], "__getitem__", checked(mappings[0].__getitem__)),
        patch.object(mappings[1], "__getitem__", checked(mappings[1].__getitem__)),
        patch.object(
            tokenization_auto, "tokenizer_class_from_name", checked(tokenization_auto.tokenizer_class_from_name)
        ),
    ):
        yield
