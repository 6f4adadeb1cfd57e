"""The loss head with its gradients beside the three matrix products that it cannot do without, in chunks."""

from statistics import median
from typing import Any

import torch

from benchmarks.gpu.progress import keep
from benchmarks.gpu.tools import device, half
from benchmarks.timing import in_turns, quartiles, ratio
from grpo_lightning.transformer.lm_head import LMHead

CHUNKS = (24, 25, 26, 27, 28)
"""Binary logarithms of the most logits at a time."""
DEFAULT = "default"
MOST = 1.5


def run(reduced: bool) -> dict[str, Any]:
    """Times of all sizes of chunks in turns, and the most memory of each.

    The products are those of 16-bit matrices of 2^28 logits at a time. The head is given float32 weights under
    autocast, as in training, and the gradient of the loss beforehand.
    """
    tokens, hidden, vocabulary = (64, 64, 2048) if reduced else (8192, 1536, 151_936)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device()).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, hidden, device=device())).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=device())
    slopes = torch.randn(tokens, device=device())

    def head(chunk: int | None) -> None:
        states.grad = weight.grad = None
        size = {} if chunk is None else {"chunk": chunk}
        with half():
            logprobs, _ = LMHead(weight, None)(
                states, ids, temperature=1.0, entropy=False, loss_gradient=lambda _, part: slopes[part], **size
            )
        logprobs.backward(slopes)

    rounded = [tensor.detach().to(torch.bfloat16) for tensor in (states, weight)]

    def products() -> None:
        size = max(1, (1 << 28) // vocabulary)
        total = torch.zeros_like(rounded[1])
        for start in range(0, tokens, size):
            part = rounded[0][start : start + size]
            logits = part @ rounded[1].T
            logits @ rounded[1]
            total.addmm_(logits.T, part)

    names: dict[str, int | None] = {DEFAULT: None} | {f"2^{power}": 1 << power for power in CHUNKS}
    actions: dict[str, Any] = {name: lambda chunk=chunk: head(chunk) for name, chunk in names.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    if device().type == "cuda":
        for name, action in actions.items():
            states.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            action()
            found[name]["bytes"] = torch.cuda.max_memory_allocated() - before
        keep(chunks=found)
    times = in_turns({"products": products, **actions}, warmup=1, steps=2 if reduced else 7)
    for name in names:
        found[name] |= ratio(times[name], times["products"]) | {"seconds": median(times[name])}
    low, high = quartiles(times["products"])[::2]
    main = ", ".join(f"{name}: {row['ratio']:.2f}" for name, row in found.items())
    return {
        "passed": reduced or found[DEFAULT]["ratio"] <= MOST,
        "main": f"times its products, {main}",
        "judged": not reduced,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "chunks": found,
        "products": {"seconds": median(times["products"]), "quartiles": [low, high]},
    }
