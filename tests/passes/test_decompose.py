"""Operators in parts: the same values and types, every part one that kernels hold, names as before."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import on_cuda, trace_of
from torch.testing import assert_close

import tessera
from tessera.ir.equation import Equation
from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.passes.decompose.apply import decompose
from tessera.passes.decompose.loss import CLASS_LOGIT
from tessera.tile.from_trace.region import why_not

aten = torch.ops.aten
torch.manual_seed(0)
X, G, IMAGE = torch.randn(6, 5, 16), torch.randn(6, 5, 16), torch.randn(2, 8, 3, 4)
W, B = torch.randn(16), torch.randn(16)
ROWS, TARGET = torch.randn(7, 10), torch.tensor([1, 9, 0, 3, -100, 2, 2])
SHARE = torch.rand(10)
MEAN, RSTD = X.mean(-1, True), torch.rsqrt(X.var(-1, correction=0, keepdim=True) + 1e-5)


def holds(eqn: Equation) -> bool:
    return not why_not(eqn)


CASES: dict[str, tuple[Callable, tuple]] = {
    "softmax": (lambda x: F.softmax(x, -1), (X,)),
    "softmax in the middle": (lambda x: F.softmax(x, 1), (X,)),
    "softmax to double": (lambda x: F.softmax(x, -1, dtype=torch.float64), (X,)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (X,)),
    "_softmax": (lambda x: aten._softmax(x, -1, False), (X,)),
    "_safe_softmax": (lambda x: aten._safe_softmax(x, -1), (X.masked_fill(X < 1.5, -torch.inf),)),
    "_safe_softmax in the middle": (lambda x: aten._safe_softmax(x, 1), (X.masked_fill(X < 0.5, -torch.inf),)),
    "_softmax_backward_data": (lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32), (G, X)),
    "_log_softmax_backward_data": (
        lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, torch.float32),
        (G, X),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), (X, W, B)),
    "layer_norm without weights": (lambda x: F.layer_norm(x, (5, 16)), (X,)),
    "native_layer_norm": (lambda x, w, b: aten.native_layer_norm(x, [16], w, b, 1e-5), (X, W, B)),
    "native_layer_norm_backward": (
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [16], m, r, w, b, [True, True, True]),
        (G, X, MEAN, RSTD, W, B),
    ),
    "native_layer_norm_backward of the input": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [16], m, r, w, None, [True, False, False])[0],
        (G, X, MEAN, RSTD, W),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w, 1e-6), (X, W)),
    "rms_norm with its own epsilon": (lambda x: F.rms_norm(x, (16,)), (X,)),
    "group_norm": (lambda x: F.group_norm(x, 4, torch.arange(8.0), torch.ones(8)), (IMAGE,)),
    "native_group_norm": (lambda x: aten.native_group_norm(x, None, None, 2, 8, 12, 4, 1e-5), (IMAGE,)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2).sin(), (IMAGE,)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2).sin(), (torch.randn(2, 3, 4, 6),)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), (ROWS, TARGET)),
    "cross_entropy with weights": (lambda x, t, w: F.cross_entropy(x, t, w), (ROWS, TARGET, SHARE)),
    "cross_entropy of every row": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (ROWS, TARGET)),
    "cross_entropy summed": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (ROWS, TARGET)),
    "nll_loss_forward": (lambda x, t: aten.nll_loss_forward(x, t, None, 1, -100), (ROWS, TARGET)),
    "nll_loss_backward": (
        lambda g, x, t, n: aten.nll_loss_backward(g, x, t, None, 1, -100, n),
        (torch.tensor(1.5), ROWS, TARGET, torch.tensor(6.0)),
    ),
    "nll_loss_backward of every row": (
        lambda g, x, t, w, n: aten.nll_loss_backward(g, x, t, w, 0, -100, n),
        (torch.randn(7), ROWS, TARGET, SHARE, torch.tensor(0.0)),
    ),
    "mse_loss": (lambda a, b: F.mse_loss(a, b), (X, G)),
    "mse_loss_backward": (lambda g, a, b: aten.mse_loss_backward(g, a, b, 1), (torch.tensor(2.0), X, G)),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b), (X, G)),
    "huber_loss": (lambda a, b: F.huber_loss(a, b, delta=0.5), (X, G)),
    "glu": (lambda x: F.glu(x), (X,)),
    "binary_cross_entropy_with_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, torch.sigmoid(b)),
        (X, G),
    ),
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v, m, v), (IMAGE, torch.randn(8), torch.rand(8) + 0.1)),
    "batch_norm in evaluation": (
        lambda x, m, v: aten._native_batch_norm_legit_no_training(x, None, None, m, v, 0.1, 1e-5)[0],
        (IMAGE, torch.randn(8), torch.rand(8) + 0.1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_compute_the_same(name: str) -> None:
    fn, args = CASES[name]
    before = trace_of(fn, *args)
    after = decompose(before, holds)
    verify(after)
    outside = [CLASS_LOGIT]  # it checks its indices, as a kernel cannot
    assert not [eqn.op for eqn in after.equations if why_not(eqn) and eqn.op not in outside]
    assert [v.name for v in after.outputs] == [v.name for v in before.outputs]
    for expected, got in zip(run(before, *args), run(after, *args), strict=True):
        assert expected.dtype == got.dtype and expected.stride() == got.stride()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple:
        return F.layer_norm(x, (16,), w), F.softmax(x, -1), F.rms_norm(x, (16,), w, 1e-5)

    args = X.to(dtype), W.to(dtype)
    before = trace_of(program, *args)
    after = verify(decompose(before, holds))
    assert len(after.equations) > len(before.equations) and not [e.op for e in after.equations if why_not(e)]
    for expected, got in zip(run(before, *args), run(after, *args), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


PRODUCTS = ("mm", "bmm", "matmul")


def test_products_over_a_depth_of_one_are_multiplications() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple:
        return torch.mm(a, b), torch.bmm(a[None], b[None]), a[None] @ b, torch.mm(a.t(), a), a @ b[0]

    args = torch.randn(5, 1), torch.randn(1, 1)
    before = trace_of(program, *args)
    after = verify(decompose(before, lambda eqn: eqn.opname not in PRODUCTS))
    made = [eqn.opname for eqn in after.equations if eqn.opname in (*PRODUCTS, "mul")]
    assert made == ["mul", "mul", "mul", "mm", "matmul"]
    for expected, got in zip(run(before, *args), run(after, *args), strict=True):
        assert expected.stride() == got.stride()
        assert_close(got, expected, rtol=0, atol=0)


def test_results_keep_their_strides() -> None:
    x = X.transpose(0, 1)
    before = trace_of(lambda x: F.layer_norm(x, (16,)), x)
    after = verify(decompose(before, holds))
    assert run(after, x)[0].stride() == run(before, x)[0].stride()


def test_symbolic_sizes() -> None:
    before = trace_of(lambda x, w: F.layer_norm(F.softmax(x, 0), (16,), w), X, W, dynamic=(0,))
    after = verify(decompose(before, holds))
    assert len(after.equations) > len(before.equations)
    for n in (2, 6, 9):
        x = torch.randn(n, 5, 16)
        torch.testing.assert_close(run(after, x, W)[0], run(before, x, W)[0], rtol=1e-4, atol=1e-5)


def test_rows_without_elements_stay_whole() -> None:
    """They have no largest element."""
    x = torch.zeros(3, 0)
    after = verify(decompose(trace_of(lambda x: (F.softmax(x, -1), F.log_softmax(x, 1)), x), holds))
    assert [e.op._opname for e in after.equations] == ["softmax", "log_softmax"]
    assert all(y.shape == (3, 0) for y in run(after, x))


def test_groups_of_an_empty_batch() -> None:
    x = torch.zeros(0, 6, 5)
    after = verify(decompose(trace_of(lambda x: F.group_norm(x, 2), x), holds))
    assert run(after, x)[0].shape == (0, 6, 5)


def test_what_kernels_cannot_hold_stays_whole() -> None:
    trace = trace_of(lambda x, w: F.softmax(F.linear(x, w), -1), X, torch.randn(4, 16))
    assert decompose(trace, lambda eqn: False) is trace
    assert [e.op._opname for e in decompose(trace, holds).equations][:1] == ["linear"]
    product = trace_of(lambda x: x @ x.transpose(1, 2), X)
    assert decompose(product, holds) is product


def test_parts_say_where_they_come_from() -> None:
    trace = trace_of(lambda x: F.softmax(x, -1), X)
    assert {e.source for e in decompose(trace, holds).equations} == {trace.equations[0].source}


@pytest.mark.parametrize(
    "fn",
    [F.logsigmoid, torch.ops.aten.log_sigmoid_forward, lambda x: F.binary_cross_entropy_with_logits(x, x)],
    ids=["logsigmoid", "both results", "loss"],
)
def test_an_empty_result_on_a_gpu_keeps_nothing_whole(fn: Callable) -> None:
    trace = decompose(on_cuda(fn, (64, 128)), holds)
    assert {eqn.opname for eqn in trace.equations}.isdisjoint(
        {"log_sigmoid_forward", "binary_cross_entropy_with_logits"}
    )
    verify(trace)


@pytest.mark.parametrize("loss", [F.huber_loss, F.binary_cross_entropy, torch.heaviside])
def test_what_kernels_refuse_by_dtype_is_refused(loss: Callable) -> None:
    x, labels = torch.rand(4), torch.ones(4, dtype=torch.int64)
    with pytest.raises(RuntimeError) as eager:
        loss(labels, x)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        tessera.jit(lambda *args: loss(*args))(labels, x)
    assert_close(tessera.jit(lambda *args: loss(*args))(x, labels.to(x.dtype)), loss(x, labels.to(x.dtype)))
