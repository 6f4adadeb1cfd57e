"""Rows taken out of hidden states, some several times."""

import pytest
import torch

from grpo_lightning.transformer import logprobs as module
from grpo_lightning.transformer.logprobs import selected, turns


def test_turns_by_hand() -> None:
    # place 5 comes at 0, 2 and 5, place 7 at 3 and 4
    places = torch.tensor([5, 6, 5, 7, 7, 5])
    assert [numbers.tolist() for numbers in turns(places)] == [[0, 1, 3], [2, 4], [5]]
    assert turns(torch.tensor([], dtype=torch.long)) == []


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_rows_and_gradients_are_those_of_index_select_bit_for_bit(
    count: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "adds_in_any_order", lambda device: on_gpu)
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, requires_grad=True)
    places = torch.randint(9, (count,))
    slopes = torch.randn(count, 5)
    found, expected = selected(hidden, places), hidden.index_select(0, places)
    assert torch.equal(found, expected)
    assert torch.equal(
        *(torch.autograd.grad(rows, hidden, slopes, allow_unused=False)[0] for rows in (found, expected))
    )


def test_no_row_is_added_to_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    original = torch.Tensor.index_add_

    def recording(total: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        asked.append(index)
        return original(total, dim, index, rows)

    monkeypatch.setattr(torch.Tensor, "index_add_", recording)
    assert [module.adds_in_any_order(torch.device(kind)) for kind in ("cuda", "cpu")] == [True, False]
    monkeypatch.setattr(module, "adds_in_any_order", lambda device: True)
    hidden = torch.randn(4, 2, requires_grad=True)
    selected(hidden, torch.tensor([1, 1, 3, 1, 3])).sum().backward()
    assert [index.tolist() for index in asked] == [[1, 3], [1, 3], [1]]
