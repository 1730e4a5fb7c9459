"""com.microsoft: mixtures of experts, with weights as they are or in a few bits.

Every expert runs on every token, and a token's weights of the experts that it did not choose are 0: which ones it
chooses is a matter of values, and a program has one shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.microsoft_quantized import unpacked
from tessera.frontends.onnx.registry import MICROSOFT, operator

Tensor = torch.Tensor


def _routed(scores: Tensor, mixing: Tensor | None, k: int, normalised: int) -> Tensor:
    """The weight of each expert for each token: [tokens, experts]."""
    shares = torch.softmax(scores.float(), -1) if mixing is None else mixing.float()
    chosen = torch.topk(scores, k, -1).indices
    kept = shares.gather(-1, chosen)
    if normalised:
        kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, chosen, kept)


def _gated(gate: Tensor, linear: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + beta)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_PLAIN = {"relu": torch.relu, "gelu": _gelu, "silu": F.silu, "identity": lambda x: x}


def _experts(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """[experts, tokens, in] times each expert's [out, in]."""
    y = torch.matmul(x, w.transpose(1, 2))
    return y if b is None else y + b.unsqueeze(1)


def mixed(
    x: Tensor, weights: Tensor, first: tuple, second: tuple, third: tuple | None, activation: str,
    swiglu: tuple[float, float, float | None, int],
) -> Tensor:  # fmt: skip
    """`first`, `second` and `third` are weights and bias of the layers; `swiglu` its numbers and how it is stored."""
    tokens = x.reshape(1, -1, x.shape[-1]).float()
    inner = _experts(tokens, *first)
    beside = None if third is None else _experts(tokens, *third)
    if activation == "swiglu":
        alpha, beta, limit, fused = swiglu
        if fused == 1:
            gate, linear = inner[..., 0::2], inner[..., 1::2]
        elif fused == 2:
            gate, linear = inner.chunk(2, -1)
        elif beside is not None:
            gate, linear = inner, beside
        else:
            raise OnnxError("swiglu that is not fused: expected weights of a third layer")
        inner = _gated(gate, linear, alpha, beta, limit)
    elif activation in _PLAIN:
        inner = _PLAIN[activation](inner)
        inner = inner if beside is None else inner * beside
    else:
        raise OnnxError(f"activation_type: expected {', '.join(_PLAIN)} or swiglu, got {activation!r}")
    y = (_experts(inner, *second) * weights.t().unsqueeze(-1)).sum(0)
    return y.reshape(x.shape).to(x.dtype)


def _wide(w: Tensor | None) -> Tensor | None:
    return None if w is None else w.float()


@operator("MoE", domain=MICROSOFT)
def mixture_of_experts(
    x: Tensor, scores: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None = None,
    w3: Tensor | None = None, b3: Tensor | None = None, *,
    activation_alpha: float = 1.0, activation_beta: float = 0.0, activation_type: str = "relu", k: int = 1,
    normalize_routing_weights: int = 0, swiglu_fusion: int = 0, swiglu_limit: float | None = None,
    use_sparse_mixer: int = 0,
) -> Tensor:  # fmt: skip
    if use_sparse_mixer:
        raise OnnxError("MoE: use_sparse_mixer is not known")
    weights = _routed(scores, None, k, normalize_routing_weights)
    third = None if w3 is None else (w3.float(), _wide(b3))
    swiglu = (activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)
    return mixed(x, weights, (w1.float(), _wide(b1)), (w2.float(), _wide(b2)), third, activation_type, swiglu)


def _whole(w: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """[experts, out, in] from bytes, with a scale for each row or for each block of it."""
    count = w.shape[-1] * 8 // bits
    codes = unpacked(w, bits, count).float()
    scales = scale.float() if scale.ndim == 3 else scale.float().unsqueeze(-1)
    if zero is None:
        shift: Tensor | float = float(2 ** (bits - 1))
    elif scale.ndim == 3:
        shift = unpacked(zero, bits, scale.shape[-1]).float().repeat_interleave(count // scales.shape[-1], -1)
    else:
        shift = unpacked(zero, bits, scale.shape[-1]).float().unsqueeze(-1)
    return (codes - shift) * scales.repeat_interleave(count // scales.shape[-1], -1)


@operator("QMoE", domain=MICROSOFT)
def quantized_mixture_of_experts(
    x: Tensor, scores: Tensor, w1: Tensor, s1: Tensor, b1: Tensor | None, w2: Tensor, s2: Tensor,
    b2: Tensor | None = None, w3: Tensor | None = None, s3: Tensor | None = None, b3: Tensor | None = None,
    z1: Tensor | None = None, z2: Tensor | None = None, z3: Tensor | None = None, mixing: Tensor | None = None, *,
    accuracy_level: int = 0, activation_alpha: float = 1.0, activation_beta: float = 0.0,
    activation_type: str = "relu", block_size: int = 0, expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None, fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None, k: int = 1, normalize_routing_weights: int = 0,
    quant_type: str = "int", swiglu_fusion: int = 0, swiglu_limit: float | None = None, use_sparse_mixer: int = 0,
    weights_prepacked: int = -1, context: Context,
) -> Tensor:  # fmt: skip
    if quant_type != "int" or use_sparse_mixer or weights_prepacked == 1:
        raise OnnxError(f"{context.node}: expected whole numbers that are not packed for one device, and no mixer")
    bits = expert_weight_bits
    first = _whole(w1, s1, z1, fc1_expert_weight_bits or bits), _wide(b1)
    second = _whole(w2, s2, z2, fc2_expert_weight_bits or bits), _wide(b2)
    third = None
    if w3 is not None and s3 is not None:
        third = _whole(w3, s3, z3, fc3_expert_weight_bits or bits), _wide(b3)
    weights = _routed(scores, mixing, k, normalize_routing_weights)
    swiglu = (activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)
    return mixed(x, weights, first, second, third, activation_type, swiglu)
