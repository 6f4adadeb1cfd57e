"""Memory and time of the LM head: log-probabilities and their gradients for a vocabulary of 152k."""

import sys
from argparse import Namespace
from statistics import median
from typing import Any

import torch

from benchmarks.measure import device, format_ratio, in_turns, peak_memory, ratio, start_memory
from benchmarks.process import result
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs

VOCABULARY, HIDDEN = 151_936, 256
FORMS = {"naive": "all logits at once", "recomputed": "chunks, recomputed", "one pass": "chunks, one pass"}


def run(options: Namespace) -> dict[str, Any]:
    """Most memory above inputs and gradients, each in a process of its own; times beside the three products."""
    sizes, timed, vocabulary = ([64], 64, 2048) if options.smoke else ([512, 2048, 8192], 2048, VOCABULARY)
    peaks = {
        form: [
            result("benchmarks.head", form, str(tokens), str(vocabulary)) if form != "naive" or tokens <= 2048 else None
            for tokens in sizes
        ]
        for form in FORMS
    }
    inputs = tensors(timed, vocabulary)
    actions: dict[str, Any] = {form: lambda form=form: gradients(form, *inputs) for form in ("recomputed", "one pass")}
    seconds = in_turns({"products": lambda: products(*inputs), **actions}, warmup=1, steps=1 if options.smoke else 5)
    figures: dict[str, Any] = {"seconds": {name: median(values) for name, values in seconds.items()}, "MiB": peaks}
    columns = " | ".join(f"N {n}, MiB" for n in sizes)
    print(f"| form | {columns} | time / three products, N {timed} (quartiles) |\n|---|---|{'---|' * len(sizes)}")
    for form, name in FORMS.items():
        cells = ["-" if peak is None else f"{peak:.0f}" for peak in peaks[form]]
        if form in actions:
            figures[form] = ratio(seconds[form], seconds["products"])
        cells.append(f"**{format_ratio(figures[form])}**" if form in figures else "-")
        print(f"| {' | '.join([name, *cells])} |", flush=True)
    return figures


def tensors(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the head's weight, token ids, and the loss's gradient by log-probability."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device=device(), requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, HIDDEN, device=device())).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=device())
    return hidden, weight, ids, torch.randn(tokens, device=device())


def gradients(form: str, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, slopes: torch.Tensor) -> None:
    """Forward and backward pass in one of the forms."""
    hidden.grad = weight.grad = None
    if form == "naive":
        logprobs, _ = token_logprobs(hidden @ weight.T, ids, 1.0)
    else:
        known = (lambda _, part: slopes[part]) if form == "one pass" else None
        logprobs, _ = LMHead(weight)(hidden, ids, temperature=1.0, entropy=False, loss_gradient=known)
    logprobs.backward(slopes)


def products(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, slopes: torch.Tensor, logits: int = 1 << 24
) -> None:
    """The three matrix products that no form can do without, in pieces of so many logits."""
    with torch.no_grad():
        size, total = max(1, logits // len(weight)), torch.zeros_like(weight)
        for start in range(0, len(hidden), size):
            part = hidden[start : start + size]
            logits_of_part = part @ weight.T
            logits_of_part @ weight
            total.addmm_(logits_of_part.T, part)


def main(form: str, tokens: int, vocabulary: int) -> None:
    inputs = tensors(tokens, vocabulary)
    inputs[0].grad, inputs[1].grad = torch.ones_like(inputs[0]), torch.ones_like(inputs[1])  # what any form returns
    gradients(form, *tensors(8, 1000))  # loads the libraries
    before = start_memory()
    gradients(form, *inputs)
    print((peak_memory() - before) / 2**20)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
