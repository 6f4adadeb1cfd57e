"""Products that keep float32 sums, with the operators that PyTorch has on GPUs only put in their place on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_lightning.transformer import kernels
from grpo_lightning.transformer.lm_head import LMHead

HALF = torch.bfloat16
CPU = torch.device("cpu")


def sums(one: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
    assert one.dtype == other.dtype in (torch.bfloat16, torch.float16)
    assert out_dtype == torch.float32
    return one.float() @ other.float()


def add_sums(
    total: Tensor, one: Tensor, other: Tensor, out_dtype: torch.dtype, *, beta: float, alpha: float, out: Tensor
) -> Tensor:
    assert total.dtype == out.dtype == torch.float32
    assert beta == alpha == 1
    return out.copy_(total + sums(one, other, out_dtype))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """PyTorch's own operators, called with the very arguments that they get on a GPU; the names of those called."""
    called: list[str] = []

    def first(*given: Any, **named: Any) -> Tensor:
        called.append("mm")
        return sums(*given, **named)

    def second(*given: Any, beta: float = 1, alpha: float = 1, **named: Any) -> Tensor:
        called.append("addmm")
        return add_sums(*given, beta=beta, alpha=alpha, **named)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", first, "CPU")
    library.impl("addmm.dtype_out", second, "CPU")
    monkeypatch.setattr(kernels, "keeps_sums", lambda device, dtype: dtype == HALF)
    yield called
    library._destroy()


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(9, 32), torch.randn(50, 32) * 0.3, torch.randn(50)
    return hidden, weight, bias, torch.randint(50, (9,)), torch.randn(9)


def found(autocast: bool, *, chunk: int) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities and the gradients of hidden states, weight and bias."""
    hidden, weight, bias, ids, slopes = case()
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        logprobs, _ = LMHead(weight, bias)(hidden, ids, temperature=0.8, entropy=False, chunk=chunk)
        gradients = torch.autograd.grad(logprobs, leaves, slopes)
    return logprobs, list(gradients)


def exact() -> tuple[Tensor, list[Tensor]]:
    """The same in float64, of the numbers that autocast rounds hidden states, weight and bias to."""
    hidden, weight, bias, ids, slopes = case()
    leaves = [each.to(HALF).double().requires_grad_() for each in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*leaves) / 0.8
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return logprobs, list(torch.autograd.grad(logprobs, leaves, slopes.double()))


@pytest.mark.parametrize("chunk", [2 * 50, 10_000], ids=["two tokens", "all"])
def test_logits_are_not_rounded_and_gradients_add_up_in_float32(on_gpu: list[str], chunk: int) -> None:
    logprobs, gradients = found(True, chunk=chunk)
    expected, right = exact()
    assert set(on_gpu) == {"mm", "addmm"}
    # On a CPU, where logits are rounded to 8 bits, log-probabilities are off by up to 0.01.
    assert_close(logprobs.double(), expected, rtol=0, atol=2e-6)
    for one, other in zip(gradients, right, strict=True):
        assert one.dtype == torch.float32
        assert_close(one.double(), other, rtol=0.01, atol=0.01 * float(other.abs().max()))


def test_in_float32_nothing_is_asked_of_them(on_gpu: list[str]) -> None:
    logprobs, _ = found(False, chunk=100)
    hidden, weight, bias, ids, _ = case()
    expected = (torch.nn.functional.linear(hidden, weight, bias) / 0.8).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert on_gpu == []
    assert_close(logprobs, expected, rtol=0, atol=2e-6)


def test_a_linear_layer_under_autocast_rounds_its_factors_and_not_its_sums(on_gpu: list[str]) -> None:
    hidden, weight, bias, _, _ = case()
    with torch.autocast("cpu", dtype=HALF):
        found = kernels.linear(hidden, weight, bias)
    rounded = [each.to(HALF).double() for each in (hidden, weight, bias)]
    assert_close(found.double(), torch.nn.functional.linear(*rounded), rtol=0, atol=2e-6)


def test_sums_over_chunks_do_not_round_each() -> None:
    # 1 + 2^-10 needs 11 bits, of which bfloat16 has 8
    total = torch.ones(1, 1)
    kernels.add_product(total, torch.tensor([[2.0**-5]], dtype=HALF), torch.tensor([[2.0**-5]], dtype=HALF))
    assert total.item() == 1 + 2.0**-10
    kernels.add_product(total, torch.tensor([[3.0]]), torch.tensor([[1 / 4]]))
    assert total.item() == 1.75 + 2.0**-10


def test_a_device_is_tried_before_it_is_relied_on(on_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._adds_up(CPU, HALF)
    monkeypatch.setattr(kernels, "_sums", lambda one, other: (one @ other).float())  # rounded
    assert not kernels._adds_up(CPU, HALF)
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "_add_sums", lambda total, one, other: total.copy_(kernels._sums(one, other)))
    assert not kernels._adds_up(CPU, HALF)


def test_a_cpu_has_none() -> None:
    assert not kernels.keeps_sums(CPU, HALF)
    assert not kernels.keeps_sums(torch.device("cuda"), torch.float32)
    with pytest.raises(NotImplementedError):
        kernels._adds_up(CPU, HALF)
