"""The state of an optimizer that a checkpoint holds: taken over only where it fits the weights.

Fused steps and those of 8-bit optimizers go through memory by the size of a weight, and look at no size of its state: a
smaller one in a stranger's checkpoint would have them read and write what lies behind it.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_FUSED = (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch's that have a fused step; AdamW is an Adam."""
_BLOCK = 256
"""Weights that share one ``absmax`` in bitsandbytes."""
_SIZES = {"qmap": 256, "gnorm_vec": 100}
_UNFIT = "the checkpoint's state of the optimizer does not fit the weights"
_ALLOWED = "allowed is a checkpoint of this policy"
_DOUBLE = "AdEMAMix"
"""The class of bitsandbytes whose first state holds two averages, one below the other."""


_NAME = re.compile(r"\w[\w.]*")
"""Of a weight, as sharded states have them, or of a part of its state."""


def check_when_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer refuse, from now on, state that does not fit its weights.

    What it has made of a checkpoint is looked at, not the checkpoint: how it finds the state of a weight there is its
    own affair. One of torch's or of bitsandbytes itself keeps its own switches, such as ``maximize``.

    Args:
        optimizer: One of torch's or of bitsandbytes; others look at sizes themselves, or are the user's own. Of all the
            groups say what the optimizer's own do, in numbers of their own, and no state is a text.

    Raises:
        ValueError: Later, by ``load_state_dict``; names what does not fit.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    home = type(optimizer).__module__
    is_known = isinstance(optimizer, _FUSED) or home.startswith("bitsandbytes.")
    is_librarys = home.startswith(("torch.optim", "bitsandbytes."))  # a switch of others may be a part of their state
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.register_load_state_dict_pre_hook(_check_groups)
        if is_librarys:
            optimizer.register_load_state_dict_pre_hook(_with_own_switches)
        if is_known:
            optimizer.register_load_state_dict_post_hook(_check)
        return
    load = optimizer.load_state_dict  # which may ask no hooks, as bitsandbytes' does not

    @functools.wraps(load)
    def checked(state_dict: dict[str, Any], *args: Any, **others: Any) -> None:
        _check_groups(optimizer, state_dict)
        load(_with_own_switches(optimizer, state_dict) if is_librarys else state_dict, *args, **others)
        if is_known:
            _check(optimizer)

    optimizer.load_state_dict = checked  # type: ignore[method-assign]


def _check_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse groups with texts and switches that are not the optimizer's: torch would put them in place of these.

    And texts among the states of weights, which an optimizer of the user's own may take for anything; their parts have
    names.
    """
    if any(isinstance(one, str | bytes) for one in _values({k: v for k, v in state.items() if k != "param_groups"})):
        raise ValueError(f"{_UNFIT}: it has texts; {_ALLOWED}")
    groups = state.get("param_groups", [])
    if not isinstance(groups, list):
        raise ValueError(f"{_UNFIT}: its groups are no list; {_ALLOWED}")
    for saved, own in zip(groups, optimizer.param_groups, strict=False):
        for key, value in saved.items() if isinstance(saved, Mapping) else ():
            listed = value if isinstance(value, list | tuple) else [value]
            is_numbers = all(isinstance(one, int | float | Tensor | None) for one in listed)
            is_switch = any(isinstance(one, bool) for one in listed)
            is_known = key in own and (is_numbers or own[key] == value)
            if key != "params" and not (is_known or (is_numbers and not is_switch)):
                raise ValueError(f"{_UNFIT}: {str(key)[:40]} of a group of weights is not the optimizer's; {_ALLOWED}")


def _with_own_switches(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state whose groups do not say how the optimizer computes: only one with other settings would differ in it."""
    groups, own = state.get("param_groups", []), optimizer.param_groups
    if len(groups) != len(own) or not all(isinstance(saved, dict) for saved in groups):
        return state  # which is refused
    return state | {"param_groups": [_switched(*pair) for pair in zip(groups, own, strict=True)]}


def _switched(saved: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group with the optimizer's own switches, of which some are None: torch's word for "as you like"."""
    switches = {
        key: own[key]
        for key, value in saved.items()
        if key in own and (isinstance(own[key], bool) or (own[key] is None and isinstance(value, bool)))
    }
    return saved | switches


def _values(node: Any) -> Iterator[Any]:
    """All values in nested mappings and lists, and keys that are neither numbers nor names."""
    parts = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple | set) else None
    for key in node if isinstance(node, Mapping) else ():
        if not (type(key) is int or (isinstance(key, str) and _NAME.fullmatch(key))):
            yield str(key)
    if parts is None:
        yield node
        return
    for part in parts:
        yield from _values(part)


def _check(optimizer: torch.optim.Optimizer) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    averages = 2 if any(kind.__name__ == _DOUBLE for kind in type(optimizer).__mro__) else 1
    for number, weight in enumerate(weights):
        parts: Any = optimizer.state.get(weight, {})
        if not isinstance(parts, Mapping):
            raise ValueError(f"{_UNFIT}: that of the {number}th is no mapping; {_ALLOWED}")
        for name, value in parts.items():
            if isinstance(value, Tensor) and not _fits(str(name), value, weight, parts, averages):
                raise ValueError(
                    f"{_UNFIT}: {str(name)[:40]} of the {number}th, {tuple(weight.shape)}, is {value.dtype} of "
                    f"{tuple(value.shape)}; {_ALLOWED}"
                )


def _fits(name: str, value: Tensor, weight: Tensor, parts: Mapping[Any, Any], averages: int) -> bool:
    value, weight = _own_part(value), _own_part(weight)
    if value.layout != torch.strided or value.is_quantized or value.is_meta or not value.is_contiguous():
        return False
    kind, held = name.rstrip("12"), averages if name.endswith("1") else 1
    if kind == "state":
        first = parts.get("state1")
        is_known = value.dtype in (torch.uint8, torch.float32) and isinstance(first, Tensor)
        shape = weight.shape if held == 1 else (held, *weight.shape)
        return is_known and value.shape == shape and value.dtype == first.dtype  # type: ignore[union-attr]
    if kind == "absmax":
        return value.dtype == torch.float32 and value.numel() >= held * -(-weight.numel() // _BLOCK)
    if kind == "step":
        return value.numel() == 1
    if kind in ("max", "new_max", "unorm_vec"):
        return value.dtype == torch.float32 and value.numel() == 1
    if kind in _SIZES:
        return value.dtype == torch.float32 and value.numel() == _SIZES[kind]
    return value.shape == weight.shape


def _own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that is shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
