"""Files of strangers: what in a model's directory would run code is refused, in words that name the setting."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import dynamic_module_utils, generation
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_lightning.allowed import MODULES_OF_PEFT
from grpo_lightning.output.terminal import one_line, show_printable
from grpo_lightning.transformer.config_files import values_only
from grpo_lightning.transformer.directory import check_directory
from grpo_lightning.transformer.quantized import compare_inputs, layer_problem, state_problem
from grpo_lightning.transformer.registered import Registered, transformers_only
from grpo_lightning.transformer.tokenizer_files import tokenizers_only

_ADAPTERS = (
    *("LORA", "DELORA", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT"),
    "TRAINABLE_TOKENS",
)
"""Kinds of adapters that name no other model, tokenizer or file (as X-LoRA, Shadow, prompt tuning do)."""
_OF_THE_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


@contextmanager
def only_data(key: str, path: str, what: str, *, trusted: bool) -> Iterator[None]:
    """Inside, a model's files are read; what they would need code of their own for is an error of one sentence.

    Weights are dense tensors, read by ``torch.load(weights_only=True)``, whoever calls it, or from safetensors;
    templates are read in Jinja's sandbox.

    Args:
        key: Of the setting that names the files, such as ``policy.path``.
        path: Its value.
        what: The kind of model that has to be there, such as "a model".
        trusted: Whether code that comes with the weights may run.

    Raises:
        ValueError: There is none, the weights are parts that nobody has put together or a pickle of more than tensors,
            code comes with them, a configuration names code (`values_only`), or a package is absent.
    """
    where = f"{key}={path!r}"
    show_printable()
    check_directory(path, key)
    left_out: list[str] = []
    try:
        with (
            nullcontext() if trusted else transformers_only(key),
            tokenizers_only(),
            _no_questions(),
            _code_of(path, where) if trusted else values_only(where) as left_out,
        ):
            yield
    except Registered as error:
        raise ValueError(f"{where}: {error}") from error
    except UnpicklingError as error:
        raise ValueError(
            f"{where}: its weights are a pickle that holds more than tensors, and could run code when it is read; "
            "allowed are safetensors, and pickles of tensors"
        ) from error
    except ImportError as error:
        raise ValueError(f"{where}: a package is absent: {one_line(str(error).strip().splitlines()[0])}") from error
    except OSError as error:
        raise ValueError(
            f"{where}: neither a directory with {what} in Hugging Face format nor {what} that the hub can be asked "
            f"for from here: {error}"
        ) from error
    except ValueError as error:
        if str(error).startswith(key):
            raise
        told = "" if "trust_remote_code" in str(error) else ": " + one_line(str(error).strip().splitlines()[0])
        if told and "auto_map" not in left_out:
            raise ValueError(f"{where}: transformers cannot read {what} there{told}") from error
        raise ValueError(
            f"{where}: it comes with code of its own; allowed is {key.rpartition('.')[0]}.trust_remote_code=true, if "
            f"you have read that code; without it transformers cannot read {what} there{told}"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # of values that no model has
        told = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{where}: transformers cannot read {what} there: {told}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: its configuration is nested too deep") from error


@contextmanager
def _code_of(path: str, where: str) -> Iterator[list[str]]:
    """Inside, code that a model's files name comes from its own directory or the hub, and from nothing else here."""
    fetch = dynamic_module_utils.get_cached_module_file

    def checked(repository: Any, *args: Any, **others: Any) -> str:
        named, told = str(repository), f"{where}: trust_remote_code=true"
        _check_of_the_hub(named, told)
        is_own = path.startswith("pkg://") or os.path.realpath(named) == os.path.realpath(os.path.expanduser(path))
        if os.path.lexists(named) and not is_own:
            raise ValueError(
                f"{told}: its files name code in {one_line(named)[:200]}, which is here, and which you have not named; "
                "allowed is another working directory"
            )
        return fetch(repository, *args, **others)

    with (
        patch.object(dynamic_module_utils, "get_cached_module_file", checked),
        patch.object(generation.utils, "get_cached_module_file", checked),
    ):
        yield []


