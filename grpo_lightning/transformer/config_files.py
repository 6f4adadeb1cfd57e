"""Configurations that strangers have written, such as config.json: values are read, and nothing that leads to code.

transformers makes an attribute of its configuration of every key, also of one that says how the others are read, and
any class or package may act upon an attribute later. So what is refused or left out is so in the JSON, before there is
an object that could say otherwise of itself.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from grpo_lightning.output.terminal import one_line
from grpo_lightning.transformer.directory import is_beside

_PROGRAM = re.compile(r".*\.(?:py[cdw]?|so|dylib|dll)\s*:.*", re.IGNORECASE | re.DOTALL)
"""A text that names something in a file of code, as FILE.py:NAME."""
ELSEWHERE = "speculators_config"
"""What leads vLLM to another model, which nobody has looked at."""
_LEFT_OUT = (
    *("auto_map", "custom_generate", "custom_pipelines", ELSEWHERE),
    *("distributed_config", "fusion_config"),
)
"""Keys of code, of other models and of what says who loads one: none is used, nor handed on by an export."""
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation\w*")
"""Keys of functions, left out where they name others than transformers': kernels of the hub or a program's own."""
_FUNCTIONS = (
    *("eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "sdpa"),
    *("batched_mm", "grouped_mm"),
)
_WEIGHTS = "transformers_weights"
_METHOD = "quant_method"
_QUANTIZED = (
    *(
        "awq",
        "bitnet",
        "bitsandbytes",
        "bitsandbytes_4bit",
        "bitsandbytes_8bit",
        "compressed-tensors",
        "eetq",
        "fbgemm_fp8",
    ),
    *("fp8", "gptq", "mxfp4", "mxfp8", "nvfp4"),
)
"""Kinds of quantized weights whose settings are values; packages of others make of them what they name (torchao)."""
_LABELS = "label2id"
"""The mapping whose keys may be any words."""
_VALUES = {
    *("model_type", "name_or_path", "num_labels", "output_attentions", "per_layer_config", "rope_scaling"),
    *("torch_dtype", "use_return_dict", "_attn_implementation", "_experts_implementation"),
}
"""Attributes of the class that a file may give a value."""


@contextmanager
def values_only(key: str) -> Iterator[list[str]]:
    """Inside, transformers reads only values from configurations, those of a model's parts included.

    Args:
        key: Of the setting that names the model, and its value, for messages.

    Yields:
        What was left out of config.json: names such as auto_map.

    Raises:
        ValueError: Where one is read that gives a value to what is no value, or names a file of code, which packages
            would run that transformers hands parts of it to, such as compressed-tensors.
    """
    left_out: list[str] = []
    read_config = vars(PreTrainedConfig)["get_config_dict"]
    make_generation = vars(GenerationConfig)["from_dict"]

    def read_values(cls: type[Any], /, *args: Any, **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        content, unused = read_config.__func__(cls, *args, **others)
        return _values(content, f"{key}: config.json", _names_of(PreTrainedConfig), left_out), unused

    def make_of_values(cls: type[Any], content: dict[str, Any], /, **others: Any) -> Any:
        names = _names_of(GenerationConfig)
        return make_generation.__func__(cls, _values(content, f"{key}: generation_config.json", names, []), **others)

    PreTrainedConfig.get_config_dict = classmethod(read_values)  # type: ignore[assignment,method-assign]
    GenerationConfig.from_dict = classmethod(make_of_values)  # type: ignore[assignment,method-assign]
    try:
        yield left_out
    finally:
        PreTrainedConfig.get_config_dict = read_config  # type: ignore[method-assign]
        GenerationConfig.from_dict = make_generation  # type: ignore[method-assign]


def remove_elsewhere(directory: Path) -> None:
    """Leave out of the config.json in a directory what would lead vLLM to another model."""
    file = directory / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.pop(ELSEWHERE, None) is not None:
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _names_of(kind: type[Any]) -> frozenset[str]:
    """The names of a class by which its objects are read, written and used; those of its fields are not among them."""
    own = {name for base in kind.__mro__ for name in vars(base)}
    has_values = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    return frozenset(own - has_values - _VALUES)


def _values(node: Any, where: str, refused: frozenset[str], left_out: list[str]) -> Any:
    """A node of JSON without what is left out."""
    if isinstance(node, list):
        return [_values(one, where, refused, left_out) for one in node]
    if isinstance(node, str) and _PROGRAM.fullmatch(node):
        raise ValueError(_told(where, f"names {node[:80]}, a file of code, which could run"))
    if not isinstance(node, dict):
        return node
    if node.get(_METHOD) is not None and node[_METHOD] not in _QUANTIZED:
        told = f"gives {_METHOD} the value {str(node[_METHOD])[:80]}, whose package makes what the settings name"
        raise ValueError(_told(where, f"{told} (values are those of {', '.join(_QUANTIZED)})"))
    content = {}
    for key, value in node.items():
        name = str(key)  # labels have numbers
        if name in _LEFT_OUT or (_IMPLEMENTATION.fullmatch(name) and not _is_known(value)):
            left_out.append(name)
            continue
        if name == _WEIGHTS and value is not None and not is_beside(value):
            raise ValueError(_told(where, f"names the weights {str(value)[:80]}, no file beside it"))
        if name in refused or (name.startswith("__") and name.endswith("__")):
            raise ValueError(_told(where, f"gives {name[:80]} a value, which decides how the rest is read"))
        content[key] = _values(value, where, frozenset() if name == _LABELS else refused, left_out)
    return content


def _is_known(function: Any) -> bool:
    """Whether a function, or all of those for the parts of a model, are transformers' own."""
    if isinstance(function, dict):
        return all(map(_is_known, function.values()))
    return function is None or (isinstance(function, str) and function in _FUNCTIONS)


def _told(where: str, what: str) -> str:
    return one_line(f"{where} {what}; allowed without trust_remote_code=true are values")
