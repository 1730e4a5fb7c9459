"""What families add to a derivative: broadcasting with symbolic sizes, dtypes, complex numbers, costs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tessera
from tessera.ir import fake
from tessera.ir.builder import Builder, aten
from tessera.ir.printer import compile_trace
from tessera.ir.record import record
from tessera.ir.types import type_of
from tessera.ops.families import promoted, sum_to
from tessera.ops.op import flops, keep_whole
from tessera.transforms.vjp import vjp

PROGRAMS = {
    "broadcast": lambda x, w: (x * w + w - x / (w * w + 1)).sin(),
    "mean": lambda x, w: (x - x.mean(-1, keepdim=True)) * w.mean(),
    "extremes": lambda x, w: x.amax(0) * w + x.max(1).values.sum(),
    "moments": lambda x, w: (x - w) / x.std(0, correction=0).add(1.0) + torch.var(x),
    "pieces": lambda x, w: torch.cat([x[:, :2], x.flip(1) * 2, x], 1).sum(1) + w.sum(),
    "reshape": lambda x, w: (x.reshape(-1).unsqueeze(0).expand(3, -1) ** 2).sum(0) * w.prod(),
    "choose": lambda x, w: torch.where(x > w, x, w).clamp(-0.5, 0.5) + x.cumsum(0),
    "norm": lambda x, w: torch.logsumexp(x * w, -1) + torch.linalg.vector_norm(x, dim=1),
}


def dynamic(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    sizes = [DimDynamic.DYNAMIC] * tensor.ndim
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_symbolic_sizes(name: str) -> None:
    """One trace serves every size, and differentiating it adds no guard."""
    program = PROGRAMS[name]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [dynamic(mode, torch.randn(5, 7)), dynamic(mode, torch.randn(7))]
    trace, _ = record(program, fakes, ["x", "w"], keep_whole, Builder("f", mode))
    before = len(mode.shape_env.guards)
    joint = vjp(trace, list(trace.inputs), mode)
    assert len(mode.shape_env.guards) == before
    run = compile_trace(joint.trace)
    for rows, columns in ((5, 7), (4, 6)):
        x = torch.randn(rows, columns, requires_grad=True)
        w = torch.randn(columns, requires_grad=True)
        want = program(x, w)
        ct = torch.randn_like(want)
        got = run(x.detach(), w.detach(), ct)
        torch.testing.assert_close(got[0], want.detach(), rtol=1e-4, atol=1e-5)
        for g, v in zip(got[1:], torch.autograd.grad(want, (x, w), ct), strict=True):
            torch.testing.assert_close(g, v, rtol=1e-3, atol=1e-4)


def check_gradients(program, *tensors: torch.Tensor) -> None:  # noqa: ANN001
    """Compare the trace's gradients with eager's, dtypes included."""
    mode = fake.default_mode()
    names = [f"x{i}" for i in range(len(tensors))]
    fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
    trace, _ = record(program, fakes, names, keep_whole, Builder("f", mode))
    wrt = [v for v in trace.inputs if v.type.is_differentiable]
    xs = [t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
    out = program(*xs)
    ct = torch.randn_like(out)
    want = torch.autograd.grad(out, [x for x in xs if x.requires_grad], ct)
    got = compile_trace(vjp(trace, wrt).trace)(*tensors, ct)[1:]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_mixed_dtypes() -> None:
    half, single, double = torch.randn(3, 4).bfloat16(), torch.randn(4), torch.randn((), dtype=torch.float64)
    check_gradients(lambda a, b: a * b + a, half, single)
    check_gradients(lambda a, b: (a + b) * b, single, double)
    check_gradients(lambda a, b: a * b, single, torch.arange(4))
    check_gradients(lambda a, b: torch.cat([a, b.to(torch.bfloat16)], 0), half[0], single)
    check_gradients(lambda a: a.sum(0, dtype=torch.float32).exp(), half)


def test_complex_numbers() -> None:
    """Derivatives declared for real numbers give way to PyTorch's; movements are their own."""
    z, x = torch.randn(3, 4, dtype=torch.complex128), torch.randn(4, dtype=torch.float64)
    check_gradients(lambda a, b: (a * b).exp(), z, x)
    check_gradients(lambda a, b: a.abs() + b, z, x)
    check_gradients(lambda a, b: torch.cat([a[1:], a.flip(0)[1:]], 1).t().reshape(-1)[::2] * b.sum(), z, x)
    check_gradients(lambda a, b: a.sum(0) / (b + 2j), z, x)


WRITES_REAL = {
    "fill": lambda z, x: z.clone().fill_(x),
    "where": lambda z, x: torch.where(z.real > 0, z, x),
    "masked_fill": lambda z, x: z.masked_fill(z.real > 0, x),
}


@pytest.mark.parametrize("name", WRITES_REAL)
@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
def test_a_real_number_among_complex_ones_has_a_real_gradient(name: str, frontend: str) -> None:
    """Eager's own formulas of these give a complex one, which autograd refuses; of a cast it takes the real part."""
    program = WRITES_REAL[name]
    z, x = torch.randn(3, 4, dtype=torch.complex128), torch.randn((), dtype=torch.float64, requires_grad=True)
    ct = torch.randn_like(z)
    with pytest.raises(RuntimeError, match="isFloatingType"):
        program(z, x).backward(ct)
    want = torch.autograd.grad(program(z, x.to(z.dtype)), x, ct)[0]
    fast = tessera.jit(program, executors=["aten"], frontend=frontend, strict=True)
    torch.testing.assert_close(torch.autograd.grad(fast(z, x), x, ct)[0], want)


def test_sum_to_is_one_sum() -> None:
    builder = Builder("f")
    big = builder.input("big", type_of(torch.empty(2, 5, 3, 4)))
    small = builder.input("small", type_of(torch.empty(5, 1, 4)))
    with builder:
        out = sum_to(big, small)
        assert sum_to(small, small) is small
    assert [e.op for e in builder.equations] == [torch.ops.aten.sum.dim_IntList, torch.ops.aten.squeeze.dims]
    x = torch.randn(2, 5, 3, 4)
    (got,) = compile_trace(builder.finish([out]))(x, torch.empty(5, 1, 4))
    torch.testing.assert_close(got, x.sum(0).sum(1, keepdim=True))


def test_promotion_is_pytorchs() -> None:
    kinds = [torch.bool, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64]
    for a in kinds:
        for b in kinds:
            for ranks in ((1, 1), (0, 1), (1, 0), (0, 0)):
                left, right = torch.empty([1] * ranks[0], dtype=a), torch.empty([1] * ranks[1], dtype=b)
                assert promoted([(a, ranks[0]), (b, ranks[1])]) == torch.result_type(left, right)


def test_costs() -> None:
    builder = Builder("f")
    x = builder.input("x", type_of(torch.empty(10, 20)))
    with builder:
        aten.add(x, x)
        aten.exp(x)
        aten.sum(x, [1])
        aten.transpose(x, 0, 1)
    assert [flops(e) for e in builder.equations] == [200.0, 1600.0, 200.0, 0.0]


def test_masked_write_has_a_second_derivative():
    mask = torch.tensor([True, False, True])

    def f(x, v):
        return (x.clone().masked_fill(~mask, 0).index_put((mask,), v) ** 3).sum()

    def g(x, v):
        return (tessera.grad(f, argnums=1)(x, v) ** 2).sum()

    x, v = torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    want = torch.func.grad(lambda v: ((3 * v**2) ** 2).sum())(v)
    torch.testing.assert_close(tessera.grad(g, argnums=1)(x, v), want)
