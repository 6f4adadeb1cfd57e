"""The LM head: log-probabilities of the chosen tokens and entropies out of hidden states, a few tokens at a time.

The logits of all tokens together would be the largest tensor of a step by far: N * V. Here no more than a chunk of them
ever exists; the backward pass makes them again, or, where the gradient of the loss is known beforehand, the forward
pass makes the gradient at once.

Tensor cores multiply 16-bit numbers and add up in float32; by default the sums are then rounded to 16 bits, here they
are not. What is done number by number is compiled on a GPU, which else would read and write all logits several times.

Shapes: N tokens, of which n are in a chunk; H the size of a hidden state, V of the vocabulary; B rows of T completion
tokens where log-probabilities are numbered.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

from grpo_lightning.console import single_line
from grpo_lightning.types import OUTSIDE, Rollout, Sampled, SamplingSupport

log = logging.getLogger(__name__)

LossGradient = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities [n] of some tokens, their numbers [n] in a flattened [B, T]) -> the loss's gradient there, [n]."""
Chunk = tuple[Tensor, Tensor]
"""The numbers [n] of some tokens in a flattened [B, T], and the logits [n, V] that each is drawn from, in float32."""
ChunkGradient = Callable[[Tensor, slice], Tensor]
"""(log-probabilities [n] of the tokens in a slice of all N, the slice) -> the loss's gradient there, [n]."""

CHUNK = 1 << 24
"""The most logits that exist at a time: 64 MiB in float32."""
GPU_CHUNK = 1 << 28
"""The same on a GPU, 1 GiB: for every chunk weights and their gradient are read, which would take longer than products
with the 110 tokens that `CHUNK` allows at V = 152k."""
COMPILE_MIN_SIZE = 1 << 22
"""Numbers from which on compiling pays: it takes seconds, in which small tensors are done without it."""
MIN_LOGPROB = -1e4
"""A log-probability below which exp gives 0; a finite stand-in for -inf."""


def tokens_per_chunk(vocabulary: int, device: torch.device, chunk: int | None = None) -> int:
    """How many tokens have ``chunk`` logits together; by default `CHUNK` or `GPU_CHUNK`."""
    return max(1, (chunk or (GPU_CHUNK if device.type == "cuda" else CHUNK)) // vocabulary)


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    support: SamplingSupport | None = None,
) -> tuple[Tensor, Tensor]:
    """Log softmax(logits / temperature) at ``ids``, and the entropy; `LMHead` does the same in chunks.

    Args:
        logits: [..., V] of any float dtype; sums run in float32, of float64 in float64.
        ids: [...] the chosen tokens.
        temperature: What the logits are divided by, > 0.
        entropy_gradient: Whether the entropy passes a gradient, which holds more tensors of the logits' size.
        support: The sets [N] that the tokens were drawn from, N being all that ids have: what is outside has
            probability 0 and no gradient. None: the whole vocabulary.

    Returns:
        Log-probabilities [...] and entropies [...], in nats.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if support is not None:
        scaled = scaled.masked_fill(support.outside(scaled.shape[-1]).view_as(scaled), OUTSIDE)  # [N, V] -> [..., V]
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalizer  # [..., V] -> [..., 1] -> [...]
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        # A token that the model rules out has p z = 0 * -inf, which counts as 0.
        expected_logit = ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).nan_to_num(0.0).sum(-1)
        entropy = normalizer - expected_logit
    return logprobs, entropy


@dataclass(frozen=True)
class LMHead:
    """A matrix whose products with hidden states, divided by the temperature, are the logits."""

    weight: Tensor
    """[V, H]"""

    @classmethod
    def from_model(cls, model: Any) -> "LMHead | None":
        """The head of a transformers causal language model; None where the last layer is more than a matrix."""
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scales = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
        # Exactly this type: what inherits from it, such as a quantized layer, computes something else.
        is_matrix = (
            type(layer) is torch.nn.Linear and layer.bias is None and all(scale in (None, 1.0) for scale in scales)
        )
        return cls(layer.weight) if is_matrix else None

    def __call__(
        self,
        hidden: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        entropy: bool,
        loss_gradient: ChunkGradient | None = None,
        support: SamplingSupport | None = None,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies as `token_logprobs` gives them.

        Args:
            hidden: [N, H]
            ids: [N] the chosen tokens.
            temperature: What the logits are divided by, > 0.
            entropy: Whether the entropy is wanted; it passes a gradient.
            loss_gradient: What the gradient with respect to the log-probabilities is going to be. With it the logits
                are made once, not twice. If another gradient arrives after all, that is the one that counts.
            support: The sets [N] that the tokens were drawn from, as in `token_logprobs`.
            chunk: The most logits at a time, which decides the memory and no result; by default `CHUNK` or `GPU_CHUNK`.

        Returns:
            Log-probabilities [N] and entropies [N], float32, in nats; None in place of entropies that are not wanted.
        """
        size = tokens_per_chunk(len(self.weight), hidden.device, chunk)
        parts = [slice(start, start + size) for start in range(0, len(ids), size)]
        supports = [None] * len(parts) if support is None else support.split(size)
        early = loss_gradient if torch.is_grad_enabled() and not entropy else None
        chunks = list(zip(parts, supports, strict=True))
        results: tuple[Tensor, Tensor] = _Logprobs.apply(hidden, self.weight, ids, temperature, entropy, early, chunks)
        return results[0], results[1] if entropy else None

    @staticmethod
    def logits(hidden: Tensor, weight: Tensor, temperature: float, support: SamplingSupport | None = None) -> Tensor:
        """The logits [n, V] of hidden states [n, H], in float32; -inf outside of the sets [n]."""
        logits = linear(hidden, weight)
        if temperature != 1.0:
            logits = logits.mul_(1.0 / temperature)
        return logits if support is None else logits.masked_fill_(support.outside(logits.shape[-1]), -torch.inf)


