"""Forward and backward launch no more kernels than eager does, and draw the same random bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from torch.utils._python_dispatch import TorchDispatchMode
from whole import CASES, r

from tessera.ir.printer import compile_trace
from tessera.ir.schema import schema_of
from tessera.passes.clean.dce import dce
from tessera.transforms.jvp import jvp
from tessera.transforms.vjp import vjp

_FREE = ("detach", "alias", "empty", "empty_like", "_unsafe_view", "lift_fresh", "squeeze_", "zeros", "ones")


class Kernels(TorchDispatchMode):
    """Counts operators that move data: not views, not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        view = schema_of(func).is_view and not (isinstance(out, torch.Tensor) and func._opname == "_to_copy")
        if not view and func._opname not in _FREE:
            self.launched.append(func._opname)
        return out


def eager_kernels(fn: Callable, tensors: tuple, ct: torch.Tensor) -> list[str]:
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
    with Kernels() as counted:
        torch.autograd.grad(fn(*xs), [x for x in xs if x.requires_grad], ct, allow_unused=True)
    return counted.launched


def our_kernels(fn: Callable, tensors: tuple, ct: torch.Tensor) -> list[str]:
    trace = trace_of(fn, *tensors)
    joint = vjp(trace, [v for v in trace.inputs if v.tensor.is_float])
    compiled = compile_trace(dce(joint.trace))
    with torch.no_grad(), Kernels() as counted:
        compiled(*tensors, ct)
    return counted.launched


_SKIP = ("batch_norm evaluation", "cross_entropy weighted")  # hold a differentiable tensor still on purpose


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in CASES if n not in _SKIP])
def test_no_more_kernels_than_eager(name: str) -> None:
    c = CASES[name]
    ct = torch.randn_like(c.fn(*c.tensors))
    ours, eager = our_kernels(c.fn, c.tensors, ct), eager_kernels(c.fn, c.tensors, ct)
    assert len(ours) <= len(eager), f"ours {ours}\neager {eager}"


def test_the_same_kernels_for_a_linear_layer() -> None:
    c = CASES["linear of a batch"]
    kernels = our_kernels(c.fn, c.tensors, torch.randn(2, 4, 6, dtype=torch.float64))
    assert sorted(kernels) == ["addmm", "mm", "mm", "sum"]


def test_only_what_is_asked_for() -> None:
    trace = trace_of(lambda x, w, b: F.layer_norm(x, (5,), w, b), r(2, 5), r(5), r(5))
    joint = vjp(trace, [trace.inputs[0]])
    backward = joint.trace.equations[-1]
    assert backward.op._opname == "native_layer_norm_backward" and backward.args[-1] == [True, False, False]


@pytest.mark.parametrize("layout", ["plain", "channels_last", "transposed", "sliced"])
def test_dropout_draws_the_bits_eager_draws(layout: str) -> None:
    x = {
        "plain": torch.randn(5, 7),
        "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 9).t(),
        "sliced": torch.randn(6, 9)[:, 2:7],
    }[layout]
    trace = trace_of(lambda x: F.dropout(x, 0.3), x)
    assert [eqn.op._opname for eqn in trace.equations] == ["dropout"]
    joint = compile_trace(vjp(trace, list(trace.inputs)).trace)
    source, ct = x.clone(memory_format=torch.preserve_format).requires_grad_(), torch.randn(x.shape)
    torch.manual_seed(1)
    y = F.dropout(source.as_strided(x.shape, x.stride()) if layout != "sliced" else x.requires_grad_(), 0.3)
    (want,) = torch.autograd.grad(y, source if layout != "sliced" else x, ct)
    torch.manual_seed(1)
    got, grad = joint(x.detach(), ct)
    assert torch.equal(got, y) and torch.equal(grad, want)


def test_dropout_at_the_ends() -> None:
    x = torch.randn(4)
    for p in (0.0, 1.0):
        trace = trace_of(lambda x, p=p: F.dropout(x.sin(), p), x)
        got, grad = compile_trace(vjp(trace, list(trace.inputs)).trace)(x, torch.ones(4))
        torch.testing.assert_close(got, x.sin() * (1 - p))
        torch.testing.assert_close(grad, x.cos() * (1 - p))


def test_training_batch_norm_writes_its_statistics() -> None:
    x, w, b = r(3, 4, 5), r(4), r(4)
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    trace = trace_of(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True), x, w, b, mean, var)
    joint = vjp(trace, list(trace.inputs[:3]))
    assert len(joint.pulled) == 1, "running statistics ask for no gradient"
    ct = r(3, 4, 5)
    ours = mean.clone(), var.clone()
    got = compile_trace(joint.trace)(x, w, b, *ours, ct)
    sources = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.batch_norm(sources[0], mean, var, sources[1], sources[2], True)
    for g, e in zip(got, (y, *torch.autograd.grad(y, sources, ct)), strict=True):
        torch.testing.assert_close(g, e.detach())
    torch.testing.assert_close(ours, (mean, var))


def test_sparse_embedding_falls_back() -> None:
    w, i = torch.randn(5, 3), torch.tensor([1, 1, 4])
    trace = trace_of(lambda w, i: F.embedding(i, w, sparse=True), w, i)
    grad = compile_trace(vjp(trace, [trace.inputs[0]]).trace)(w, i, torch.ones(3, 3))[1]
    assert grad.is_sparse
    torch.testing.assert_close(grad.to_dense()[:, 0], torch.tensor([0.0, 2, 0, 0, 1]))


@pytest.mark.parametrize("cell", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, torch.nn.LSTMCell, torch.nn.GRUCell])
def test_recurrent_layers(cell: type) -> None:
    torch.manual_seed(0)
    layer = cell(4, 5)
    weights = {k: v.detach() for k, v in layer.named_parameters()}
    x = torch.randn(2, 4) if "Cell" in cell.__name__ else torch.randn(3, 2, 4)

    def fn(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(layer, dict(zip(weights, ws, strict=True)), (x,))
        return out[0] if isinstance(out, tuple) else out

    trace = trace_of(fn, x, *weights.values())
    joint = vjp(trace, list(trace.inputs))
    sources = [t.clone().requires_grad_() for t in (x, *weights.values())]
    y = fn(*sources)
    ct = torch.randn_like(y)
    got = compile_trace(dce(joint.trace))(x, *weights.values(), ct)
    for g, e in zip(got, (y, *torch.autograd.grad(y, sources, ct)), strict=True):
        torch.testing.assert_close(g, e.detach())


def test_tangent_of_attention_with_dropout() -> None:
    """The mask of the drawn forward is the mask of its tangent."""
    q, t = r(2, 5, 4), r(2, 5, 4)

    def fn(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.5)

    def at(step: float) -> torch.Tensor:
        torch.manual_seed(3)
        return fn(q + step * t)

    trace = trace_of(fn, q)
    torch.manual_seed(3)
    got, moved = compile_trace(dce(jvp(trace, list(trace.inputs))))(q, t)
    torch.testing.assert_close(got, at(0))
    torch.testing.assert_close(moved, (at(1e-6) - at(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-6)
