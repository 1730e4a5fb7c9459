"""What kernels give is held to the types of the trace; what nobody promises is laid out again before it is read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of

import tessera
from tessera.executors.aten import bind
from tessera.ir.equation import Equation, Special
from tessera.ir.printer import compile_trace
from tessera.ir.strides import LAID_OUT, laid_out
from tessera.ir.trace import Trace
from tessera.passes.memory.lay_out import lay_out
from tessera.runtime.contracts import checked_inputs, contracts
from tessera.util.errors import ContractError


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def checked(trace: Trace):  # noqa: ANN201
    around, names = contracts(trace)
    run = compile_trace(trace, bind=bind, around=around, names_in_scope=names)
    return checked_inputs(trace, run, boxed=False)


def with_kernel(trace: Trace, name: str, fn) -> Trace:  # noqa: ANN001
    """The trace with another kernel behind one of its operators."""

    def swapped(eqn: Equation) -> Equation:
        return eqn.with_(op=Special(name, fn, namespace="test")) if name in str(eqn.op) else eqn

    return trace.with_(equations=tuple(map(swapped, trace.equations)))


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x, 0).tanh()


LIES = {
    "strides": (lambda x, d: torch.cumsum(x, d).t().contiguous().t(), r"of strides \[4, 1\], got \[1, 3\]"),
    "shape": (lambda x, d: torch.cumsum(x, d)[:2], r"\[3, 4\], got \[2, 4\]"),
    "dtype": (lambda x, d: torch.cumsum(x, d).double(), "float32, got torch.float64"),
    "device": (lambda x, d: torch.cumsum(x, d).to("meta"), "on cpu, got meta"),
    "nothing": (lambda x, d: None, "got nothing"),
    "a number": (lambda x, d: 3, "got int"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_kernel_that_gives_something_else(lie: str) -> None:
    fn, message = LIES[lie]
    trace = with_kernel(trace_of(two, torch.randn(3, 4)), "cumsum", fn)
    with pytest.raises(ContractError, match=message) as caught:
        checked(trace)(torch.randn(3, 4))
    assert "cumsum is said to be" in str(caught.value) and "test_contracts.py" in str(caught.value)


def test_shared_memory() -> None:
    """New memory must be new, a view must be one."""
    aten = torch.ops.aten
    trace = trace_of(lambda x: x.cumsum(0).t().tanh(), torch.randn(3, 4))
    around, names = contracts(trace)
    x = torch.randn(3, 4)
    lies = {
        aten.cumsum.default: (lambda x, d: x, "cumsum is said to be new memory, got that of x0"),
        aten.t.default: (lambda x: x.t().clone(), "t is said to be a view of cumsum, got new memory"),
        aten.tanh.default: (lambda x: torch.zeros(2, 3, 4)[1].t(), "the beginning of new memory, got what"),
    }
    for op, (fn, message) in lies.items():
        run = compile_trace(
            trace, bind=lambda o, op=op, fn=fn: fn if o is op else bind(o), around=around, names_in_scope=names
        )
        with pytest.raises(ContractError, match=message):
            run(x)


def test_a_view_begins_where_it_is_said_to() -> None:
    """Programs make views of views at once, by these starts."""
    aten = torch.ops.aten
    trace = trace_of(lambda x: x.cumsum(0)[1].tanh(), torch.randn(3, 4))
    around, names = contracts(trace)
    for row in (1, 2):
        bound = {aten.select.int: lambda x, d, i, row=row: x.select(d, row)}
        run = compile_trace(trace, bind=lambda o: bound.get(o) or bind(o), around=around, names_in_scope=names)  # noqa: B023
        if row == 1:
            run(torch.randn(3, 4))
        else:
            with pytest.raises(ContractError, match="4 elements after the start of cumsum, got 8"):
                run(torch.randn(3, 4))


def test_strides_that_tell_nothing() -> None:
    """Of dimensions of one element, and of no elements."""
    trace = with_kernel(
        trace_of(two, torch.randn(1, 4)), "cumsum", lambda x, d: torch.cumsum(x, d).as_strided((1, 4), (77, 1))
    )
    checked(trace)(torch.randn(1, 4))
    trace = with_kernel(trace_of(two, torch.randn(0, 4)), "cumsum", lambda x, d: torch.empty(4, 0).t())
    checked(trace)(torch.randn(0, 4))


def test_inputs() -> None:
    run = checked(trace_of(two, torch.randn(3, 4)))
    run(torch.randn(3, 4))
    with pytest.raises(ContractError, match=r"the input x0 is said to be of strides \[4, 1\], got \[1, 3\]"):
        run(torch.randn(4, 3).t())


def test_symbolic_sizes_are_computed() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x.transpose(0, 1).reshape(-1) * 2, 0)

    with tessera.override(verify=True):
        fast = tessera.jit(f, strict=True, dynamic=True)
        for size in (3, 5, 7):
            x = torch.randn(size, size + 1)
            torch.testing.assert_close(fast(x), f(x))


def test_sizes_that_only_the_run_knows() -> None:
    with tessera.override(verify=True), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = tessera.jit(lambda x: x.nonzero() * 2, strict=True)
        x = torch.tensor([0, 3, 0, 4, 5])
        assert torch.equal(fast(x), x.nonzero() * 2)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
def test_cotangents_of_any_layout(layout: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((x @ w).tanh(), (6,))

    ct = {
        "contiguous": lambda: torch.randn(4, 6),
        "strided": lambda: torch.randn(6, 8)[:, ::2].t(),
        "expanded": lambda: torch.randn(6).expand(4, 6),
    }[layout]()
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    want = torch.autograd.grad(f(x, w), (x, w), ct)
    with tessera.override(verify=True):
        got = torch.autograd.grad(tessera.jit(f, strict=True)(x, w), (x, w), ct)
    torch.testing.assert_close(got, want)


def test_nothing_is_there_without_the_flag() -> None:
    fast = tessera.jit(lambda x: x.sin() + 1, strict=True)
    fast(torch.randn(3))
    assert "contract" not in fast.__tessera__.compilations()[0].account.programs[0].run.source


def test_a_write_into_a_part() -> None:
    """What is scattered into a part of a tensor is a copy of the whole memory, of which the result is that part."""

    def f(x: torch.Tensor) -> torch.Tensor:
        part = x.split([1, 3])[1]
        part[0] = 7.0
        return part * 2

    with tessera.override(verify=True):
        x, y = torch.zeros(4, 4), torch.zeros(4, 4)
        assert torch.equal(tessera.jit(f, strict=True, executors=["aten"])(x), f(y)) and torch.equal(x, y)


# --- what nobody promises ---


@torch.library.custom_op("tessera_test::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).mT.contiguous().mT  # another order of dimensions than the fake says


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@pytest.mark.parametrize("executors", [["aten"], ["tile", "aten"]], ids=["aten", "tile"])
def test_a_library_that_lays_out_otherwise(executors: list[str]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (turned(x) + x).view(-1).exp()

    x = torch.randn(5, 7)
    for verify in (False, True):
        torch._dynamo.reset()
        with tessera.override(verify=verify):
            got = tessera.jit(f, strict=True, executors=executors)(x)
        torch.testing.assert_close(got, (3 * x).view(-1).exp())


def test_only_what_somebody_reads_is_looked_at() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(x, w), w).sum()

    trace = lay_out(trace_of(f, torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)))
    assert [str(e.op).split(".")[1] for e in trace.equations] == ["conv2d", "conv2d", "laid_out", "sum"]
    plain = trace_of(two, torch.randn(3, 4))
    assert lay_out(plain) is plain


def test_laid_out() -> None:
    x = torch.randn(3, 4)
    assert laid_out(x, (4, 1)) is x and LAID_OUT.fn is laid_out
    assert laid_out(x[:1], (77, 1)).data_ptr() == x.data_ptr()
    made = laid_out(x, (1, 3))
    assert made.stride() == (1, 3) and torch.equal(made, x)


def test_an_input_that_nothing_reads_may_be_a_stand_in() -> None:
    """What flows between results is asked of a graph whose argument is gone."""
    fast = tessera.jit(lambda x: (x.tanh(), x.tanh().exp()), strict=True)
    leaf = torch.randn(4, 4, requires_grad=True)
    with tessera.override(verify=True):
        inner, outer = fast(leaf * 1)
        (got,) = torch.autograd.grad(outer.sum(), inner, retain_graph=True, allow_unused=True)
        assert got is None
        result, outer = tessera.jit(lambda x: (y := x.tanh(), y.exp()), strict=True)(leaf * 1)
        (got,) = torch.autograd.grad(outer.sum(), result)
    torch.testing.assert_close(got, outer.detach())
