"""A decoder of the Llama family written out for one token at a time.

A step of sampling multiplies each weight with a few numbers only, so that it is limited by how often weights are read
and operators called, not by arithmetic. Weights are copied in the dtype of the products, an adapter merged into them,
and those that read the same input side by side; in float32 the norm before them is folded in and the residual sum is
part of the product before it. In 16 bits everything is rounded where training under autocast rounds it. The copy lives
as long as a rollout is being made.

Shapes: b rows in the batch now; Hq query heads, Hkv key heads, D the size of a head, H that of a hidden state.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.attention import Attention
from grpo_lightning.transformer.lm_head import dot

_ONEDNN_ROWS = 32
"""Rows for which oneDNN chooses the layout of weights; any other number is allowed."""


class Linear:
    """A linear layer that takes and gives its own dtype.

    Args:
        weight: [out, in]
        bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """The layer applied: [b, in] -> [b, out]."""
        return nn.functional.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer applied and ``other`` [b, out] added, in the dtype of ``other``: [b, in] -> [b, out]."""
        return other + self(x)


class PackedLinear(Linear):
    """A linear layer in float32 or bfloat16 on a CPU as oneDNN reads it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_ROWS), bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if other.dtype != x.dtype:
            return other + self(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return y


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN computes matrix products of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16)


def _linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """A layer that computes in ``dtype``, in the form that is fastest on the weight's device."""
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    return PackedLinear(weight, bias) if has_onednn(weight.device, dtype) else Linear(weight, bias)


