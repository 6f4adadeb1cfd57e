"""From hidden states to the log-probability of the chosen token and the entropy, a few tokens at a time.

The logits of all tokens together would be the largest tensor of a step by far: N * V. Here no more than a chunk of them
ever exists; the backward pass makes them again, or, where the gradient of the loss is known beforehand, the forward
pass makes the gradient at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ChunkSlope = Callable[[Tensor, slice], Tensor]
"""(log-probabilities [n] of the tokens in a slice of all N, the slice) -> the loss's gradient there, [n]."""

CHUNK = 1 << 24
"""Most logits that exist at a time: 64 MiB in float32. Larger chunks read the weights less often."""


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Sums of products over the last dimension, [..., V] and [..., V] -> [...], in their dtype under autocast, too."""
    kind = one.device.type
    if not torch.is_autocast_enabled(kind):
        found: Tensor = torch.linalg.vecdot(one, other)
        return found
    with torch.autocast(kind, enabled=False):  # which would round both, and the sums, to 16 bits
        return dot(one, other)


def token_logprobs(
    logits: Tensor, ids: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log softmax(logits / temperature) at ``ids``, and the entropy of the whole distribution.

    The plain form, with all logits at once.

    Args:
        logits: [..., V] of any float dtype; the sums run in float32.
        ids: [...] token chosen.
        temperature: Divides the logits, > 0.
        entropy_gradient: Whether the entropy passes a gradient, which holds more tensors of the logits' size.

    Returns:
        Log-probabilities [...] and entropies [...], float32, in nats.
    """
    scaled = logits.float() / temperature
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalizer
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        expected = ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).nan_to_num(0.0).sum(-1)
        entropy = normalizer - expected
    return logprobs, entropy


@dataclass(frozen=True)
class Head:
    """A linear layer whose outputs are scaled, bounded and divided by the temperature, as the model does it itself.

    z = scale * (weight h + bias); with a soft-cap c, z = c tanh(z / c) (Gemma 2, arXiv:2408.00118, section 2); the
    logits are z / temperature.
    """

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> "Head | None":
        """That of a transformers causal language model; None where the last layer is more than a linear one."""
        layer = model.get_output_embeddings()
        if type(layer) is not torch.nn.Linear:
            return None
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(layer.weight, layer.bias, float(scale), getattr(config, "final_logit_softcapping", None))

    def __call__(
        self,
        hidden: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        entropy: bool,
        slope: ChunkSlope | None = None,
        chunk: int = CHUNK,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies as `token_logprobs` gives them.

        Args:
            hidden: [N, H]
            ids: [N] token chosen.
            temperature: Divides the logits, > 0.
            entropy: Whether the entropy is wanted; it passes a gradient.
            slope: What the gradient with respect to the log-probabilities is going to be. With it the logits are made
                once, not twice. If another gradient arrives after all, that is the one that counts.
            chunk: Most logits at a time; memory, never results.

        Returns:
            [N] and [N], float32, in nats; None in place of an entropy that is not wanted.
        """
        size = max(1, chunk // len(self.weight))
        if not torch.is_grad_enabled():
            slope = None
        tensors = (hidden, self.weight, self.bias)
        made: tuple[Tensor, Tensor] = _Logprobs.apply(*tensors, ids, self, temperature, entropy, slope, size)
        return made[0], made[1] if entropy else None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
        """[n, V] in float32."""
        return self.scaled(torch.nn.functional.linear(hidden, weight, bias).float(), temperature)

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits from weight h + bias, which is overwritten."""
        if self.softcap is not None:
            logits = logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)
        elif (factor := self.scale / temperature) != 1.0:
            logits = logits.mul_(factor)
        return logits

    def inner(self, slopes: Tensor, logits: Tensor | None, temperature: float) -> Tensor:
        """The gradient with respect to scale (weight h + bias) from that with respect to the ``logits``.

        Overwrites both.
        """
        if self.softcap is not None and logits is not None:
            # z = c tanh(x / c): dz/dx = 1 - (z / c)^2
            capped = logits.mul_(temperature / self.softcap).square_().neg_().add_(1.0)
            slopes = slopes.mul_(capped)
        return slopes