class _Logprobs(torch.autograd.Function):
    """The chunks of `LMHead`, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        entropy: bool,
        loss_gradient: ChunkGradient | None,
        chunks: list[tuple[slice, SamplingSupport | None]],
    ) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else logprobs.new_empty(0)
        # With the gradient of each log-probability at hand, that of hidden states and weights is made while the logits
        # are there: three large products instead of four. At V = 152k that takes 0.62 of the time.
        early = loss_gradient is not None and any(ctx.needs_input_grad[:2])
        dlogprobs = torch.empty_like(logprobs) if early else None
        gradients = _Gradients(hidden, weight, temperature, ctx.needs_input_grad) if early else None
        for part, support in chunks:
            logits = LMHead.logits(hidden[part], weight, temperature, support)
            chosen = ids[part].unsqueeze(-1)  # [n] -> [n, 1]
            log_total = logsumexp(logits)  # [n, 1]
            logprobs[part] = (logits.gather(-1, chosen) - log_total).squeeze(-1)  # [n, V] -> [n, 1] -> [n]
            if entropy:
                entropies[part] = log_total.squeeze(-1) - expected_logit(logits, log_total)
            if loss_gradient is not None and dlogprobs is not None and gradients is not None:
                dlogprobs[part] = loss_gradient(logprobs[part], part)
                gradients.add(part, logits, log_total, chosen, dlogprobs[part], None)
            del logits  # else two chunks of them would exist while the next ones are made
        ctx.temperature, ctx.entropy, ctx.chunks = temperature, entropy, chunks
        ctx.gradients, ctx.dlogprobs = gradients, dlogprobs
        ctx.save_for_backward(hidden, weight, ids, entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, dentropies: Tensor) -> Any:
        hidden, weight, ids, entropies = ctx.saved_tensors
        gradients: _Gradients | None = ctx.gradients
        # The precomputed gradients hold if exactly the expected gradient arrives; any other takes the long way.
        if gradients is None or not torch.equal(dlogprobs, ctx.dlogprobs):
            gradients = _Gradients(hidden, weight, ctx.temperature, ctx.needs_input_grad)
            for part, support in ctx.chunks:
                logits = LMHead.logits(hidden[part], weight, ctx.temperature, support)
                slopes = (entropies[part], dentropies[part]) if ctx.entropy else None
                gradients.add(part, logits, logsumexp(logits), ids[part].unsqueeze(-1), dlogprobs[part], slopes)
                del logits  # before the next ones are made
        # Whoever received them may have changed them in place: another backward pass makes its own.
        ctx.gradients = None
        return gradients.hidden, gradients.weight, *[None] * 5


class _Gradients:
    """The gradients of hidden states and weight, summed over chunks; None where none is needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, needed: Any) -> None:
        self._inputs, self._temperature = (hidden, weight), temperature
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        # In float32 whatever the inputs are: a sum over chunks in 16 bits would be rounded once for each.
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None

    def add(
        self,
        part: slice,
        logits: Tensor,
        log_total: Tensor,
        chosen: Tensor,
        dlogprobs: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Add what n tokens contribute: logits [n, V], overwritten, log_total and chosen [n, 1], gradients [n]."""
        hidden, weight = self._inputs
        # d logprob / d z_j = [j chosen] - p_j,  d entropy / d z_j = -p_j (log p_j + entropy); a row's factor is
        # multiplied with its H numbers in the end, not with V, which are many more.
        factor = 1.0 / self._temperature
        factors = dlogprobs * -factor
        if entropy is None and should_compile(logits):
            dlogits = compile_function(_softmax_gradient)(logits, log_total, chosen, weight.dtype)
        elif entropy is None:
            dlogits = logits.sub_(log_total).exp_()
            dlogits.scatter_add_(-1, chosen, torch.full_like(log_total, -1.0))
        else:
            logp = logits.sub_(log_total).clamp_(min=MIN_LOGPROB)
            entropies, dentropies = (value.unsqueeze(-1) for value in entropy)  # [n] -> [n, 1]
            dlogits = (logp + entropies).mul_(dentropies).add_(dlogprobs.unsqueeze(-1)).neg_()
            dlogits.mul_(logp.exp_())
            dlogits.scatter_add_(-1, chosen, dlogprobs.unsqueeze(-1))
            factors = torch.full_like(dlogprobs, factor)
        dlogits, factors = dlogits.to(weight.dtype), factors.to(weight.dtype).unsqueeze(-1)  # [n, V], [n, 1]
        if self.hidden is not None:
            torch.mm(dlogits, weight, out=self.hidden[part])  # [n, V] [V, H] -> [n, H]
            self.hidden[part] *= factors
        if self.weight is not None:
            add_product(self.weight, dlogits.T, hidden[part] * factors)  # [n, V] -> [V, n], times [n, H] -> [V, H]


def _softmax_gradient(logits: Tensor, log_total: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of logits [n, V] less 1 for the chosen tokens [n, 1], in ``dtype``."""
    places = torch.arange(logits.shape[-1], device=logits.device)
    return ((logits - log_total).exp() - (places == chosen).to(logits.dtype)).to(dtype)


def logsumexp(logits: Tensor) -> Tensor:
    """The log-sum-exp [n, 1] of logits [n, V]."""
    return (compile_function(_logsumexp) if should_compile(logits) else _logsumexp)(logits)


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1, keepdim=True)


