"""The LM head: log-probabilities of the chosen tokens and entropies out of hidden states, a few tokens at a time.

The logits of all tokens together would be the largest tensor of a step by far: N * V. Here no more than a chunk of them
ever exists; the backward pass makes them again, or, where the gradient of the loss is known beforehand, the forward
pass makes the gradient at once.

Shapes: N tokens, of which n are in a chunk; H the size of a hidden state, V of the vocabulary; B rows of T completion
tokens where log-probabilities are numbered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.transformer.kernels import (
    MIN_LOGPROB,
    add_product,
    expected,
    linear,
    log_sum,
    softmax_gradient,
    worth_compiling,
)
from grpo_lightning.types import OUTSIDE, SamplingSupport

LossGradient = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities [n] of some tokens, their numbers [n] in a flattened [B, T]) -> the loss's gradient there, [n]."""
ChunkGradient = Callable[[Tensor, slice], Tensor]
"""(log-probabilities [n] of the tokens in a slice of all N, the slice) -> the loss's gradient there, [n]."""

CHUNK = 1 << 24
"""The most logits that exist at a time: 64 MiB in float32."""
GPU_CHUNK = 1 << 28
"""The same on a GPU, 1 GiB: for every chunk weights and their gradient are read, which would take longer than products
with the 110 tokens that `CHUNK` allows at V = 152k."""


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
        expected = ((scaled - normalizer.unsqueeze(-1)).exp() * scaled).nan_to_num(0.0).sum(-1)
        entropy = normalizer - expected
    return logprobs, entropy


@dataclass(frozen=True)
class LMHead:
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
    def of(cls, model: Any) -> "LMHead | None":
        """The head of a transformers causal language model; None where the last layer is more than a linear one."""
        layer = model.get_output_embeddings()
        # Exactly this type: what inherits from it, such as a quantized layer, computes something else.
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
        results: tuple[Tensor, Tensor] = _Logprobs.apply(
            hidden, self.weight, self.bias, ids, self, temperature, entropy, early, chunks
        )
        return results[0], results[1] if entropy else None

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        support: SamplingSupport | None = None,
    ) -> Tensor:
        """The logits [n, V] of hidden states [n, H], in float32; -inf outside of the sets [n]."""
        logits = self.scaled(linear(hidden, weight, bias), temperature)
        return logits if support is None else support.restrict_(logits)

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        """The logits that weight h + bias, which is overwritten, becomes by scale, soft-cap and temperature."""
        if self.softcap is not None:
            logits = logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)
        elif (factor := self.scale / temperature) != 1.0:
            logits = logits.mul_(factor)
        return logits