def linear_weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of a linear layer, with a LoRA adapter merged.

    Raises:
        TypeError: It is another layer: what inherits from a linear one, such as a quantized layer, computes something
            else; or its adapter is more than a product of two matrices.
    """
    if type(layer) is nn.Linear:
        return layer.weight, layer.bias
    peft = sys.modules.get("peft")  # whoever made an adapter has imported it, which takes seconds
    if peft is None or type(layer) is not peft.tuners.lora.Linear:
        raise TypeError(f"{type(layer).__name__} is not a plain linear layer")
    weight, bias = linear_weight(layer.base_layer)
    if layer.disable_adapters or layer.merged:
        return weight, bias
    if layer.lora_variant or any(getattr(part, "bias", None) is not None for part in layer.lora_B.values()):
        raise TypeError("an adapter that is more than a product of two matrices")
    for name in layer.active_adapters:
        weight = weight + layer.get_delta_weight(name).to(weight.dtype)
    return weight, bias


_PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
_PARTS = {
    *("", "input_layernorm", "post_attention_layernorm", "self_attn", "self_attn.q_norm", "self_attn.k_norm"),
    *("mlp", "mlp.act_fn", *_PROJECTIONS),
}


class _Layer:
    """The weights of a decoder layer that is built like Llama's; raises as `FusedDecodeStep`."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        # What lies inside a projection, such as an adapter, is for `linear_weight` to judge.
        inside = tuple(f"{name}." for name in _PROJECTIONS)
        parts = {name for name, _ in layer.named_modules() if not name.startswith(inside)}
        weights = [name for name, _ in layer.named_parameters() if not name.startswith(inside)]
        # Whatever else a layer has may take part in the computation, so it is not ignored.
        if unknown := (parts - _PARTS) | {name for name in weights if not name.endswith(("weight", "bias"))}:
            raise TypeError(f"{type(layer).__name__} has the parts {sorted(unknown)}")
        attention, activation = layer.self_attn, layer.mlp.act_fn
        q, k, v, out, gate, up, down = (layer.get_submodule(name) for name in _PROJECTIONS)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        scales = _scale(norms[0]), _scale(norms[1])
        folded = scales if dtype == torch.float32 else (None, None)
        self.dtype = dtype  # Of the products
        self.epsilons = _epsilon(norms[0]), _epsilon(norms[1])
        self.scales = None if dtype == torch.float32 else scales
        """What multiplies the outputs of the two norms, [H] each; None where the weights behind them have it."""
        self.roped = (q.out_features + k.out_features) // attention.head_dim  # Heads that are rotated, Hq + Hkv
        self.head_norm: tuple[Tensor, float] | None = None
        """What multiplies every query and key head after its norm, [Hq + Hkv, D], and the norm's epsilon."""
        if "self_attn.q_norm" in parts:
            head_scales = [  # [D] -> [Hq, D] and [Hkv, D]
                _scale(norm).expand(part.out_features // attention.head_dim, -1)
                for norm, part in ((attention.q_norm, q), (attention.k_norm, k))
            ]
            self.head_norm = torch.cat(head_scales), _epsilon(attention.q_norm)
        self.qkv = _side_by_side([q, k, v], folded[0], dtype)
        self.out = _linear(*linear_weight(out), dtype)
        self.gate_up = _side_by_side([gate, up], folded[1], dtype)
        self.down = _linear(*linear_weight(down), dtype)
        self.activation = nn.functional.silu if isinstance(activation, nn.SiLU) else activation


class FusedDecodeStep:
    """One step of a decoder whose layers are built like Llama's.

    Args:
        decoder: The model without its head.
        dtype: Of the products.

    Raises:
        TypeError: The decoder is not built so. Whether a decoder that is built so also computes so is for a trial to
            show.
        AttributeError: It lacks a part.
    """

    def __init__(self, decoder: Any, dtype: torch.dtype) -> None:
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self._qkv, self._mlp = _qkv, _mlp
        if lm_head.should_compile(decoder.embed_tokens.weight):
            self._qkv, self._mlp = lm_head.compile_function(_qkv), lm_head.compile_function(_mlp)
        attention = decoder.layers[0].self_attn
        self._width, self._scale = attention.head_dim, attention.scaling
        self._query_heads = attention.q_proj.out_features // self._width

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [b, H] of one more token [b] of each row, at its position [b]."""
        x: Tensor = self._embed(tokens)
        cos, sin = self._rotary(x, positions.unsqueeze(-1))  # [b, 1, D] each, for all heads
        half = self._width // 2
        # The halves of a head take each other's place by `roll`; the sign that one of them gets is put into the sine.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for number, layer in enumerate(self._layers):
            qk, value = self._qkv(x, layer, cos, sin)
            query, key = qk[:, : self._query_heads], qk[:, self._query_heads :]
            mixed = attention.attend(number, query, key, value, self._scale)
            x = self._mlp(mixed.flatten(1), x, layer)  # [b, 1, Hq, D] -> [b, Hq * D]
        hidden: Tensor = self._norm(x)
        return hidden


def _qkv(x: Tensor, layer: _Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer does before its attention: queries and keys [b, Hq + Hkv, 1, D], and values [b, Hkv, 1, D]."""
    width = cos.shape[-1]
    # [b, (Hq + 2 Hkv) * D] -> [b, Hq + 2 Hkv, D]
    qkv = layer.qkv(_scale_input(x, layer, 0)).unflatten(-1, (-1, width))
    qk = qkv[:, : layer.roped]  # [b, Hq + Hkv, D]
    if layer.head_norm is not None:
        qk = _rms_normalize(qk.float(), layer.head_norm[1]).to(qk.dtype) * layer.head_norm[0]
    qk = torch.addcmul(qk * cos, qk.roll(width // 2, -1), sin)
    return qk.unsqueeze(2).to(qkv.dtype), qkv[:, layer.roped :].unsqueeze(2)


def _mlp(mixed: Tensor, x: Tensor, layer: _Layer) -> Tensor:
    """What a layer does behind its attention, whose output is ``mixed`` [b, Hq * D]: the next ``x`` [b, H]."""
    x = layer.out.plus(mixed, x)
    gate, up = layer.gate_up(_scale_input(x, layer, 1)).chunk(2, -1)
    return layer.down.plus(layer.activation(gate) * up, x)


def _scale_input(x: Tensor, layer: _Layer, number: int) -> Tensor:
    """The input [b, H] of what follows one of the two norms of a layer."""
    y = _rms_normalize(x.float(), layer.epsilons[number])
    return y if layer.scales is None else (y * layer.scales[number]).to(layer.dtype)


def _rms_normalize(x: Tensor, epsilon: float) -> Tensor:
    """``x``, in float32, divided by the root of its mean square over the last dimension."""
    # Three operations on few numbers: in place of torch's rms_norm they made a step of sampling 5 % shorter.
    squares: Tensor = dot(x, x).mul_(1 / x.shape[-1]).add_(epsilon)
    return x * squares.rsqrt_().unsqueeze(-1)


def _side_by_side(layers: list[Any], scale: Tensor | None, dtype: torch.dtype) -> Linear:
    """Linear layers side by side as one, behind a norm that multiplies by ``scale``, if by anything."""
    # One product in place of two or three: with so few rows a step is also limited by the number of its operations.
    # A weight with an adapter merged into it is new memory, so that none of them is held for longer than it is needed.
    weights, biases = zip(*map(linear_weight, layers), strict=True)
    weight = torch.cat(weights).to(dtype)
    del weights
    given = [bias for bias in biases if bias is not None]
    if given and len(given) < len(layers):
        raise TypeError("some of the projections have a bias and some have none")
    return _linear(weight if scale is None else weight.mul_(scale), torch.cat(given) if given else None, dtype)


def _epsilon(norm: Any) -> float:
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if value is None:
        raise TypeError(f"{type(norm).__name__} is not a known norm")
    return float(value)


def _scale(norm: Any) -> Tensor:
    """What a norm multiplies by, in float32: its output for a constant, which normalization leaves as it is."""
    # Asked of the norm rather than read from its weight, to which Gemma's adds 1.
    ones: Tensor = torch.ones_like(norm.weight)
    scale: Tensor = norm(ones) * (1.0 + _epsilon(norm)) ** 0.5
    return scale.float()
