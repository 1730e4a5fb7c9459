"""Operators of com.microsoft against the arithmetic that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graphs import constant, model, node, value

from tessera import onnx as tessera_onnx

DOMAIN = {"com.microsoft": 1}


def run(
    op: str, *inputs: torch.Tensor | None, outputs: int = 1, compiles: bool = False, **attributes: object
) -> object:
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    given = [constant(n, x.numpy()) for n, x in zip(names, inputs, strict=True) if x is not None]
    infos = [value(t.name, t.dims, t.data_type) for t in given]
    results = [f"y{i}" for i in range(outputs)]
    made = model([node(op, names, results, domain="com.microsoft", **attributes)], infos, results, **DOMAIN)
    return tessera_onnx.load(made, compile=compiles)(*(x for x in inputs if x is not None))


@pytest.mark.parametrize("compiles", [False, True])
def test_fused_products_and_activations(compiles: bool) -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    torch.testing.assert_close(run("FusedMatMul", a, b, transB=1, alpha=0.5, compiles=compiles), 0.5 * a @ b.mT)
    x, bias = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(run("BiasGelu", x, bias, compiles=compiles), F.gelu(x + bias))
    torch.testing.assert_close(run("FastGelu", x, bias, compiles=compiles), F.gelu(x + bias, approximate="tanh"))
    torch.testing.assert_close(run("QuickGelu", x, compiles=compiles), x * torch.sigmoid(1.702 * x))


def test_fused_conv() -> None:
    x, w, b, z = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4), torch.randn(1, 4, 6, 6)
    got = run("FusedConv", x, w, b, z, pads=[1, 1, 1, 1], activation="Relu")
    torch.testing.assert_close(got, torch.relu(F.conv2d(x, w, b, padding=1) + z))


def test_skip_normalisations() -> None:
    x, skip, gamma, beta = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    expected = F.layer_norm(x + skip, (8,), gamma, beta, 1e-5)
    torch.testing.assert_close(run("SkipLayerNormalization", x, skip, gamma, beta, epsilon=1e-5), expected)
    expected = F.rms_norm(x + skip, (8,), gamma, 1e-5)
    torch.testing.assert_close(run("SkipSimplifiedLayerNormalization", x, skip, gamma, epsilon=1e-5), expected)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def together(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def test_attention_over_packed_projections() -> None:
    x, w, b = torch.randn(2, 5, 8), torch.randn(8, 24), torch.randn(24)
    q, k, v = (heads(p, 2) for p in (x @ w + b).split(8, -1))
    expected = together(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(run("Attention", x, w, b, num_heads=2, unidirectional=1), expected)


def test_multi_head_attention_with_a_cache() -> None:
    q, k, v = torch.randn(3, 2, 4, 8).unbind()
    past_k, past_v = torch.randn(2, 2, 2, 3, 4).unbind()
    got = run("MultiHeadAttention", q, k, v, None, None, None, past_k, past_v, outputs=3, num_heads=2)
    keys, values = torch.cat([past_k, heads(k, 2)], 2), torch.cat([past_v, heads(v, 2)], 2)
    torch.testing.assert_close(got[0], together(F.scaled_dot_product_attention(heads(q, 2), keys, values)))
    torch.testing.assert_close(got[1:], (keys, values))


@pytest.mark.parametrize("compiles", [False, True])
def test_group_query_attention_writes_its_cache(compiles: bool) -> None:
    q, k, v = torch.randn(2, 1, 32), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    past_k, past_v = torch.randn(2, 2, 2, 6, 8).unbind()
    last, total = torch.tensor([3, 5], dtype=torch.int32), torch.tensor(6, dtype=torch.int32)
    y, keys, values = run(
        "GroupQueryAttention", q, k, v, past_k, past_v, last, total, outputs=3, num_heads=4, kv_num_heads=2,
        compiles=compiles,
    )  # fmt: skip
    for example, place in enumerate(last.tolist()):
        torch.testing.assert_close(keys[example, :, place], k[example].reshape(2, 8))
        rows = [t[example : example + 1, :, : place + 1].repeat_interleave(2, 1) for t in (keys, values)]
        expected = together(F.scaled_dot_product_attention(heads(q[example : example + 1], 4), *rows))
        torch.testing.assert_close(y[example : example + 1], expected)


def test_weights_of_four_bits() -> None:
    rng = np.random.default_rng(0)
    whole = torch.from_numpy(rng.integers(0, 16, (5, 64)).astype(np.uint8))
    packed = (whole[:, 0::2] | whole[:, 1::2] << 4).reshape(5, 2, 16)
    a, scales = torch.randn(3, 64), torch.rand(5, 2)
    weight = (whole.float() - 8) * scales.repeat_interleave(32, 1)
    got = run("MatMulNBits", a, packed, scales.reshape(-1), K=64, N=5, bits=4, block_size=32)
    torch.testing.assert_close(got, a @ weight.T)


def test_quantized_sum() -> None:
    a, b = (torch.randint(0, 255, (20,), dtype=torch.uint8) for _ in range(2))
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([128, 100, 110], dtype=torch.uint8)
    got = run("QLinearAdd", a, scales[0], zeros[0], b, scales[1], zeros[1], scales[2], zeros[2])
    real = (a.double() - 128) * 0.1 + (b.double() - 100) * 0.2
    expected = (real / 0.3 + 110).clamp(0, 255)
    assert (got.double() - expected).abs().max() <= 0.51


def test_lstm_of_weights_in_8_bits() -> None:
    """Against a layer of single precision, within what 8 bits allow."""
    layer = torch.nn.LSTM(4, 6)
    x = torch.randn(5, 2, 4)
    order = [0, 3, 1, 2]  # gates: ONNX has the output's second

    def turned(w: torch.Tensor) -> torch.Tensor:
        return torch.cat([w.detach().split(6)[i] for i in order])

    weights = [turned(w).T for w in (layer.weight_ih_l0, layer.weight_hh_l0)]
    scales = [w.abs().max() / 127 for w in weights]
    stored = [(w / s).round().to(torch.int8)[None] for w, s in zip(weights, scales, strict=True)]
    bias = torch.cat([turned(b) for b in (layer.bias_ih_l0, layer.bias_hh_l0)])[None]
    zero = torch.zeros(1, dtype=torch.int8)
    given = (x, *stored, bias, None, None, None, None, scales[0][None], zero, scales[1][None], zero)
    for compiles in (False, True):
        y, h, c = run("DynamicQuantizeLSTM", *given, outputs=3, compiles=compiles, hidden_size=6)  # type: ignore[misc]
        expected, (last_h, last_c) = layer(x)
        torch.testing.assert_close(y[:, 0], expected.detach(), atol=0.03, rtol=0)
        torch.testing.assert_close(h, last_h.detach(), atol=0.03, rtol=0)
        torch.testing.assert_close(c, last_c.detach(), atol=0.05, rtol=0)
