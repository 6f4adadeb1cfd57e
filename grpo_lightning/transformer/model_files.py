"""Reading the files of a Hugging Face model: errors in one sentence, and whether all weights were there."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_lightning.config.redaction import single_line


@contextmanager
def readable_errors(key: str, path: str, what: str) -> Iterator[None]:
    """Inside, what transformers raises while it reads a model becomes a ``ValueError`` of one sentence.

    Args:
        key: Of the setting that names the model, such as ``policy.path``.
        path: Its value.
        what: The kind of model that has to be there, such as "a model".

    Raises:
        ValueError: There is no such model, a file is missing or damaged, it needs code of its own or a package that is
            not installed, or the path is the directory of a run.
    """
    directory = Path(path).expanduser()
    if not (directory / "config.json").exists() and (directory / "export" / "config.json").exists():
        raise ValueError(
            f"{key}={path!r} is the directory of a run; use its export: {key}={os.path.join(path, 'export')}"
        )
    try:
        yield
    except RuntimeError:  # such as too little memory
        raise
    except Exception as error:
        raise ValueError(f"{key}={path!r}: {_reason(error, key, what, is_local=directory.is_dir())}") from error


def _reason(error: Exception, key: str, what: str, *, is_local: bool) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    told = single_line(first)
    if isinstance(error, ImportError):
        return f"a package is missing: {told}"
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that holds more than tensors, which could run code; use safetensors"
    if isinstance(error, SafetensorError):
        return f"a file of its weights is damaged or cut off ({told}); copy or download it again"
    if "trust_remote_code" in str(error):
        flag = f"{key.rpartition('.')[0]}.trust_remote_code=true"
        return f"it comes with code of its own, which runs only with {flag}; read that code first"
    if isinstance(error, OSError) and not is_local:
        told = single_line(" ".join(str(error).split()))
        return f"no directory with {what} in Hugging Face format, and the hub could not be asked for one: {told}"
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"transformers cannot read {what} there: {name}{told}"


def with_weights(kind: Any, path: str, **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A model of transformers, with the adapter that lies beside its weights, and what was not read of either.

    ``from_pretrained`` loads both, and then reports on the adapter alone: missing weights below it would be random.

    Args:
        kind: Such as ``AutoModelForCausalLM``.
        path: Hub name or directory.
        options: Those of ``from_pretrained``.

    Returns:
        The model, and names as transformers' loading report has them: ``missing_keys`` and ``mismatched_keys`` with the
        shapes in the files and in the model.
    """
    model, report = kind.from_pretrained(
        path,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        adapter_kwargs={"subfolder": "no-adapter-here"},
        **options,
    )
    reports = [report]
    if find_adapter_config_file(path) is not None:
        adapter = model.load_adapter(path, dtype=options.get("dtype"), ignore_mismatched_sizes=True)
        reports.append(adapter.to_dict())
    return model, {name: [*chain(*(one[name] for one in reports))] for name in ("missing_keys", "mismatched_keys")}


def check_whole(model: Any, report: Mapping[str, Any], where: str) -> None:
    """Check that all weights were read.

    Args:
        model: The model that was loaded.
        report: Of `with_weights`, in which tied weights and buffers that are not saved do not count as missing.
        where: The setting that names it, for messages.

    Raises:
        ValueError: Some weights are not in the files, or of another shape there; they would be random.
    """
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{where}: {len(missing)} of the model's weights are missing there, such as {', '.join(missing[:3])}: "
            "use files with all weights of the model that their config.json describes"
        )
    shapes = {name: (tuple(stored), tuple(own)) for name, stored, own in report["mismatched_keys"]}
    for name, module in model.named_modules():  # transformers does not compare those that bitsandbytes quantizes
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            state = getattr(module.weight, "quant_state", None)  # two 4-bit numbers are packed into one
            stored = tuple(module.weight.shape if state is None else state.shape)
            if stored != (own := (module.out_features, module.in_features)):
                shapes[f"{name}.weight"] = stored, own
    if shapes:
        listed = [f"{name} {stored} instead of {own}" for name, (stored, own) in sorted(shapes.items())]
        raise ValueError(
            f"{where}: {len(listed)} of the model's weights {'has' if len(listed) == 1 else 'have'} another shape "
            f"there, such as {', '.join(listed[:3])}: use weights of the model that their config.json describes"
        )
