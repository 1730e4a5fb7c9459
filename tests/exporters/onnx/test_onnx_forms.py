"""How operators are said in ONNX: small functions, run by onnx's reference evaluator and by our own importer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from leaving import answers, assert_same, written

from tessera.exporters.onnx.errors import ExportError
from tessera.exporters.onnx.runtimes import preferred, runtime
from tessera.onnx import export, load


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*shape: int, high: int = 3) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


X, Y = floats(2, 3, 4), floats(2, 3, 4, seed=1)
IMAGE, KERNEL = floats(2, 4, 8, 8), floats(6, 2, 3, 3)
Q, K = floats(2, 4, 5, 8), floats(2, 4, 7, 8)
MASK = torch.ones(5, 7, dtype=torch.bool).tril()
HIDDEN = MASK.clone()
HIDDEN[2] = False  # a query that may look at nothing

# name -> function, inputs; what follows is said in a whole operator, or in several
CASES: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "add promotes": (lambda x, y: x + y, (X, ints(2, 3, 4))),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), (X, Y)),
    "integers floor": (lambda x: (x - 3) // 2, (ints(4, 4, high=6),)),
    "remainder": (lambda x, y: torch.remainder(x, y), (X * 5, Y)),
    "fmod": (lambda x, y: torch.fmod(x, y), (X * 5, Y)),
    "true division": (lambda x: x / 2, (ints(5),)),
    "log1p near zero": (lambda x: torch.log1p(x), (torch.tensor([1e-8, -1e-8, 0.3, 5.0, 1e6]),)),
    "expm1 near zero": (lambda x: torch.expm1(x), (torch.tensor([1e-8, -1e-8, 0.3, 5.0, -30.0]),)),
    "parts that nobody reads": (
        lambda x: (
            x.chunk(2, 2)[1],
            x.chunk(3, 1)[0],
            x.split(3, 2)[1],
            x.split([1, 3], 2)[0],
            x.tensor_split(3, 2)[1],
        ),
        (X,),
    ),
    "signs": (lambda x: (x.sign(), x.sgn()), (torch.tensor([-2.0, -0.0, 3.0, float("nan"), float("-inf")]),)),
    "losses of each": (
        lambda x, y: (F.nll_loss(x, y, reduction="none"), F.cross_entropy(x, y, reduction="none")),
        (floats(3, 5), ints(3)),
    ),
    "tails": (lambda x: (torch.special.erfcx(x), torch.special.log_ndtr(x)), (torch.linspace(-3, 30, 23),)),
    "far tail": (lambda x: torch.erfc(x) * 1e8, (torch.linspace(5, 6, 9),)),
    "nothing": (lambda x: (x[:0].mean(0), x[:0].var(correction=0), x[0, :0] @ x[0].T, F.avg_pool1d(x[:0], 2)), (X,)),
    "determinants": (lambda x: (torch.linalg.det(x), *torch.linalg.slogdet(x * 1e-15)), (X[:, :, :3],)),
    "smooth resize": (
        lambda x: tuple(F.interpolate(x, (3, 5), mode=m, antialias=True) for m in ("bilinear", "bicubic")),
        (IMAGE,),
    ),
    "unique rows": (lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True), (ints(6, 2, high=2),)),
    "places of one number": (lambda x: (x[0, 0, 0].nonzero(), (x[0, 0, 0] * 0).nonzero()), (X,)),
    "complex sums": (
        lambda x, y: torch.view_as_real((torch.complex(x, y) - torch.complex(y, x[:, :1])).sum(1)),
        (X, Y),
    ),
    "complex parts": (
        lambda x, y: torch.view_as_real(torch.cat([torch.complex(x, y)[0], -torch.complex(y, x)[1, :1]])),
        (X, Y),
    ),
    "short transforms": (
        lambda x: torch.view_as_real(torch.stft(x, 8, window=torch.ones(8), return_complex=True)),
        (floats(20),),
    ),
    "truths chosen": (lambda x, y: (torch.where(x > 0, y > 0, x < -1), (x > 0).masked_fill(y > 0, True)), (X, Y)),
    "truths told apart": (lambda x: (torch.unique(x > 0), torch.sign(x > 0)), (X,)),
    "whole powers": (lambda x, y: (x - 1) ** (y - 1), (ints(3, 4), ints(3, 4, high=4))),
    "counted": (lambda i: (torch.bincount(i), torch.bincount(i, i * 0.5, minlength=9)), (ints(7, high=5),)),
    "half precision": (
        lambda x, i: (F.max_pool1d(x, 2, return_indices=True), F.avg_pool1d(x, 2), x.scatter_add(2, i, x)),
        (X.half(), ints(2, 3, 4)),
    ),
    "whole sums": (lambda x: torch.baddbmm(x, x, x, beta=2, alpha=3), (ints(2, 3, 3),)),
    "atan2": (lambda x, y: torch.atan2(x, y), (X, Y)),
    "bytes": (lambda x: x + 250, (ints(4).to(torch.uint8),)),
    "comparison": (lambda x, y: (x > y) & (x != 0) | ~(y <= 1), (X, Y)),
    "clamp": (lambda x: x.clamp(0.5, -0.5), (X,)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (X, Y)),
    "gelu": (lambda x: F.gelu(x), (X,)),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), (X,)),
    "softplus": (lambda x: F.softplus(x, beta=2, threshold=1), (X,)),
    "silu mish": (lambda x: F.silu(x) + F.mish(x), (X,)),
    "glu": (lambda x: F.glu(x, -1), (X,)),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(-1)), (X,)),
    "views": (lambda x: x.transpose(0, 2).reshape(4, 6).unsqueeze(1).expand(4, 5, 6), (X,)),
    "slices": (lambda x: (x[:, 1:, ::2], x[..., -1], x[1]), (X,)),
    "flip and roll": (lambda x: (x.flip(0, 2), x.roll((1, -1), (1, 2)), x.roll(3)), (X,)),
    "split": (lambda x: (*x.split(2, -1), *x.chunk(3, 1), *x.unbind(0)), (X,)),
    "cat and stack": (lambda x, y: (torch.cat([x, y], 1), torch.stack([x, y], -1)), (X, Y)),
    "repeat": (lambda x: (x.repeat(2, 1, 2, 1), x.tile(2)), (X,)),
    "windows": (lambda x: x.unfold(2, 3, 1), (X,)),
    "diagonal": (lambda x: (x.diagonal(1, 1, 2), torch.diag_embed(x)), (X,)),
    "triangles": (lambda x: (x.tril(1), x.triu()), (X,)),
    "padding": (
        lambda x: (F.pad(x, (1, 2), value=3.0), F.pad(x, (1, 2), "reflect"), F.pad(x, (-1, 1), "replicate")),
        (X,),
    ),
    "sums": (lambda x: (x.sum(), x.mean((0, 2)), x.sum(1, keepdim=True), (x > 0).sum(0)), (X,)),
    "extremes": (lambda x: (x.amax(1), x.max(2), x.argmin(0), x.argmax()), (X,)),
    "truths": (lambda x: ((x > 0).any(1), (x > 0).all(), x.count_nonzero(0)), (X,)),
    "variances": (lambda x: (x.var(1), x.std((0, 2), correction=0), torch.var_mean(x, 2)), (X,)),
    "norms": (lambda x: (x.norm(dim=1), x.norm(3, dim=-1), x.norm(math.inf, dim=0)), (X,)),
    "logsumexp": (lambda x: x.logsumexp((0, 2)), (X,)),
    "scans": (lambda x: (x.cumsum(1), x.cumprod(2), x.cummax(0), x.logcumsumexp(-1)), (X,)),
    "products": (lambda x, y: (x @ y.transpose(1, 2), torch.einsum("bij,bkj->bik", x, y)), (X, Y)),
    "linear": (lambda x, w, b: (F.linear(x, w, b), F.linear(x[0], w)), (X, floats(5, 4), floats(5))),
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2), (IMAGE, KERNEL)),
    "runs of equal elements": (
        lambda x: torch.unique_consecutive(x.round(), return_inverse=True, return_counts=True),
        (floats(3, 4),),
    ),
    "one class alone": (lambda i: F.one_hot(i, 5), (torch.tensor(3),)),
    "mean of single numbers": (
        lambda x, i, y: x.scatter_reduce(0, i, y, "mean"),
        (torch.tensor(2.0), torch.tensor(0), torch.tensor(5.0)),
    ),
    "average of whole windows": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
        (IMAGE,),
    ),
    "convolution same": (lambda x, w: F.conv2d(x, w, padding="same", groups=2), (IMAGE, floats(6, 2, 4, 3))),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (IMAGE, floats(4, 3, 3, 3)),
    ),
    "pools": (lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (3, 5))), (IMAGE,)),
    "pool places": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,)),
    "uneven maxima": (lambda x: F.adaptive_max_pool2d(x, 3), (IMAGE,)),
    "resize": (lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (5, 9), mode="bilinear")), (IMAGE,)),
    "embedding": (lambda w, i: F.embedding(i, w), (floats(9, 4), ints(2, 3, high=9))),
    "bags": (
        lambda w, i: tuple(
            F.embedding_bag(i, w, torch.tensor([0, 3]), mode="sum", padding_idx=p) for p in (None, 1, -1)
        ),
        (floats(3, 4), ints(6)),
    ),
    "sum of nothing": (lambda x: torch.addmm(x[0, 0], x[0, :, :0], x[0, :0], beta=0.5), (X,)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (X, floats(4), floats(4))),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w, 1e-6), (X, floats(4))),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, floats(4), floats(4))),
    "batch norm": (lambda x, m, v: F.batch_norm(x, m, v.abs() + 1), (IMAGE, floats(4), floats(4))),
    "batch norm of its input": (lambda x: F.batch_norm(x, None, None, training=True), (IMAGE,)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (Q, K, K + 1)),
    "attention causal": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3), (Q, K)),
    "attention masked": (lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), (Q, K, HIDDEN)),
    "attention biased": (lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), (Q, K, floats(5, 7))),
    "gather": (lambda x, i: (x.gather(1, i), x.take_along_dim(i, 1)), (X, ints(2, 2, 4))),
    "indices": (lambda x, i: (x[:, i], x[i[:2], :, i[:2]], x[:, i, i]), (X, ints(3, high=2))),
    "index put": (lambda x, i, v: x.index_put((i, i), v), (X, ints(2, high=2), floats(2, 4))),
    "index add": (
        lambda x, i, v: (x.index_add(1, i, v), x.index_copy(1, i, v)),
        (X, torch.tensor([0, 2]), floats(2, 2, 4)),
    ),
    "scatter": (
        lambda x, i, s: (x.scatter(2, i, s), x.scatter_add(2, i, s), x.scatter(1, i, 7.0)),
        (X, ints(2, 2, 2), Y),
    ),
    "scatter reduce": (lambda x, i, s: x.scatter_reduce(2, i, s, "sum", include_self=False), (X, ints(2, 3, 3), Y)),
    "scatter mean of integers": (
        lambda x, i, s: (x.scatter_reduce(1, i, s, "mean"), x.scatter_reduce(1, i, s, "mean", include_self=False)),
        (torch.tensor([[-7, 4, 9]]), torch.tensor([[0, 0, 2]]), torch.tensor([[2, -3, -4]])),
    ),
    "parts in place": (lambda x, y: (x.slice_scatter(y[:, :1], 1, 1, 2), x.select_scatter(y[0], 0, 1)), (X, Y)),
    "masked": (lambda x, y: (x.masked_fill(x > 0, -1.0), x.masked_scatter(x > 0, y)), (X, Y)),
    "sorted": (lambda x: (x.sort(1, descending=True), x.topk(2, 2), x.median(1), x.kthvalue(2, 2)), (X,)),
    "searched": (
        lambda x, e: (torch.bucketize(x, e), torch.searchsorted(e, x, right=True)),
        (X, torch.tensor([-1.0, 0, 1])),
    ),
    "one hot": (lambda i: F.one_hot(i, 4), (ints(5),)),
    "created": (lambda x: (torch.arange(1, 9, 3), torch.eye(3), torch.zeros_like(x), x.new_full((2, 99), 3)), (X,)),
    "copies written": (lambda x: torch.cat([x.clone().zero_(), x.clone().add_(1)]), (X,)),
    "losses": (
        lambda x, t: (F.cross_entropy(x, t), F.mse_loss(x, x * 2), F.smooth_l1_loss(x, x * 3)),
        (X[:, 0], ints(2, high=4)),
    ),
    "decomposed": (lambda x: (F.hardshrink(x), torch.logit(x.sigmoid()), x.nan_to_num(), torch.heaviside(x, x)), (X,)),
    "distances": (lambda x, y: (torch.cdist(x, y), F.cosine_similarity(x, y, -1), F.pairwise_distance(x, y)), (X, Y)),
}
SINCE = {"smooth resize": 18}  # opsets before these cannot say it
# What onnx's reference evaluator has wrong, or not at all.
NOT_BY_REFERENCE = {"attention masked", "resize", "transposed", "scatter reduce"}


@pytest.mark.parametrize("name", CASES)
def test_what_a_form_computes(name: str) -> None:
    fn, inputs = CASES[name]
    for opset in (SINCE.get(name, 17), 23):
        model = written(fn, inputs, opset)
        assert_same(answers(model, inputs, "tessera"), fn(*inputs))
        if opset == 23 and name not in NOT_BY_REFERENCE:
            assert_same(answers(model, inputs, "reference"), fn(*inputs))


@pytest.mark.parametrize("name", CASES)
def test_what_onnx_runtime_computes(name: str) -> None:
    pytest.importorskip("onnxruntime")
    fn, inputs = CASES[name]
    for opset in (SINCE.get(name, 17), 20, 23):
        assert_same(answers(written(fn, inputs, opset), inputs, "ort"), fn(*inputs))


WHOLE = {
    "gelu": ("Gelu", 20),
    "layer norm": ("LayerNormalization", 17),
    "rms norm": ("RMSNormalization", 23),
    "group norm": ("GroupNormalization", 21),
    "attention": ("Attention", 23),
}


@pytest.mark.parametrize("name", WHOLE)
def test_operators_stay_whole_where_the_opset_has_them(name: str) -> None:
    kind, since = WHOLE[name]
    kinds = [node.op_type for node in written(*CASES[name], since).graph.node]
    assert kinds == [kind]
    if since > 17:
        assert kind not in [node.op_type for node in written(*CASES[name], since - 1).graph.node]


def test_what_has_no_form_is_named_with_its_line() -> None:
    with pytest.raises(ExportError, match=r"aten\.linalg_qr.*test_onnx_forms\.py:\d+"):
        written(lambda x: torch.linalg.qr(x)[0], (X,), 23)


MANY = torch.full((40, 50), 0.3)
DRAWS: dict[str, tuple[Callable, tuple[float, float, float, float]]] = {  # mean, deviation, least and most
    "rand": (lambda x: torch.rand(40, 50), (0.5, 0.289, 0, 1)),
    "rand of sixteen bits": (lambda x: torch.rand_like(x, dtype=torch.float16).float(), (0.5, 0.289, 0, 1)),
    "randn": (lambda x: torch.randn_like(x, dtype=torch.float64).float(), (0, 1, -9, 9)),
    "normal": (lambda x: torch.normal(x, 2.0), (0.3, 2, -20, 20)),
    "normal of a mean": (lambda x: torch.normal(1.0, x), (1, 0.3, -3, 5)),
    "normal of a size": (lambda x: torch.normal(3.0, 0.5, (40, 50)), (3, 0.5, -2, 8)),
    "normal in place": (lambda x: x.clone().normal_(1.0, 2.0), (1, 2, -20, 20)),
    "bernoulli": (lambda x: torch.bernoulli(x), (0.3, 0.458, 0, 1)),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.1, 0.0, 0.4, 0.5]), 2000, True).view(40, 50) + 0.0 * x,
        (2.3, 0.9, 0, 3),
    ),
    "multinomial without putting back": (
        lambda x: torch.multinomial(x[:, :5], 5).float().repeat(1, 10),
        (2, 1.414, 0, 4),
    ),
    "randint": (lambda x: torch.randint(-3, 5, (40, 50)).float(), (0.5, 2.29, -3, 4)),
    "randint_like": (lambda x: torch.randint_like(x, 4), (1.5, 1.118, 0, 3)),
    "dropout": (lambda x: F.dropout(x, 0.25), (0.3, 0.173, 0, 0.4)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_of_the_same_distribution(name: str) -> None:
    fn, (mean, deviation, least, most) = DRAWS[name]
    model = written(fn, (MANY,), 21)
    (drawn,) = runtime(preferred(), model.SerializeToString())({i.name: MANY.numpy() for i in model.graph.input})
    assert drawn.shape == (40, 50) and drawn.dtype == np.float32
    assert abs(drawn.mean() - mean) < 0.15 * deviation and abs(drawn.std() - deviation) < 0.15 * deviation
    assert least <= drawn.min() and drawn.max() <= most + 1e-6


def test_random_results_are_compared_by_type() -> None:
    export(lambda x: (x + torch.rand_like(x), x * 2), (X,), check=True)
    model = export(lambda x: torch.randn(x.shape[0], 3), (X,), dynamic={"x": {0: "rows"}}, check=True)
    run = runtime(preferred(), model.SerializeToString())  # type: ignore[union-attr]
    assert run({"x": np.zeros((7, *X.shape[1:]), np.float32)})[0].shape == (7, 3)


def test_numbers_drawn_in_place_are_random() -> None:
    model = export(lambda x: x.clone().normal_(1.0, 2.0) + x, (X,), check=True)
    assert model is not None and model.opset_import[0].version == 21


def factor(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x)[0]


def test_the_line_is_that_of_the_function_that_calls() -> None:
    line = factor.__code__.co_firstlineno + 1
    with pytest.raises(ExportError, match=rf"aten\.linalg_qr.*test_onnx_forms\.py:{line}$"):
        export(lambda x: factor(x + 1), (torch.eye(3),))


def test_complex_numbers_come_and_go_as_their_parts() -> None:
    x, turn = torch.randn(2, 5, dtype=torch.complex64), torch.polar(torch.ones(5), torch.randn(5))
    model = export(lambda x: {"turned": x * turn, "real": x.real}, (x,), check=False)
    assert model is not None
    turned, real = load(model, compile=False)(torch.view_as_real(x))  # type: ignore[misc]
    torch.testing.assert_close(torch.view_as_complex(turned), x * turn)
    assert torch.equal(real, x.real)


def test_random_numbers_without_a_form_are_named() -> None:
    with pytest.raises(ExportError, match=r"aten\.randperm.*test_onnx_forms\.py:\d+"):
        written(lambda x: x[torch.randperm(x.shape[0])], (X,), 23)
    model = written(lambda x: F.dropout(x, 0.5, training=False) * 2, (X,), 23)
    assert [node.op_type for node in model.graph.node] == ["Mul"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("op", [torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor])
def test_bits_before_there_were_operators_for_them(op: Callable, dtype: torch.dtype) -> None:
    edges = torch.tensor([0, 1, -1, 7, -8, 2**62, -(2**63), 2**63 - 1]).to(dtype)

    def every(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return op(x[:, None], y), op(x, 6), ~x

    model = export(every, (edges, edges.flip(0)), opset=17, dynamic={"x": {0: "n"}}, check=False)
    for given in (edges, edges[2:5]):
        got = load(model)(given, edges.flip(0))
        assert all(torch.equal(a, b) for a, b in zip(got, every(given, edges.flip(0)), strict=True))