def expected_logit(logits: Tensor, log_total: Tensor) -> Tensor:
    """The mean [n] of the logits [n, V] under their own softmax."""
    logp = (logits - log_total).clamp_(min=MIN_LOGPROB)
    return dot(logp.exp(), logp) + log_total.squeeze(-1)


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, [..., V] and [..., V] -> [...], in their dtype under autocast, too."""
    with torch.autocast(one.device.type, enabled=False):  # which would round both, and the sums, to 16 bits
        sums: Tensor = torch.linalg.vecdot(one, other)
    return sums


@cache
def keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives products of 16-bit matrices in float32, tried once; a CPU does not (PyTorch 2.13)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    one = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        sums = torch.mm(one, one, out_dtype=torch.float32)
        torch.addmm(sums, one, one, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return True


def linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """The product of hidden states [n, H] and a weight [V, H], [n, V] in float32.

    Rounded to the dtype of the factors only where the device has no other product.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (factor.to(torch.get_autocast_dtype(kind)) for factor in (hidden, weight))
    with torch.autocast(kind, enabled=False):
        if keeps_sums(hidden.device, weight.dtype):
            sums: Tensor = torch.mm(hidden, weight.T, out_dtype=torch.float32)
            return sums
        return torch.nn.functional.linear(hidden, weight).float()


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add the product of ``one`` [m, n] and ``other`` [n, k] to ``total`` [m, k], which is float32, in place."""
    if one.dtype == torch.float32:
        total.addmm_(one, other)
    elif keeps_sums(one.device, one.dtype):
        with torch.autocast(one.device.type, enabled=False):
            torch.addmm(total, one, other, out_dtype=torch.float32, out=total)
    else:
        # addmm_ wants one dtype for all: the product is made in 16 bits, its sum over chunks in float32.
        total += one @ other


def should_compile(tensor: Tensor) -> bool:
    """Whether a tensor is so large that compiling pays: on a GPU, with `COMPILE_MIN_SIZE` numbers."""
    return tensor.device.type == "cuda" and tensor.numel() >= COMPILE_MIN_SIZE


def compile_function(
    function: Callable[..., Any], *, dynamic: bool | None = None, or_plain: bool = True
) -> Callable[..., Any]:
    """Compile a function with torch, once; its results are rounded as without compiling.

    Args:
        function: It looks at no value of a tensor.
        dynamic: Whether sizes may vary from the start; None: those that turn out to.
        or_plain: Whether to call it uncompiled, with a warning, where torch cannot compile (no C compiler).
    """
    made = _compile(function, dynamic)

    def call(*args: Any, **kwargs: Any) -> Any:
        if function in _NOT_COMPILED:
            return function(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # which nobody else needs

        with compile_options():
            try:
                return made(*args, **kwargs)
            except (TorchDynamoException, RuntimeError) as error:
                if not or_plain or not (isinstance(error, TorchDynamoException) or "C compiler" in str(error)):
                    raise
                log.warning("torch cannot compile here, which makes sampling slower: %s", single_line(str(error)[:300]))
                _NOT_COMPILED.add(function)
        return function(*args, **kwargs)

    return call


_NOT_COMPILED: set[Callable[..., Any]] = set()
"""Functions that torch cannot compile on this machine."""
_local = threading.local()


@contextmanager
def compile_options() -> Iterator[None]:
    """Context of these functions' options for torch.compile; entered once around many calls, it saves time."""
    if getattr(_local, "is_compiling", False):
        yield
        return
    # Under DDP torch cuts a graph where its gradients are exchanged, which these do not need, and older versions
    # cannot do in FlexAttention (pytorch#137481). The limit leaves room for several models, with and without
    # gradients. Sizes that are equal by chance, such as 2 key heads and 2 blocks, must not count as one.
    import torch._dynamo

    settings: Any = torch._dynamo.config
    shapes: Any = torch.fx.experimental._config
    with settings.patch(optimize_ddp=False, recompile_limit=64), shapes.patch(use_duck_shape=False):
        _local.is_compiling = True
        try:
            yield
        finally:
            _local.is_compiling = False


