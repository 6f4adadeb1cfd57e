"""A decoder of the Llama family written out for one token at a time, on a CPU in float32.

A step of sampling multiplies each weight with a few numbers only, so that it is limited by how often weights are read
and operators called, not by arithmetic. Weights are copied into the layout of oneDNN's small products, those that read
the same input side by side and with the norm before them folded in; the residual sum is part of the product before it.
The copy lives as long as a rollout is being made.

Shapes: b rows in the batch now; Hq query heads, Hkv key heads, D the size of a head, H that of a hidden state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.transformer.attention import Attention

_PARTS = {
    *("input_layernorm", "post_attention_layernorm", "self_attn", "mlp"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
}
_BATCH = 32
"""Rows for which oneDNN chooses the layout; any other number is allowed."""


class Packed:
    """A linear layer as oneDNN reads it.

    Args:
        weight: [out, in]
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The layer applied: [b, in] -> [b, out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer applied and ``other`` [b, out] added: [b, in] -> [b, out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return y


@dataclass(frozen=True)
class _Layer:
    qkv: Packed
    head_norm: tuple[Tensor, float] | None
    """What multiplies every query and key head after its norm, [Hq + Hkv, D], and the norm's epsilon."""
    out: Packed
    gate_up: Packed
    down: Packed
    activation: Callable[[Tensor], Tensor]
    epsilons: tuple[float, float]


class FlatDecoder:
    """One step of a decoder whose layers are built like Llama's.

    Args:
        decoder: The model without its head.

    Raises:
        TypeError: The decoder is not built so, or not in float32 on a CPU. Whether a decoder that is built so also
            computes so is for a trial to show.
    """

    def __init__(self, decoder: Any) -> None:
        if decoder.device.type != "cpu" or decoder.dtype != torch.float32:
            raise TypeError("float32 weights on a CPU only")
        if not torch.backends.mkldnn.is_available():
            raise TypeError("this build of torch lacks oneDNN")
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._layers = [_layer(layer) for layer in decoder.layers]
        attention = decoder.layers[0].self_attn
        self._width, self._scale = attention.head_dim, attention.scaling
        self._query_heads = attention.q_proj.out_features // self._width
        self._key_heads = attention.k_proj.out_features // self._width

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [b, H] of one more token [b] of each row, at its position [b]."""
        x: Tensor = self._embed(tokens)
        cos, sin = self._rotary(x, positions.unsqueeze(-1))  # [b, 1, D] each, for all heads
        half = self._width // 2
        # The halves of a head take each other's place by `roll`; the sign that one of them gets is put into the sine.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        rows, roped = len(x), self._query_heads + self._key_heads
        for number, layer in enumerate(self._layers):
            # [b, (Hq + 2 Hkv) * D] -> [b, Hq + 2 Hkv, D]
            qkv = layer.qkv(_normalized(x, layer.epsilons[0])).view(rows, -1, self._width)
            qk = qkv[:, :roped]  # [b, Hq + Hkv, D]
            if layer.head_norm is not None:
                qk = _normalized(qk, layer.head_norm[1]) * layer.head_norm[0]
            qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin).unsqueeze(2)  # [b, Hq + Hkv, 1, D]
            mixed = attention.attend(
                number, qk[:, : self._query_heads], qk[:, self._query_heads :], qkv[:, roped:].unsqueeze(2), self._scale
            )
            x = layer.out.plus(mixed.reshape(rows, -1), x)  # [b, 1, Hq, D] -> [b, Hq * D], and from there [b, H]
            h = _normalized(x, layer.epsilons[1])
            gate, up = layer.gate_up(h).chunk(2, -1)
            x = layer.down.plus(layer.activation(gate) * up, x)
        hidden: Tensor = self._norm(x)
        return hidden


def _normalized(x: Tensor, epsilon: float) -> Tensor:
    """``x`` divided by the root of its mean square over the last dimension."""
    # Three operations on few numbers: in place of torch's rms_norm they made a step of sampling 5 % shorter.
    squares: Tensor = torch.linalg.vecdot(x, x).mul_(1 / x.shape[-1]).add_(epsilon)
    return x * squares.rsqrt_().unsqueeze(-1)


def _layer(layer: Any) -> _Layer:
    """The weights of a decoder layer that is built like Llama's.

    Raises:
        TypeError: It has other parts or weights.
        AttributeError: It lacks some.
    """
    parts = dict(layer.named_modules())
    # Whatever else a layer has may take part in the computation, so it is not ignored.
    if unknown := parts.keys() - _PARTS - {""}:
        raise TypeError(f"{type(layer).__name__} has the parts {sorted(unknown)}")
    if extra := {name for name, _ in layer.named_parameters() if not name.endswith(("weight", "bias"))}:
        raise TypeError(f"{type(layer).__name__} has the weights {sorted(extra)}")
    attention, mlp = layer.self_attn, layer.mlp
    linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    # Exactly this type: an adapter or a quantized layer inherits from it and computes something else.
    if not all(type(part) is nn.Linear for part in linear):
        raise TypeError("a projection is not a plain linear layer")
    before, between = _scale(layer.input_layernorm), _scale(layer.post_attention_layernorm)
    head_norm = None
    if "self_attn.q_norm" in parts:
        repeats = [part.out_features // attention.head_dim for part in (attention.q_proj, attention.k_proj)]
        scales = [  # [D] -> [Hq, D] and [Hkv, D]
            _scale(norm).expand(n, -1) for norm, n in zip((attention.q_norm, attention.k_norm), repeats, strict=True)
        ]
        head_norm = torch.cat(scales), _epsilon(attention.q_norm)
    return _Layer(
        qkv=_together(linear[:3], before),
        head_norm=head_norm,
        out=Packed(attention.o_proj.weight, attention.o_proj.bias),
        gate_up=_together(linear[4:6], between),
        down=Packed(mlp.down_proj.weight, mlp.down_proj.bias),
        activation=torch.nn.functional.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn,
        epsilons=(_epsilon(layer.input_layernorm), _epsilon(layer.post_attention_layernorm)),
    )


def _together(layers: list[Any], scale: Tensor) -> Packed:
    """Linear layers side by side as one, behind a norm that multiplies by ``scale``."""
    # One product in place of two or three: with so few rows a step is also limited by the number of its operations.
    biases = [layer.bias for layer in layers]
    return Packed(
        torch.cat([layer.weight for layer in layers]) * scale, None if biases[0] is None else torch.cat(biases)
    )


def _epsilon(norm: Any) -> float:
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if value is None:
        raise TypeError(f"{type(norm).__name__} is not a known norm")
    return float(value)


def _scale(norm: Any) -> Tensor:
    """What a norm multiplies by: its output for a constant, which normalization leaves as it is."""
    # Asked of the norm rather than read from its weight, to which Gemma's adds 1.
    ones: Tensor = torch.ones_like(norm.weight)
    scale: Tensor = norm(ones) * (1.0 + _epsilon(norm)) ** 0.5
    return scale
