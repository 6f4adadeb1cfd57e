"""The weights of a model of transformers, and whether all of them were read."""

from collections.abc import Mapping
from itertools import chain
from secrets import token_hex
from typing import Any

from transformers.utils.peft_utils import find_adapter_config_file

from grpo_lightning.transformer.strangers import lay_out

_Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""A weight's shape in the files, and its shape in the model."""


def with_weights(kind: Any, path: str, where: str, **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A model of transformers, with the adapter that lies beside its weights, and what is wrong with either.

    ``from_pretrained`` loads both, and then tells of the adapter alone: weights that are not there would be random.

    Args:
        kind: Such as ``AutoModelForCausalLM``.
        path: Hub name or directory.
        where: The setting that names it, for messages.
        options: Those of ``from_pretrained``.

    Returns:
        The model, and names as transformers' loading report has them: ``missing_keys`` and ``mismatched_keys`` with the
        shapes in the files and in the model.

    Raises:
        ValueError: As `lay_out`.
    """
    elsewhere = {"subfolder": token_hex(8)}  # where there is no adapter
    model, told = kind.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, adapter_kwargs=elsewhere, **options
    )
    lay_out(model, where)  # before an adapter computes with it
    reports = [told]
    if find_adapter_config_file(path) is not None:
        adapter = model.load_adapter(path, dtype=options.get("dtype"), ignore_mismatched_sizes=True)
        reports.append(adapter.to_dict())
        lay_out(model, where)
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
            "allowed are files with all weights of the model that their config.json describes"
        )
    others = {name: (tuple(stored), tuple(own)) for name, stored, own in report["mismatched_keys"]}
    if others := dict(sorted((others | _packed_otherwise(model)).items())):
        shapes = [f"{name} {stored} instead of {own}" for name, (stored, own) in others.items()]
        have = "has" if len(shapes) == 1 else "have"
        raise ValueError(
            f"{where}: {len(shapes)} of the model's weights {have} another shape there, "
            f"such as {', '.join(shapes[:3])}: allowed are weights of the model that their config.json describes"
        )


def _packed_otherwise(model: Any) -> dict[str, _Shapes]:
    """The shapes of quantized weights that differ between files and model, by name: transformers compares none."""
    differing: dict[str, _Shapes] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):  # bitsandbytes'
            state = getattr(module.weight, "quant_state", None)  # two 4-bit numbers are packed into one
            stored = tuple(module.weight.shape if state is None else state.shape)
            own = module.out_features, module.in_features
            if stored != own:
                differing[f"{name}.weight"] = stored, own
    return differing
