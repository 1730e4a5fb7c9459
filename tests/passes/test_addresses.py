"""Views that only kernels read are not made: kernels find them by their addresses. Results are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import copies, random_program, trace_of
from torch import Tensor

import tessera
from tessera.executors import tile
from tessera.executors.aten import bind
from tessera.executors.claim import claim
from tessera.ir.equation import substitute
from tessera.ir.interp import run
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.ir.starts import starts
from tessera.ir.trace import Trace
from tessera.passes.memory.addresses import addresses
from tessera.passes.memory.reinplace import reinplace
from tessera.passes.memory.schedule import schedule
from tessera.util.config import override


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "select": lambda x: x.select(1, 2),
    "select from the end": lambda x: x.select(-1, -2),
    "slice": lambda x: x[:, 1:3],
    "slice from the end": lambda x: x[..., -3:],
    "slice with steps": lambda x: x[:, 1::2],
    "slice beyond": lambda x: x[1:100],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split(2, dim=2),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "split with sizes": lambda x: x.split((1, 3, 1), dim=2),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(3, 4, 5),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "reshape": lambda x: x.reshape(6, 10),
    "of a view": lambda x: x[1].t(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_where_a_view_begins(name: str) -> None:
    """As PyTorch says it, of every view in a program."""
    x = torch.randn(3, 4, 5)
    trace = trace_of(VIEWS[name], x)
    values = {trace.inputs[0]: x}
    for eqn in trace.equations:
        (source,) = eqn.inputs()
        args, kwargs = substitute((eqn.args, eqn.kwargs), values)  # type: ignore[arg-type]
        out = eqn.op(*args, **kwargs)
        parts = out if isinstance(out, (list, tuple)) else [out]
        offsets = [part.storage_offset() - values[source].storage_offset() for part in parts]
        assert starts(eqn) == offsets
        values |= dict(zip(eqn.results(), parts, strict=True))


def test_what_may_copy_or_computes_has_no_start() -> None:
    x = torch.randn(3, 4)
    for fn in (
        lambda x: x.t().reshape(12),
        lambda x: x.exp(),
        lambda x: x.to(torch.float64),
        lambda x: x.t().contiguous(),
    ):
        assert starts(trace_of(fn, x).equations[-1]) == []


def final(fast: object, name: str) -> Trace:
    return next(s.trace for s in tessera.stages(fast) if s.name == name)


def views(trace: Trace) -> int:
    return sum(bool(starts(eqn)) for eqn in trace.equations)


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    """Rows of x one after the other; each state is a library's operand in another shape."""
    state, total = torch.zeros_like(x[0]), x.new_zeros(())
    for row in x.unbind(0):
        state = (state * w + row).tanh()
        total = total + (state.reshape(-1, 4) @ w[:4, :4]).square().sum()
    return total + (x[:, 1:].exp() * x[:, :-1]).sum() + (x.reshape(6, -1).t() * 2).sin().sum()


@pytest.mark.parametrize("strided", [False, True])
def test_views_are_not_made(strided: bool) -> None:
    """The second call brings another layout than the first: what kernels read is then copied, and right."""
    fast = tessera.jit(recurrent, executors=["tile", "aten"], strict=True)
    w = torch.randn(8, 8, requires_grad=True)
    for turned in (False, strided):
        x = (torch.randn(8, 8, 6).permute(2, 0, 1) if turned else torch.randn(6, 8, 8)).requires_grad_()
        got, want = fast(x, w), recurrent(x, w)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)), strict=True):
            torch.testing.assert_close(a, b)
    for name in ("forward lay_out", "backward lay_out"):
        before = final(fast, name)
        after = addresses(before)
        assert views(after) < views(before) / 2 and addresses(after) is after


def test_a_kernel_writes_the_shape_that_is_read() -> None:
    fast = tessera.jit(lambda x, w: (x.sin() * 2).reshape(-1, 8) @ w, executors=["tile", "aten"], strict=True)
    x, w = torch.randn(4, 6, 8), torch.randn(8, 8)
    torch.testing.assert_close(fast(x, w), (x.sin() * 2).reshape(-1, 8) @ w)
    last = list(tessera.stages(fast))[-1].trace
    after = addresses(last)
    assert views(last) == 1 and views(after) == 0
    assert [v.shape for v in after.equations[0].results()] == [(24, 8)]


@pytest.mark.parametrize("view", [lambda y: y.transpose(0, 1), lambda y: y.t(), lambda y: y[1]])
def test_a_shape_that_is_read_beside_views_of_the_region(view: Callable) -> None:
    """A region gives a result and a view of it: the view is of the result as the region knows it."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).sin()
        z = view(y)
        return z, (z + x).exp(), torch.bmm(y.unsqueeze(0), w)

    x, w = torch.randn(4, 4), torch.randn(1, 4, 4)
    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    torch.testing.assert_close(fast(x, w), fn(x, w))
    last = list(tessera.stages(fast))[-1].trace
    assert views(addresses(last)) < views(last)


def test_what_leaves_the_program_is_made() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2 + 1
        return y[0], y[1].exp(), y.t()

    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    x = torch.randn(4, 6)
    for got, want in zip(fast(x), fn(x), strict=True):
        torch.testing.assert_close(got, want)
        assert got.shape == want.shape and got.stride() == want.stride()


def test_writes_through_parts() -> None:
    """Rows of an input are updated in place, by kernels."""

    def fn(state: Tensor, x: Tensor) -> Tensor:
        for i in range(3):
            state[i].mul_(0.5).add_(x[i].tanh())
        return (state[1] * x[2]).sum()

    fast = tessera.jit(fn, executors=["tile", "aten"], strict=True)
    x, state = torch.randn(3, 40), torch.randn(3, 40)
    twin = state.clone()
    for _ in range(2):
        torch.testing.assert_close(fast(state, x), fn(twin, x))
        torch.testing.assert_close(state, twin)


def test_programs_that_are_checked_keep_their_views() -> None:
    """Contracts compare what every equation gives with its type."""
    x, w = torch.randn(6, 8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with override(verify=True):
        fast = tessera.jit(recurrent, executors=["tile", "aten"], strict=True)
        torch.testing.assert_close(fast(x, w), recurrent(x, w))


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_random_programs(seed: int) -> None:
    """Programs that view, write and repeat give the same, and leave the same in their arguments."""
    program, args = random_program(seed, length=20)
    final = reinplace(schedule(claim(tile.decompose(trace_of(program, *args)), ["tile", "aten"])[0]))
    after = addresses(final)
    left, right = copies(args), copies(args)
    torch.manual_seed(0)
    want = run(final, *left)
    torch.manual_seed(0)
    got = compile_trace(after, bind=bind, dead=lifetimes(after))(*right)
    torch.testing.assert_close([*got, *right], [*want, *left], equal_nan=True)