@contextmanager
def _no_questions() -> Iterator[None]:
    """Inside, transformers does not ask on the terminal whether code may run, as it does for some parts of models."""
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def lay_out(model: nn.Module, where: str) -> None:
    """Put the numbers of every weight in order in memory, as safetensors have them.

    A pickle of tensors may have them in another one. Kernels such as those of fused optimizers take a weight for one
    block of memory.

    Args:
        model: As read from files; its parameters and buffers are changed in place.
        where: The setting that names it, for the message.

    Raises:
        ValueError: A weight is no dense tensor, or what belongs to a quantized one does not fit it.
    """
    for name, layer in model.named_modules():
        compare_inputs(layer)
        if found := layer_problem(layer):
            raise ValueError(f"{where}: its quantized layer {one_line(name[:80])} {found}")
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.layout != torch.strided or weight.is_nested:
            kind = "nested" if weight.is_nested else str(weight.layout)
            raise ValueError(f"{where}: its weight {one_line(name[:80])} is {kind}; allowed are dense tensors")
        if found := state_problem(weight):
            raise ValueError(f"{where}: its quantized weight {one_line(name[:80])} {found}")
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()


def check_trust(value: object, key: str, path: str) -> None:
    """Refuse what only counts as true, such as the column of a data set, where code of a model may run.

    And code of a directory that is called as a model of the hub may be, which the user may have meant.

    Args:
        value: Whether code may run.
        key: Of the setting, for messages.
        path: Of the model.

    Raises:
        ValueError: ``value`` is neither True nor False, or it is True and ``path`` a directory without ./ before it.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key}={one_line(repr(value)[:80])}: allowed is true or false")
    if value:
        _check_of_the_hub(str(path), f"{key}=true")


def _check_of_the_hub(path: str, where: str) -> None:
    if _OF_THE_HUB.fullmatch(path) and os.path.lexists(path):  # transformers takes a file for a config.json
        kind = "directory" if os.path.isdir(path) else "file"
        raise ValueError(
            f"{where}: {path} is a {kind} here, whose code would run in place of that of the hub's {path}; allowed "
            f"is ./{path}, if you mean the {kind}, or another working directory"
        )


def check_attention(name: Any, key: str, *, trusted: bool) -> None:
    """Refuse an attention function that is a kernel of the hub, whose code would be downloaded and run.

    Args:
        name: Of the function, as transformers means it; a text with a slash names a kernel.
        key: Of the setting or file it stands in, for the message.
        trusted: Whether code that comes with the weights may run.

    Raises:
        ValueError: It is such a kernel, and code is not trusted; or it is no text.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{key}={one_line(str(name))}: allowed is a text, such as sdpa or eager")
    if "/" in str(name) and not trusted:
        raise ValueError(
            f"{key}={one_line(str(name))}: a kernel of the hub, whose code would run; allowed without "
            "trust_remote_code=true are sdpa, eager, flash_attention_2 and others that transformers or an installed "
            "package has"
        )


def check_adapter(adapter: Iterable[str], key: str) -> None:
    """Refuse arguments of an adapter that make peft import a module by its name.

    Args:
        adapter: The names of the arguments.
        key: Of the setting they stand in, for the message.

    Raises:
        ValueError: There are such arguments.
    """
    if named := sorted({*adapter} & {*MODULES_OF_PEFT}):
        raise ValueError(
            f"{key}.{named[0]}: would import a module, whose code would run; allowed are the other arguments of peft's "
            "LoraConfig"
        )


def check_adapter_files(path: str, key: str) -> None:
    """`check_adapter`, of the adapter that lies beside a model's weights; one as peft itself writes it is allowed.

    Args:
        path: Hub name or directory.
        key: Of the setting that names it, for the message.

    Raises:
        ValueError: Its adapter has such arguments, is of a kind that names others, or its settings are no mapping.
    """
    found = find_adapter_config_file(path)
    if found is None:
        return
    where = f"{key}={path!r}: adapter_config.json"
    written = Path(found).read_bytes()
    if not written.isascii():  # peft reads it in the user's encoding, whichever that is
        raise ValueError(f"{where}: allowed are ASCII characters alone, as peft writes it (\\u20ac)")
    content = json.loads(written)
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: allowed is a mapping")
    if (kind := content.get("peft_type")) not in _ADAPTERS:
        raise ValueError(
            f"{where}.peft_type={one_line(str(kind)[:80])}: others may name models or files in other places, which "
            f"nobody has looked at; allowed are {', '.join(_ADAPTERS)}"
        )
    usual = {"megatron_config": None, "megatron_core": "megatron.core"}  # what peft writes for every adapter
    check_adapter((name for name, value in content.items() if value is not None and value != usual.get(name)), where)
