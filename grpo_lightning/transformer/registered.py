"""What a program has registered with transformers: no model's files lead to it unasked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from transformers import conversion_mapping, monkey_patching
from transformers.activations import ACT2CLS, ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from grpo_lightning.output.terminal import one_line


def _tables() -> tuple[dict[str, Any], ...]:
    """Parts of models by the names that a config.json gives them, or that the classes have which they replace."""
    layers: dict[str, Any] = monkey_patching._monkey_patch_mapping_cache
    return ACT2CLS, ACT2FN, ROPE_INIT_FUNCTIONS, AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, layers


class Registered(ValueError):
    """Files lead to a class that a program has registered."""


@contextmanager
def transformers_only(key: str) -> Iterator[None]:
    """Inside, what a model's files name is a configuration, model or tokenizer of transformers' own.

    Others are the user's, and would be given what stands in files that may be a stranger's. Functions of the user's are
    no part of a model then.

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

    left_out = [(functions, _foreign(functions)) for functions in _tables()]
    mappings = (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping)
    with (
        patch.object(conversion_mapping, "_checkpoint_conversion_mapping_cache", None),  # is made anew, of its own
        patch.object(mappings[0], "__getitem__", checked(mappings[0].__getitem__)),
        patch.object(mappings[1], "__getitem__", checked(mappings[1].__getitem__)),
        patch.object(
            tokenization_auto, "tokenizer_class_from_name", checked(tokenization_auto.tokenizer_class_from_name)
        ),
    ):
        for functions, foreign in left_out:
            for name in foreign:
                del functions[name]
        try:
            yield
        finally:
            for functions, foreign in left_out:
                functions.update(foreign)


def _foreign(functions: dict[str, Any]) -> dict[str, Any]:
    """Those that neither transformers nor torch has."""
    made = {name: dict.__getitem__(functions, name) for name in functions}  # by itself ACT2FN makes objects of them
    homes = {
        name: str(getattr(one[0] if isinstance(one, tuple) else one, "__module__", "")) for name, one in made.items()
    }
    return {name: made[name] for name, home in homes.items() if home.partition(".")[0] not in ("torch", "transformers")}
