"""com.microsoft: quantized operators."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.microsoft_attention import from_packed
from tessera.frontends.onnx.operators.microsoft_fused import embed_layer_normalization
from tessera.frontends.onnx.operators.pooling import average_pool
from tessera.frontends.onnx.operators.products import matmul_integer, multiplied
from tessera.frontends.onnx.operators.quantization import dequantize_linear, dynamic_quantize_linear, quantize_linear
from tessera.frontends.onnx.operators.rounding import quotient, requantized
from tessera.frontends.onnx.registry import MICROSOFT, operator

Tensor = torch.Tensor


def _zero_like(zero: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device) if zero is None else zero


def _real(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return dequantize_linear(x, scale, zero)


def _whole(y: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return requantized(quotient(y, scale), zero)


def _binary(name: str, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name, domain=MICROSOFT)
    def run(
        a: Tensor,
        a_scale: Tensor,
        a_zero: Tensor | None,
        b: Tensor,
        b_scale: Tensor,
        b_zero: Tensor | None,
        c_scale: Tensor,
        c_zero: Tensor | None = None,
    ) -> Tensor:
        return _whole(fn(_real(a, a_scale, a_zero), _real(b, b_scale, b_zero)), c_scale, _zero_like(c_zero, a))


_binary("QLinearAdd", torch.add)
_binary("QLinearMul", torch.mul)


@operator("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(
    x: Tensor, x_scale: Tensor, x_zero: Tensor | None, y_scale: Tensor, y_zero: Tensor | None = None
) -> Tensor:
    return _whole(torch.sigmoid(_real(x, x_scale, x_zero)), y_scale, _zero_like(y_zero, x))


@operator("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 0.01,
) -> Tensor:
    y = torch.nn.functional.leaky_relu(_real(x, x_scale, x_zero), alpha)
    return _whole(y, y_scale, _zero_like(y_zero, x))


@operator("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor,
    *,
    axis: int = -1,
    opset: int = 13,
) -> Tensor:
    real = _real(x, x_scale, x_zero)
    if opset < 13:
        real = real.flatten(axis % x.ndim)
        return _whole(torch.softmax(real, -1), y_scale, y_zero).reshape(x.shape)
    return _whole(torch.softmax(real, axis), y_scale, y_zero)


@operator("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(
    x: Tensor, x_scale: Tensor, x_zero: Tensor, y_scale: Tensor, y_zero: Tensor, *, channels_last: int = 0
) -> Tensor:
    axes = list(range(1, x.ndim - 1)) if channels_last else list(range(2, x.ndim))
    return _whole(_real(x, x_scale, x_zero).mean(axes, keepdim=True), y_scale, y_zero)


@operator("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    real = _real(x, x_scale, x_zero)
    real = real.movedim(-1, 1) if channels_last else real
    y = average_pool(
        real,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _whole(y.movedim(1, -1) if channels_last else y, y_scale, _zero_like(y_zero, x))


@operator("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(y_scale: Tensor, y_zero: Tensor, *xs: Tensor, axis: int) -> Tensor:
    if len(xs) % 3:
        raise OnnxError("QLinearConcat: expected a scale and a zero point for each input")
    real = [_real(*xs[i : i + 3]) for i in range(0, len(xs), 3)]
    return _whole(torch.cat(real, axis), y_scale, y_zero)


@operator("QuantizeLinear", domain=MICROSOFT)
def quantize(x: Tensor, scale: Tensor, zero: object = None, *, axis: int = 1, block_size: int = 0) -> object:
    return quantize_linear(x, scale, zero, axis=axis, block_size=block_size)


@operator("DequantizeLinear", domain=MICROSOFT)
def dequantize(x: object, scale: Tensor, zero: object = None, *, axis: int = 1, block_size: int = 0) -> Tensor:
    return dequantize_linear(x, scale, zero, axis=axis, block_size=block_size)


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    y = matmul_integer(a, b, a_zero, b_zero).to(a_scale.dtype) * (a_scale * b_scale)
    return y if bias is None else y + bias


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    whole, scale, zero = dynamic_quantize_linear(a)
    return matmul_integer_to_float(whole, b, scale, b_scale, zero, b_zero, bias)


@operator("QGemm", domain=MICROSOFT)
def qgemm(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    whole = matmul_integer(a.t() if transA else a, b.t() if transB else b, a_zero, b_zero)
    whole = whole if c is None else whole + c
    y = whole.float() * (alpha * a_scale * b_scale)
    return y if y_scale is None or y_zero is None else _whole(y, y_scale, y_zero)


@operator("QAttention", domain=MICROSOFT)
def qattention(
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    mask: Tensor | None = None,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    past: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    context: Context,
) -> tuple:
    packed = matmul_integer_to_float(x, w, x_scale, w_scale, x_zero, w_zero, bias)
    other = bool(do_rotary or past_present_share_buffer)
    return from_packed(
        packed, mask, past, None, num_heads, None, scale, unidirectional, mask_filter_value, other, context
    )


def unpacked(x: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of a few bits in the last dimension's bytes, lowest bits first."""
    if bits == 8:
        return x[..., :count]
    if bits not in (2, 4):
        raise OnnxError(f"bits: expected 2, 4 or 8, got {bits}")
    shifts = torch.arange(0, 8, bits, device=x.device, dtype=torch.uint8)
    return ((x.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :count]


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_n_bits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Tensor:
    """`a @ w.T`, where w is kept in a few bits, each block of a row with a scale of its own."""
    blocks = -(-K // block_size)
    whole = unpacked(b.reshape(N, blocks, -1), bits, block_size).to(a.dtype)
    scale = scales.reshape(N, blocks, 1).to(a.dtype)
    if zeros is None:
        shift: Tensor | float = float(2 ** (bits - 1))
    elif zeros.dtype == torch.uint8:
        shift = unpacked(zeros.reshape(N, -1), bits, blocks).reshape(N, blocks, 1).to(a.dtype)
    else:
        shift = zeros.reshape(N, blocks, 1).to(a.dtype)
    if groups is not None:  # which block's scale each column has
        whole, column = whole.reshape(N, -1, 1)[:, :K], groups[:K].to(torch.int64)
        scale = scale.index_select(1, column)
        shift = shift.index_select(1, column) if isinstance(shift, Tensor) else shift
    weight = ((whole - shift) * scale).reshape(N, -1)[:, :K]
    y = multiplied(a, weight.t())
    return y if bias is None else y + bias


_FLOATS_OF_4_BITS = (  # FP4, and NF4: the quantiles of a normal distribution
    (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25),
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip


@operator("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(
    a: Tensor,
    b: Tensor,
    largest: Tensor,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Tensor:
    """`a @ w.T`, where w is kept as floats of 4 bits, highest bits first, over the largest of each block."""
    if quant_type not in (0, 1):
        raise OnnxError(f"quant_type: expected 0 or 1, got {quant_type}")
    table = _FLOATS_OF_4_BITS[quant_type]
    signed = table if quant_type else (*table, *(-x for x in table))
    values = torch.tensor(signed, dtype=largest.dtype, device=a.device)
    codes = torch.stack([b >> 4, b & 15], -1).reshape(-1)[: N * K].to(torch.int64)
    scale = largest.repeat_interleave(block_size)[: N * K]
    weight = (values[codes] * scale).reshape(N, K).to(a.dtype)
    return multiplied(a, weight.t() if transB else weight)


@operator("QLinearWhere", domain=MICROSOFT)
def qlinear_where(
    condition: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
) -> Tensor:
    chosen = torch.where(condition, _real(a, a_scale, a_zero), _real(b, b_scale, b_zero))
    return _whole(chosen, y_scale, _zero_like(y_zero, a))


@operator("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    data: object,
    indices: Tensor,
    scales: Tensor,
    zeros: object = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Tensor:
    """Rows of a table that is kept in a few bits."""
    if gather_axis or not isinstance(data, Tensor):
        raise OnnxError("GatherBlockQuantized: expected bytes, gathered along the first axis")
    places = indices.to(torch.int64)
    per_byte = 8 // bits
    rows = unpacked(data[places], bits, data.shape[-1] * per_byte).to(scales.dtype)
    scale = scales[places].repeat_interleave(block_size, -1)[..., : rows.shape[-1]]
    if zeros is None:
        shift: Tensor | float = float(2 ** (bits - 1))
    else:
        assert isinstance(zeros, Tensor)
        shift = unpacked(zeros[places], bits, scales.shape[-1]).to(scales.dtype)
        shift = shift.repeat_interleave(block_size, -1)[..., : rows.shape[-1]]
    return (rows - shift) * scale


@operator("QEmbedLayerNormalization", domain=MICROSOFT)
def quantized_embed_layer_normalization(
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segment_table: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    *scales_and_zeros: Tensor,
    epsilon: float = 1e-12,
) -> tuple:
    """Scales of the five tables, then their zero points."""
    if len(scales_and_zeros) != 10:
        raise OnnxError(f"QEmbedLayerNormalization: expected 5 scales and 5 zeros, got {len(scales_and_zeros)} inputs")
    tables = (words, positions, segment_table, gamma, beta)
    rows = zip(tables, scales_and_zeros[:5], scales_and_zeros[5:], strict=True)
    word, position, segment, scale, shift = (None if t is None else _real(t, s, z) for t, s, z in rows)
    assert word is not None and position is not None and scale is not None and shift is not None
    return embed_layer_normalization(
        ids, segments, word, position, segment, scale, shift, mask, epsilon=epsilon
    )[:2]  # fmt: skip