class _Logprobs(torch.autograd.Function):
    """The chunks of `Head`, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        head: Head,
        temperature: float,
        entropy: bool,
        slope: ChunkSlope | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else logprobs.new_empty(0)
        early = slope is not None and not entropy and any(ctx.needs_input_grad[:3])
        slopes = torch.empty_like(logprobs) if early else None
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad) if early else None
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            logits = head.logits(hidden[part], weight, bias, temperature)
            chosen = ids[part].unsqueeze(-1)
            log_total = logits.logsumexp(-1, keepdim=True)
            logprobs[part] = (logits.gather(-1, chosen) - log_total).squeeze(-1)
            if entropy:
                entropies[part] = log_total.squeeze(-1) - _expected(logits, log_total)
            if slope is not None and slopes is not None and gradients is not None:
                slopes[part] = slope(logprobs[part], part)
                gradients.add(part, *_slopes(head, logits, log_total, chosen, slopes[part], None, temperature))
            del logits  # before the next ones are made
        ctx.head, ctx.temperature, ctx.size, ctx.entropy = head, temperature, size, entropy
        ctx.gradients, ctx.slopes = gradients, slopes
        ctx.save_for_backward(hidden, weight, bias, ids, entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor, entropy_slopes: Tensor) -> Any:
        hidden, weight, bias, ids, entropies = ctx.saved_tensors
        gradients: _Gradients | None = ctx.gradients
        if gradients is None or not torch.equal(slopes, ctx.slopes):
            gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
            for start in range(0, len(ids), ctx.size):
                part = slice(start, start + ctx.size)
                logits = ctx.head.logits(hidden[part], weight, bias, ctx.temperature)
                log_total = logits.logsumexp(-1, keepdim=True)
                also = (entropies[part], entropy_slopes[part]) if ctx.entropy else None
                chosen = ids[part].unsqueeze(-1)
                gradients.add(part, *_slopes(ctx.head, logits, log_total, chosen, slopes[part], also, ctx.temperature))
                del logits  # before the next ones are made
        ctx.gradients = None  # another backward pass would find them changed
        return gradients.hidden, gradients.weight, gradients.bias, *[None] * 6


class _Gradients:
    """Sums of the chunks' gradients; None where none is needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self._inputs = hidden, weight
        # In float32 whatever the inputs are: a sum over chunks in 16 bits would be rounded once for each.
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None

    def add(self, part: slice, slopes: Tensor, factors: Tensor) -> None:
        """Of logits whose gradient is ``factors`` [n] times ``slopes`` [n, V]."""
        hidden, weight = self._inputs
        if self.bias is not None:
            self.bias.addmv_(slopes.T, factors)
        slopes, factors = slopes.to(weight.dtype), factors.to(weight.dtype).unsqueeze(-1)
        if self.hidden is not None:
            torch.mm(slopes, weight, out=self.hidden[part])
            self.hidden[part] *= factors
        if self.weight is not None and weight.dtype == torch.float32:
            self.weight.addmm_(slopes.T, hidden[part] * factors)
        elif self.weight is not None:
            self.weight += slopes.T @ (hidden[part] * factors)


def _slopes(
    head: Head,
    logits: Tensor,
    log_total: Tensor,
    chosen: Tensor,
    slopes: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Gradient with respect to weight h + bias, as [n, V] and what its rows are to be multiplied by, [n].

    Made from those of log-probability and entropy; overwrites ``logits``. A factor of a row costs nothing when it is
    multiplied with its hidden state.

    d logprob / d z_j = [j chosen] - p_j,  d entropy / d z_j = -p_j (log p_j + entropy).
    """
    kept = logits.clone() if head.softcap is not None else None
    factor = head.scale / temperature
    if entropy is None:
        found = logits.sub_(log_total).exp_()
        found.scatter_add_(-1, chosen, torch.full_like(log_total, -1.0))
        return head.inner(found, kept, temperature), slopes * -factor
    logp = logits.sub_(log_total).clamp_(min=_LEAST)
    entropies, theirs = (value.unsqueeze(-1) for value in entropy)
    found = (logp + entropies).mul_(theirs).add_(slopes.unsqueeze(-1)).neg_()
    found.mul_(logp.exp_())
    found.scatter_add_(-1, chosen, slopes.unsqueeze(-1))
    return head.inner(found, kept, temperature), torch.full_like(slopes, factor)


_LEAST = -1e4
"""A log-probability below which exp gives 0; a finite stand-in for -inf."""


def _expected(logits: Tensor, log_total: Tensor) -> Tensor:
    """Mean of the logits under their own softmax, [n]."""
    logp = (logits - log_total).clamp_(min=_LEAST)
    return dot(logp.exp(), logp) + log_total.squeeze(-1)
