"""Rows of a matrix, some of them several times, with a gradient that adds up in the same order every time."""

from typing import Any

import torch
from torch import Tensor


def selected(hidden: Tensor, places: Tensor) -> Tensor:
    """The rows of ``hidden`` at ``places``, as ``hidden.index_select(0, places)``.

    On a GPU that one's backward pass adds up what belongs to the same row in the order in which threads get there, and
    so rounds differently each time. Here the second of equal places is added after the first, and so on.

    Args:
        hidden: [N, H]
        places: [C], on the CPU.

    Returns:
        [C, H]
    """
    if not adds_in_any_order(hidden.device):
        return hidden.index_select(0, places)
    rows: Tensor = _Selected.apply(hidden, places)
    return rows


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.size, ctx.places = len(hidden), places
        return hidden.index_select(0, places.to(hidden.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor, None]:
        gradient = rows.new_zeros(ctx.size, rows.shape[1])
        for numbers in turns(ctx.places):
            places = ctx.places[numbers].to(rows.device)
            gradient.index_add_(0, places, rows.index_select(0, numbers.to(rows.device)))
        return gradient, None


def adds_in_any_order(device: torch.device) -> bool:
    """Whether ``index_add_`` on a device adds up what belongs to the same row in an order that differs each time."""
    return device.type != "cpu"


def turns(places: Tensor) -> list[Tensor]:
    """The numbers of the places that come for the first time, of those that come for the second, and so on."""
    if not len(places):
        return []
    ordered, order = places.sort(stable=True)
    starts = torch.searchsorted(ordered, ordered)  # [C] where the run of equal places starts
    seen = torch.empty_like(order)
    seen[order] = torch.arange(len(places)) - starts
    return [(seen == turn).nonzero().flatten() for turn in range(int(seen.max()) + 1)]