@cache
def _compile(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic, options={"emulate_precision_casts": True})


def unshared_logprobs(
    model: Any, rows: Sampled | Rollout, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """``Policy.logprobs_and_entropy`` by the own forward pass of any causal language model, with all logits at once."""
    length = rows.mask.shape[1]
    logits = model_logits(model, rows)
    used = logits.shape[1]
    start = rows.ids.shape[1] - length
    chosen = rows.ids[:, start : start + used]  # [B, used]
    logprobs, entropies = token_logprobs(
        logits,
        chosen,
        temperature,
        entropy_gradient=entropy,
        support=None if rows.support is None else rows.support.narrow(used).flat,
    )
    padding, masked = (0, length - used), ~rows.mask[:, :used]
    padded = torch.nn.functional.pad(logprobs.masked_fill(masked, 0.0), padding)  # [B, used] -> [B, T]
    return padded, torch.nn.functional.pad(entropies.masked_fill(masked, 0.0), padding) if entropy else None


def model_logits(model: Any, rows: Sampled | Rollout) -> Tensor:
    """The logits [B, used, V] that completion tokens are drawn from, by the model's own forward pass.

    ``used`` are the completion tokens of the longest row, at least 1.
    """
    # Columns that are padding in every row, or behind what is asked for, cost time and change nothing.
    start = rows.ids.shape[1] - rows.mask.shape[1]
    used = max(1, int(completion_ends(rows.mask).max()))
    first, last = int(rows.attention_mask.any(0).nonzero()[0]), start + used
    attention_mask = rows.attention_mask[:, first:last]  # [B, S + T] -> [B, W]
    # One logit more than there are tokens: each is predicted at the place before it.
    logits: Tensor = model(
        input_ids=rows.ids[:, first:last],
        attention_mask=attention_mask.long(),
        position_ids=(attention_mask.long().cumsum(-1) - 1).clamp(min=0),  # 0 on padding
        use_cache=False,
        logits_to_keep=used + 1,
    ).logits  # [B, used + 1, V]
    return logits[:, -used - 1 : -1]


@torch.no_grad()
def logits_in_chunks(logits: Tensor, rows: Sampled | Rollout, *, temperature: float) -> Iterator[Chunk]:
    """The logits of every token in the mask, a chunk at a time, out of those [B, t, V] of all t that any row has."""
    length = rows.mask.shape[1]
    tokens = rows.mask.flatten().nonzero().flatten()  # [B, T] -> [B * T] -> [C]
    for numbers in tokens.split(tokens_per_chunk(logits.shape[-1], logits.device)):
        yield numbers, logits[numbers // length, numbers % length].float() / temperature


def completion_ends(mask: Tensor) -> Tensor:
    """How many tokens [B] of every completion are read: those up to its last one in the mask [B, T]."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * places).amax(-1)  # [B, T] -> [B]
