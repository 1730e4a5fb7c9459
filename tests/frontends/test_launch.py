"""Triton kernels launched inside a program: one equation, its writes seen, in place where they can be.

TorchDynamo captures them only where Triton finds a device, so graphs are written here by hand, and a Python function
stands where PyTorch keeps the kernel. `tests/gpu/test_launch_gpu.py` runs real ones.
"""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

import tessera
from tessera.frontends.dynamo import launch
from tessera.frontends.dynamo.graphs import capture_graph
from tessera.ir.types import type_of
from tessera.ops.launch import LAUNCH
from tessera.pipeline.compilation import compile_captured
from tessera.pipeline.options import Options
from tessera.transforms.vmap import vmap
from tessera.util.config import override
from tessera.util.errors import CaptureError, RuleError


class Kernel:
    """Looks like a Triton kernel to PyTorch's wrapper: indexed by a grid, called with arguments."""

    def __init__(self, fn, names: list[str], writes: list[str]) -> None:  # noqa: ANN001
        self.fn, self.arg_names, self.writes, self.launches = fn, names, writes, []

    def __getitem__(self, grid):  # noqa: ANN001, ANN204
        def run(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            self.launches.append(args)
            given = dict(zip(self.arg_names, args, strict=False)) | kwargs
            self.fn(**given)

        return run


def _add(x, y, out, n):  # noqa: ANN001, ANN202
    out.view(-1)[:n] = x.view(-1)[:n] + y.view(-1)[:n]


def _double(x):  # noqa: ANN001, ANN202
    x.mul_(2)


ADD = Kernel(_add, ["x", "y", "out", "n"], ["out"])
DOUBLE = Kernel(_double, ["x"], ["x"])


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201
    """PyTorch's analysis of what a kernel writes needs Triton's compiler; these kernels say it themselves."""
    kernels = {7001: ADD, 7002: DOUBLE}
    ADD.launches.clear(), DOUBLE.launches.clear()
    plain = kernel_side_table.get_kernel
    monkeypatch.setattr(kernel_side_table, "get_kernel", lambda i: kernels.get(i) or plain(i))
    monkeypatch.setattr(launch, "get_mutated_tensors", lambda i, c, kwargs, d: kernels[i].writes)
    with override(strict=True, verify=True):
        yield


def graph_of(build, *inputs: torch.Tensor) -> torch.fx.GraphModule:  # noqa: ANN001
    """A graph as Dynamo hands it over: `build(graph, nodes)` gives the outputs."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    graph.output(tuple(build(graph, nodes)))
    return torch.fx.GraphModule({}, graph)


def call(graph: torch.fx.Graph, kernel: int, **kwargs: object) -> None:
    constants = kernel_side_table.add_constant_args({})
    graph.call_function(
        triton_kernel_wrap.triton_kernel_wrapper_mutation,
        kwargs={
            "kernel_idx": kernel,
            "constant_args_idx": constants,
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": kwargs,
        },
    )


def compiled(build, *inputs: torch.Tensor):  # noqa: ANN001, ANN201
    gm = graph_of(build, *inputs)
    captured = capture_graph(gm, list(inputs))
    fn, compilation = compile_captured(captured, gm, "launch", Options(("aten",)))
    return fn, compilation


def add(graph: torch.fx.Graph, nodes: list) -> list:
    out = graph.call_function(torch.empty_like, (nodes[0],))
    call(graph, 7001, x=nodes[0], y=nodes[1], out=out, n=12)
    return [graph.call_function(torch.mul, (out, 3))]


def final(compilation) -> str:  # noqa: ANN001
    return str(compilation.account.stages[-1][1])


def test_one_equation_that_writes_a_fresh_tensor() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    fn, compilation = compiled(add, x, y)
    torch.testing.assert_close(fn(x, y)[0], (x + y) * 3)
    assert "tessera.launch(" in final(compilation) and "over=['out']" in final(compilation)
    captured = str(compilation.captured.trace)  # nothing but what the program does
    assert "empty_strided" not in captured and "clone" not in captured
    assert len(ADD.launches) == 1


def test_an_input_is_written_in_place() -> None:
    def build(graph: torch.fx.Graph, nodes: list) -> list:
        before = graph.call_function(torch.sum, (nodes[0],))
        call(graph, 7002, x=nodes[0])
        return [before, graph.call_function(torch.add, (nodes[0], 1))]

    x = torch.randn(5)
    fn, compilation = compiled(build, x)
    mine, old = x.clone(), x.sum()
    got = fn(mine)
    torch.testing.assert_close(mine, 2 * x)
    torch.testing.assert_close(got[0], old)
    torch.testing.assert_close(got[1], 2 * x + 1)
    assert "over=['x']" in final(compilation) and "copy_" not in final(compilation)
    assert DOUBLE.launches[0][0] is mine


def test_old_contents_that_are_read_later_stay() -> None:
    def build(graph: torch.fx.Graph, nodes: list) -> list:
        y = graph.call_function(torch.mul, (nodes[0], 1.0))
        kept = graph.call_method("clone", (y,))
        call(graph, 7002, x=y)
        return [graph.call_function(torch.add, (kept, y))]

    x = torch.randn(5)
    fn, _ = compiled(build, x)
    torch.testing.assert_close(fn(x)[0], 3 * x)


def test_views_see_what_a_kernel_wrote() -> None:
    def build(graph: torch.fx.Graph, nodes: list) -> list:
        y = graph.call_function(torch.mul, (nodes[0], 1.0))
        row = graph.call_method("select", (y, 0, 1))
        call(graph, 7002, x=row)
        return [graph.call_function(torch.add, (y, 0))]

    x = torch.randn(3, 4)
    want = x.clone()
    want[1] *= 2
    fn, _ = compiled(build, x)
    torch.testing.assert_close(fn(x)[0], want)


def test_autograd_does_not_see_the_write() -> None:
    """As in eager: what was written keeps the history it had."""

    def build(graph: torch.fx.Graph, nodes: list) -> list:
        y = graph.call_function(torch.mul, (nodes[0], 5.0))
        call(graph, 7002, x=y)
        return [graph.call_function(torch.mul, (y, 3.0))]

    x = torch.randn(4, requires_grad=True)
    fn, _ = compiled(build, x)
    (y,) = fn(x)
    torch.testing.assert_close(y.detach(), x.detach() * 30)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 15.0))


def test_one_tensor_for_two_parameters() -> None:
    def build(graph: torch.fx.Graph, nodes: list) -> list:
        y = graph.call_function(torch.mul, (nodes[0], 1.0))
        call(graph, 7001, x=y, y=nodes[1], out=y, n=5)
        return [y]

    x, r = torch.randn(5), torch.randn(5)
    fn, _ = compiled(build, x, r)
    torch.testing.assert_close(fn(x, r)[0], x + r)


def test_what_cannot_be_captured_says_why() -> None:
    def build(graph: torch.fx.Graph, nodes: list) -> list:
        y = graph.call_function(torch.mul, (nodes[0], 1.0))
        part = graph.call_method("narrow", (y, 0, 0, 3))
        call(graph, 7001, x=part, y=nodes[0], out=y, n=3)
        return [y]

    x = torch.randn(6)
    with pytest.raises(CaptureError, match="arguments out and x of a Triton kernel share memory"):
        compiled(build, x)


def test_vmap_names_what_to_do() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    captured = capture_graph(graph_of(add, x, y), [x, y])
    assert any(eqn.op is LAUNCH for eqn in captured.trace.equations)
    rows = {v: (type_of(torch.empty(2, 3, 4)), 0) for v in captured.trace.inputs}
    with pytest.raises(RuleError, match="tessera.register_kernel"):
        vmap(captured.trace, rows, 2, captured.mode)


@pytest.mark.parametrize("dynamic", [None, True])
def test_as_dynamo_hands_it_over(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel, captured as where a device is; what runs is again a Python function."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
    kernel = triton.jit(_add)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        kernel[(triton.cdiv(n, 16),)](x * 2, y, out, n)
        return out + 1

    monkeypatch.setattr(launch, "get_mutated_tensors", lambda *_: ["out"])
    monkeypatch.setattr(kernel_side_table, "get_kernel", lambda _: ADD)
    torch._dynamo.reset()
    fast = tessera.jit(program, dynamic=dynamic)
    for n in (40, 72):
        x, y = torch.randn(n), torch.randn(n)
        torch.testing.assert_close(fast(x, y), 2 * x + y + 1)
    assert "tessera.launch(" in str(tessera.stages(fast)[-1].trace)
    assert len(ADD.launches) == 2 and len(tessera.stages(fast)) > 3
