"""Operators of com.microsoft that are ONNX's own under another name, in another layout, or of other weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from graphs import constant, model, node, value

from tessera import onnx as tessera_onnx

Tensor = torch.Tensor


def run(op: str, *inputs: Tensor | None, outputs: int = 1, compiles: bool = True, **attributes: object) -> object:
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    given = [constant(n, x.numpy()) for n, x in zip(names, inputs, strict=True) if x is not None]
    infos = [value(t.name, t.dims, t.data_type) for t in given]
    results = [f"y{i}" for i in range(outputs)]
    nodes = [node(op, names, results, domain="com.microsoft", **attributes)]
    net = tessera_onnx.load(model(nodes, infos, results, **{"com.microsoft": 1}), compile=compiles)
    with torch.no_grad():
        return net(*(x for x in inputs if x is not None))


def same(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("compiles", [False, True])
def test_operators_that_onnx_has_too(compiles: bool) -> None:
    seeded()
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    same(run("TransposeMatMul", x, w, transB=1, alpha=0.5, compiles=compiles), 0.5 * x @ w.t())
    same(run("Trilu", x, torch.tensor(1), upper=1, compiles=compiles), x.triu(1))
    start, limit, delta = torch.tensor([[1.0], [6.0], [2.0]]).reshape(3).unbind()
    same(run("Range", start, limit, delta, compiles=compiles), torch.tensor([1.0, 3.0, 5.0]))
    same(run("Range", start, limit, compiles=compiles), torch.arange(1.0, 6.0))
    same(
        run("Pad", x, torch.tensor([0, 1, 1, 2]), torch.tensor([7.0]), compiles=compiles),
        F.pad(x, (1, 2, 0, 1), value=7.0),
    )
    same(run("ExpandDims", x, torch.tensor(-2, dtype=torch.int32), compiles=compiles), x.unsqueeze(-2))
    same(run("GatherND", x, torch.tensor([[2], [0]]), compiles=compiles), x[[2, 0]])
    same(run("CDist", x, w, metric="euclidean", compiles=compiles), torch.cdist(x, w))
    same(run("UnfoldTensor", x, dim=1, size=3, compiles=compiles), x.unfold(1, 3, 1))
    image, grid = torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2)
    same(
        run("GridSample", image, grid, mode="bilinear", compiles=compiles),
        F.grid_sample(image, grid, align_corners=False),
    )


def test_whole_numbers() -> None:
    seeded()
    a, b = torch.randint(-99, 99, (3, 4)).short(), torch.randint(-99, 99, (4, 2)).short()
    same(run("MatMulInteger16", a, b), a.int() @ b.int())
    values, places, counts = run("Unique", torch.tensor([2.0, 5.0, 2.0, 1.0]), outputs=3)
    same((values, places, counts), (torch.tensor([2.0, 5.0, 1.0]), torch.tensor([0, 1, 0, 2]), torch.tensor([2, 1, 1])))


def test_runs_that_would_repeat() -> None:
    ids, scores = torch.tensor([[1, 2, 3, 1, 2], [4, 5, 4, 4, 0]]), torch.zeros(2, 6)
    expected = scores.clone()
    expected[0, 3] = -math.inf  # 1 2 3 again
    same(run("NGramRepeatBlock", ids, scores, ngram_size=3), expected)


def test_channels_last() -> None:
    seeded()
    x, w, b = torch.randn(2, 6, 6, 4), torch.randn(8, 4, 3, 3), torch.randn(8)
    expected = F.conv2d(x.movedim(-1, 1), w, b, padding=1).movedim(1, -1)
    same(run("NhwcConv", x, w, b, pads=[1, 1, 1, 1]), expected)
    same(run("NhwcFusedConv", x, w, b, x.repeat(1, 1, 1, 2), pads=[1, 1, 1, 1], activation="Relu"),
         torch.relu(expected + x.repeat(1, 1, 1, 2)))  # fmt: skip
    same(run("NhwcMaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), F.max_pool2d(x.movedim(-1, 1), 2).movedim(1, -1))
    gamma, beta = torch.randn(4), torch.randn(4)
    normed = F.silu(F.group_norm(x.movedim(-1, 1), 2, gamma, beta)).movedim(1, -1)
    same(run("GroupNorm", x, gamma, beta, groups=2, activation=1), normed)
    y, total = run("SkipGroupNorm", x, gamma, beta, torch.ones(2, 4), gamma, groups=2, activation=0, outputs=2)
    same(total, x + 1 + gamma)
    same(y, F.group_norm(total.movedim(-1, 1), 2, gamma, beta).movedim(1, -1))


def test_quantized_convolution_of_either_layout() -> None:
    seeded()
    x, w = (
        torch.randint(0, 255, (1, 6, 6, 4), dtype=torch.uint8),
        torch.randint(0, 255, (8, 4, 3, 3), dtype=torch.uint8),
    )
    scale, zero = torch.tensor(0.02), torch.tensor(120, dtype=torch.uint8)
    rest = (scale, zero, w, torch.tensor(0.01), zero, torch.tensor(0.5), zero)
    last = run("QLinearConv", x, *rest, channels_last=1, pads=[1, 1, 1, 1])
    real = F.conv2d((x.movedim(-1, 1).double() - 120) * 0.02, (w.double() - 120) * 0.01, padding=1) / 0.5
    assert (last.double() - (real.round() + 120).clamp(0, 255).movedim(1, -1)).abs().max() <= 1
    first = run("QLinearConv", x.movedim(-1, 1).contiguous(), *rest, pads=[1, 1, 1, 1])
    assert torch.equal(first.movedim(1, -1), last)


def test_activations_fused_with_products() -> None:
    seeded()
    x, w, b = torch.randn(2, 8), torch.randn(8, 6), torch.randn(6)
    same(run("GemmFastGelu", x, w, b), F.gelu(x @ w + b, approximate="tanh"))
    left, right = (x + 1).chunk(2, -1)
    same(run("BiasSplitGelu", x, torch.ones(8)), left * F.gelu(right))


def test_pads_that_an_input_brings() -> None:
    seeded()
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 3, 3, 3)
    got = run("ConvTransposeWithDynamicPads", x, w, torch.tensor([1, 1, 1, 1]), strides=[2, 2])
    same(got, F.conv_transpose2d(x, w, stride=2, padding=1))


def test_columns_that_say_which_block_they_belong_to() -> None:
    seeded()
    codes, scales = torch.randint(0, 16, (6, 32)), torch.rand(6, 2)
    groups = torch.randint(0, 2, (32,), dtype=torch.int32)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).reshape(6, 2, 8)
    x = torch.randn(3, 32)
    got = run("MatMulNBits", x, packed, scales, None, groups, K=32, N=6, bits=4, block_size=16)
    same(got, x @ ((codes - 8) * scales[:, groups.long()]).t())


@pytest.mark.parametrize(("kind", "code", "stands_for"), [(0, 3, 1.0), (0, 11, -1.0), (1, 0, -1.0), (1, 7, 0.0)])
def test_floats_of_four_bits(kind: int, code: int, stands_for: float) -> None:
    packed = torch.full((16,), code << 4 | code, dtype=torch.uint8)
    largest = torch.tensor([2.0, 3.0])
    got = run("MatMulBnb4", torch.eye(16), packed, largest, K=16, N=2, block_size=16, quant_type=kind)
    same(got, stands_for * largest.expand(16, 2))


def test_choice_of_quantized_numbers() -> None:
    a, b = torch.tensor([10, 20], dtype=torch.uint8), torch.tensor([30, 40], dtype=torch.uint8)
    unit, zero = torch.tensor(0.5), torch.tensor(0, dtype=torch.uint8)
    chosen = run("QLinearWhere", torch.tensor([True, False]), a, unit, zero, b, unit * 2, zero, unit, zero + 1)
    assert chosen.tolist() == [11, 81]


def test_quantized_tables_of_embeddings() -> None:
    ids = torch.tensor([[0, 2]], dtype=torch.int32)
    words, positions = (torch.randint(0, 255, (n, 8), dtype=torch.uint8) for n in (3, 4))
    gamma, beta = (torch.randint(0, 255, (8,), dtype=torch.uint8) for _ in range(2))
    scale, zero = torch.tensor(0.1), torch.tensor(100, dtype=torch.uint8)
    tables = (words, positions, words, gamma, beta)
    mask = torch.ones(1, 2, dtype=torch.int32)
    segments = torch.zeros(1, 2, dtype=torch.int32)
    y, counts = run("QEmbedLayerNormalization", ids, segments, *tables, mask, *[scale] * 5, *[zero] * 5, outputs=2)
    real = [(t.float() - 100) * 0.1 for t in tables]
    total = real[0][[0, 2]] + real[1][:2] + real[2][0]
    same(y, F.layer_norm(total, (8,), real[3], real[4], 1e-12).unsqueeze(0))
    assert counts.tolist() == [2]


def dense(x: Tensor, router: Tensor, layers: list, k: int, act: object, normalise: bool) -> Tensor:
    """Tokens one by one, each by its own experts."""
    shares, out = router.softmax(-1), torch.zeros_like(x)
    for t in range(x.shape[0]):
        chosen = router[t].topk(k).indices
        weights = shares[t, chosen] / (shares[t, chosen].sum() if normalise else 1)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            (w1, b1), (w2, b2) = layers
            out[t] += weight * (w2[e] @ act(w1[e] @ x[t] + b1[e]) + b2[e])
    return out


def swiglu(h: Tensor) -> Tensor:
    gate, linear = h[0::2].clamp(max=1.0), h[1::2].clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("kind", ["relu", "swiglu"])
def test_mixture_of_experts(kind: str, normalise: bool) -> None:
    seeded()
    wide = 16 if kind == "swiglu" else 8
    x, router = torch.randn(5, 4), torch.randn(5, 3)
    layers = [(torch.randn(3, wide, 4), torch.randn(3, wide)), (torch.randn(3, 4, 8), torch.randn(3, 4))]
    how = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.0}
    flat = [t for pair in layers for t in pair]
    got = run("MoE", x, router, *flat, k=2, activation_type=kind, normalize_routing_weights=int(normalise),
              **(how if kind == "swiglu" else {}))  # fmt: skip
    same(got, dense(x, router, layers, 2, swiglu if kind == "swiglu" else torch.relu, normalise))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("blocks", [0, 2])
def test_experts_in_a_few_bits(bits: int, blocks: int) -> None:
    seeded()
    x, router = torch.randn(5, 32), torch.randn(5, 3)
    codes = [torch.randint(0, 2**bits, (3, 32, 32)) for _ in range(2)]
    scales = [torch.rand(3, 32, *([blocks] if blocks else [])) * 0.1 for _ in range(2)]

    def packed(c: Tensor) -> Tensor:
        return (c if bits == 8 else c[..., 0::2] | c[..., 1::2] << 4).to(torch.uint8)

    def real(c: Tensor, s: Tensor) -> Tensor:
        spread = s.repeat_interleave(32 // blocks, -1) if blocks else s.unsqueeze(-1)
        return (c - 2 ** (bits - 1)) * spread

    zeros = torch.zeros(3, 32)
    (c1, c2), (s1, s2) = codes, scales
    got = run("QMoE", x, router, packed(c1), s1, None, packed(c2), s2, k=2, expert_weight_bits=bits,
              block_size=16 if blocks else 0)  # fmt: skip
    expected = dense(x, router, [(real(c1, s1), zeros), (real(c2, s2), zeros)], 2, torch.relu, False)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


def test_heads_with_a_sink_and_scores_as_an_output() -> None:
    seeded()
    q, k, v, sink = torch.randn(2, 3, 32), torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.randn(4)
    last, total = torch.tensor([2, 2], dtype=torch.int32), torch.tensor(3, dtype=torch.int32)
    more = (None, None, last, total, None, None, None, None, sink)
    y, _, _, shown = run("GroupQueryAttention", q, k, v, *more, outputs=4, num_heads=4, kv_num_heads=2, qk_output=2)
    heads = q.view(2, 3, 4, 8).transpose(1, 2)
    keys, values = (t.view(2, 3, 2, 8).transpose(1, 2).repeat_interleave(2, 1) for t in (k, v))
    scores = (heads @ keys.mT / math.sqrt(8)).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    weights = torch.cat([scores, sink.view(1, 4, 1, 1).expand(2, 4, 3, 1)], -1).softmax(-1)[..., :3]
    same(shown, weights)
    same(y, (weights @ values).transpose(1, 2).reshape(2, 3, 32))


@pytest.mark.parametrize("compiles", [False, True])
def test_one_token_into_a_cache_of_full_length(compiles: bool) -> None:
    seeded()
    q, k, v = torch.randn(3, 2, 1, 16).unbind()
    cache_k, cache_v = torch.randn(2, 2, 4, 8, 4).unbind()
    more = (None, None, cache_k, cache_v, torch.tensor([5], dtype=torch.int32))
    y, keys, values = run(
        "DecoderMaskedMultiHeadAttention", q, k, v, *more, outputs=3, num_heads=4, past_present_share_buffer=1,
        compiles=compiles,
    )  # fmt: skip
    heads, one_k, one_v = (t.view(2, 1, 4, 4).transpose(1, 2) for t in (q, k, v))
    expected_k, expected_v = cache_k.clone(), cache_v.clone()
    expected_k[:, :, 5:6], expected_v[:, :, 5:6] = one_k, one_v
    same((keys, values), (expected_k, expected_v))
    attended = F.scaled_dot_product_attention(heads, expected_k[:, :, :6], expected_v[:, :, :6])
    same(y, attended.transpose(1, 2).reshape(2, 1, 16))
