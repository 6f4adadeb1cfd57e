"""Memory and time of the loss head: log-probabilities and their gradients for a vocabulary of 152k."""

import sys
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.process import result
from benchmarks.timing import in_turns, ratio, told
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs

VOCABULARY, HIDDEN = 151_936, 256
FORMS = ("naive", "recomputed", "one pass")


def tensors(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, HIDDEN, device=device)).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=device)
    return hidden, weight, ids, torch.randn(tokens, device=device)


def gradients(form: str, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, slopes: torch.Tensor) -> None:
    hidden.grad = weight.grad = None
    if form == "naive":
        logprobs, _ = token_logprobs(hidden @ weight.T, ids, 1.0)
    else:
        given = (lambda _, part: slopes[part]) if form == "one pass" else None
        logprobs, _ = LMHead(weight, None)(hidden, ids, temperature=1.0, entropy=False, loss_gradient=given)
    logprobs.backward(slopes)


def products(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, slopes: torch.Tensor) -> None:
    """The three matrix products that no form can do without, in the pieces that keep the memory constant."""
    with torch.no_grad():
        size = (1 << 24) // len(weight)
        total = torch.zeros_like(weight)
        for start in range(0, len(hidden), size):
            part = hidden[start : start + size]
            logits = part @ weight.T
            logits @ weight
            total.addmm_(logits.T, part)


def peak(form: str, tokens: int, vocabulary: int) -> float:
    """Most memory above what inputs and gradients take, in MiB, in a process of its own."""
    return result("benchmarks.head", form, str(tokens), str(vocabulary))


def run(
    *,
    sizes: Sequence[int] = (512, 2048, 8192),
    timed: int = 2048,
    vocabulary: int = VOCABULARY,
    warmup: int = 1,
    steps: int = 5,
) -> dict:
    found: dict = {"memory": {}}
    print(f"head: MiB above inputs and gradients, V = {vocabulary}, H = {HIDDEN}", flush=True)
    for tokens in sizes:
        forms = [form for form in FORMS if form != "naive" or tokens <= 2048]
        found["memory"][str(tokens)] = {form: peak(form, tokens, vocabulary) for form in forms}
        print(f"  N = {tokens:5}  { ({k: round(v) for k, v in found['memory'][str(tokens)].items()}) }", flush=True)
    given = tensors(timed, vocabulary)
    actions = {form: (lambda form=form: gradients(form, *given)) for form in FORMS[1:]}
    seconds = in_turns({"products": lambda: products(*given), **actions}, warmup=warmup, steps=steps)
    found["seconds"] = {name: median(values) for name, values in seconds.items()}
    for form in FORMS[1:]:
        found[form] = ratio(seconds[form], seconds["products"])
        print(f"  {form}: {told(found[form])} times the three products, N = {timed}", flush=True)
    return found


def main(form: str, tokens: int, vocabulary: int) -> None:
    given = tensors(tokens, vocabulary)
    given[0].grad, given[1].grad = torch.ones_like(given[0]), torch.ones_like(given[1])  # what any form returns
    warm = [t[:8].detach().requires_grad_(t.dtype.is_floating_point) for t in (given[0], given[2], given[3])]
    small = given[1][:1000].detach().requires_grad_()
    gradients(form, warm[0], small, warm[1] % 1000, warm[2].detach())  # loads the libraries
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(form, *given)
        most = torch.cuda.max_memory_allocated()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak, see proc(5)
        before = status("VmRSS")
        gradients(form, *given)
        most = status("VmHWM")
    print((most - before) / 2**20)


def status(name: str) -> int:
    """Bytes that proc(5) tells of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