class _Logprobs(torch.autograd.Function):
    """The chunks of `LMHead`, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        head: LMHead,
        temperature: float,
        entropy: bool,
        loss_gradient: ChunkGradient | None,
        chunks: list[tuple[slice, SamplingSupport | None]],
    ) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else logprobs.new_empty(0)
        # With the gradient of each log-probability at hand, that of hidden states and weights is made while the logits
        # are there: three large products instead of four. At V = 152k that takes 0.62 of the time.
        early = loss_gradient is not None and any(ctx.needs_input_grad[:3])
        dlogprobs = torch.empty_like(logprobs) if early else None
        gradients = _Gradients(head, hidden, weight, bias, temperature, ctx.needs_input_grad) if early else None
        for part, support in chunks:
            logits = head.logits(hidden[part], weight, bias, temperature, support)
            chosen = ids[part].unsqueeze(-1)  # [n] -> [n, 1]
            log_total = log_sum(logits)  # [n, 1]
            logprobs[part] = (logits.gather(-1, chosen) - log_total).squeeze(-1)  # [n, V] -> [n, 1] -> [n]
            if entropy:
                entropies[part] = log_total.squeeze(-1) - expected(logits, log_total)
            if loss_gradient is not None and dlogprobs is not None and gradients is not None:
                dlogprobs[part] = loss_gradient(logprobs[part], part)
                gradients.add(part, logits, log_total, chosen, dlogprobs[part], None)
            del logits  # else two chunks of them would exist while the next ones are made
        ctx.head, ctx.temperature, ctx.entropy, ctx.chunks = head, temperature, entropy, chunks
        ctx.gradients, ctx.dlogprobs = gradients, dlogprobs
        ctx.save_for_backward(hidden, weight, bias, ids, entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor, dentropies: Tensor) -> Any:
        hidden, weight, bias, ids, entropies = ctx.saved_tensors
        gradients: _Gradients | None = ctx.gradients
        # The precomputed gradients hold if exactly the expected gradient arrives; any other takes the long way.
        if gradients is None or not torch.equal(dlogprobs, ctx.dlogprobs):
            gradients = _Gradients(ctx.head, hidden, weight, bias, ctx.temperature, ctx.needs_input_grad)
            for part, support in ctx.chunks:
                logits = ctx.head.logits(hidden[part], weight, bias, ctx.temperature, support)
                slopes = (entropies[part], dentropies[part]) if ctx.entropy else None
                gradients.add(part, logits, log_sum(logits), ids[part].unsqueeze(-1), dlogprobs[part], slopes)
                del logits  # before the next ones are made
        # Whoever received them may have changed them in place: another backward pass makes its own.
        ctx.gradients = None
        return gradients.hidden, gradients.weight, gradients.bias, *[None] * 6


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over chunks; None where none is needed."""

    def __init__(
        self,
        head: LMHead,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        needed: tuple[bool, ...],
    ) -> None:
        self._head, self._inputs, self._temperature = head, (hidden, weight), temperature
        # In float32 whatever the inputs are: a sum over chunks in 16 bits would be rounded once for each.
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None

    def add(
        self,
        part: slice,
        logits: Tensor,
        log_total: Tensor,
        chosen: Tensor,
        dlogprobs: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Add what the tokens in ``part`` contribute.

        Args:
            part: Which of the N tokens; n of them.
            logits: [n, V], overwritten.
            log_total: [n, 1] their log-sum-exp.
            chosen: [n, 1] token ids.
            dlogprobs: [n] the gradient with respect to their log-probabilities.
            entropy: [n] entropies and the gradient with respect to them; None: not wanted.
        """
        hidden, weight = self._inputs
        dlogits, factors = self._logit_gradients(logits, log_total, chosen, dlogprobs, entropy)
        if self.bias is not None:
            self.bias.addmv_(dlogits.T, factors)  # [n, V] -> [V, n], times [n] -> [V]
        dlogits, factors = dlogits.to(weight.dtype), factors.to(weight.dtype).unsqueeze(-1)  # [n, V], [n, 1]
        # Factors are multiplied with rows of H numbers, not of V, which are many more.
        if self.hidden is not None:
            torch.mm(dlogits, weight, out=self.hidden[part])  # [n, V] [V, H] -> [n, H]
            self.hidden[part] *= factors
        if self.weight is not None:
            add_product(self.weight, dlogits.T, hidden[part] * factors)  # [n, V] -> [V, n], times [n, H] -> [V, H]

    def _logit_gradients(
        self,
        logits: Tensor,
        log_total: Tensor,
        chosen: Tensor,
        dlogprobs: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The gradient with respect to weight h + bias, as [n, V] and what its rows are to be multiplied by, [n].

        d logprob / d z_j = [j chosen] - p_j,  d entropy / d z_j = -p_j (log p_j + entropy).

        It may overwrite ``logits``, and is float32, or of the weight's dtype where that costs nothing. A factor of a
        row costs nothing when it is multiplied with its hidden state.
        """
        head, factor = self._head, self._head.scale / self._temperature
        if entropy is None and head.softcap is None and head.bias is None and worth_compiling(logits):
            return softmax_gradient(logits, log_total, chosen, self._inputs[1].dtype), dlogprobs * -factor
        # Only the derivative of a soft-cap needs the logits that are about to be overwritten.
        copy = logits.clone() if head.softcap is not None else None
        if entropy is None:
            dlogits = logits.sub_(log_total).exp_()
            dlogits.scatter_add_(-1, chosen, torch.full_like(log_total, -1.0))
            factors = dlogprobs * -factor
        else:
            logp = logits.sub_(log_total).clamp_(min=MIN_LOGPROB)
            entropies, dentropies = (value.unsqueeze(-1) for value in entropy)  # [n] -> [n, 1]
            dlogits = (logp + entropies).mul_(dentropies).add_(dlogprobs.unsqueeze(-1)).neg_()
            dlogits.mul_(logp.exp_())
            dlogits.scatter_add_(-1, chosen, dlogprobs.unsqueeze(-1))
            factors = torch.full_like(dlogprobs, factor)
        if head.softcap is not None and copy is not None:
            # z = c tanh(x / c), so dz/dx = 1 - (z / c)^2, which needs no x: it was overwritten.
            # What is outside of a set is -inf, and 0 * inf is not 0: any number will do for it.
            dlogits.mul_(copy.mul_(self._temperature / head.softcap).clamp_(min=-2.0).square_().neg_().add_(1.0))
        return dlogits, factors
