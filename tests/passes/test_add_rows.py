"""Rows added at shared indices: the same sums and gradients, the indices sorted once, other programs left alone."""

from __future__ import annotations

import pytest
import torch
from programs import trace_of
from torch import Tensor

import tessera
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.passes.clean.cse import cse
from tessera.passes.decompose import add_rows as passes
from tessera.passes.decompose import embedding_bags

NODES, EDGES = 50, 400


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU and small tensors large."""
    for module in (passes, embedding_bags):
        monkeypatch.setattr(module, "DEVICES", ("cpu",))
        monkeypatch.setattr(module, "LARGE", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)


def count(trace: Trace, name: str) -> int:
    return sum(eqn.opname == name for eqn in trace.equations)


def rewritten(fn, *args: Tensor) -> Trace:  # noqa: ANN001
    """The program after the pass, which must compute what it did."""
    trace = trace_of(fn, *args)
    after = cse(passes.add_rows(trace))
    for got, want in zip(run(after, *args), run(trace, *args), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    return after


def messages(x: Tensor, e: Tensor, source: Tensor, target: Tensor) -> Tensor:
    for _ in range(3):
        e = (x[source] * x[target] + e).tanh()
        x = x + torch.zeros_like(x).index_add(0, target, e)
    return x.square().mean()


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_messages_along_edges(shape: tuple[int, ...]) -> None:
    """Forward and backward share one order of the edges; negative indices count from the end; some nodes have none."""
    source, target = torch.randint(-NODES, NODES - 5, (EDGES,)), torch.randint(NODES - 3, (EDGES,))
    x, e = (torch.randn(n, *shape, requires_grad=True) for n in (NODES, EDGES))
    fast = tessera.jit(messages, executors=["tile", "aten"], strict=True)
    got, want = fast(x, e, source, target), messages(x.double(), e.double(), source, target)
    torch.testing.assert_close(got.double(), want)
    for a, b in zip(torch.autograd.grad(got, (x, e)), torch.autograd.grad(want, (x, e)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    joint = next(s.trace for s in tessera.stages(fast) if s.name == "joint cse")
    assert count(joint, "sort") == count(joint, "searchsorted") == 2  # of sources and of targets
    assert count(joint, "bag_sum") == 9
    assert count(joint, "index_put") == count(joint, "index_add") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_what_was_there_before_stays(dtype: torch.dtype, kind: torch.dtype) -> None:
    x, y, a = torch.randn(NODES, 6).to(dtype), torch.randn(NODES, 6).to(dtype), torch.randn(20, 6).to(dtype)
    index = torch.randperm(NODES)[:20].to(kind)  # no place twice: every order gives the same sums

    def added(x: Tensor, y: Tensor, a: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x.index_add(0, index, a), y.index_add(0, index, -a)

    after = rewritten(added, x, y, a, index)
    assert count(after, "bag_sum") == 2 and count(after, "add") == 2


def test_a_bag_is_rounded_once() -> None:
    index, rows = torch.zeros(1000, dtype=torch.int64), torch.full((1000, 4), 0.01).bfloat16()

    def added(x: Tensor, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(x)
        return zeros.index_put((index,), rows, True), zeros.index_put((index,), -rows, True)

    trace = trace_of(added, torch.zeros(2, 4).bfloat16(), index, rows)
    more, less = run(passes.add_rows(trace), torch.zeros(2, 4).bfloat16(), index, rows)
    exact = (rows[0, 0].double() * 1000).bfloat16().item()
    assert (more[0] == exact).all() and (less[0] == -exact).all() and not more[1].any()


def test_programs_that_are_left_alone() -> None:
    x, rows, index = torch.randn(NODES, 6), torch.randn(20, 6), torch.randperm(NODES)[:20]
    other = torch.randperm(NODES)[:20]

    def same(fn) -> bool:  # noqa: ANN001
        trace = trace_of(fn, x, rows, index, other)
        return passes.add_rows(trace) is trace

    assert same(lambda x, a, i, j: x.index_add(0, i, a))  # sorted for this one alone
    assert same(lambda x, a, i, j: (x.index_add(0, i, a), x.index_add(0, j, a)))
    assert same(lambda x, a, i, j: (x.index_add(0, i, a, alpha=2), x.index_add(0, i, a, alpha=3)))
    assert same(lambda x, a, i, j: (x.index_put((i,), a), x.index_put((i,), a + 1)))  # nothing is added
    assert same(lambda x, a, i, j: (x.t().index_add(1, i, a.t()), x.t().index_add(1, i, -a.t())))
    assert same(lambda x, a, i, j: (x.index_put((i,), a[0], True), x.index_put((i,), a[1], True)))


@pytest.mark.parametrize("wrong", [NODES, NODES + 7, -1])
def test_an_index_out_of_range_is_refused(wrong: int) -> None:
    """Bags alone would leave such rows out. An `index_put` counts from the end, as in eager, an `index_add` does not"""

    def added(a: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return a.new_zeros(NODES, 6).index_add(0, index, a), a.new_zeros(NODES, 6).index_add(0, index, -a)

    def both(a: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        put = a.new_zeros(NODES, 6).index_put((index,), a, accumulate=True)
        return put, a.new_zeros(NODES, 6).index_add(0, index, a)

    def put(a: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        zeros = a.new_zeros(NODES, 6)
        return zeros.index_put((index,), a, accumulate=True), zeros.index_put((index,), -a, accumulate=True)

    a, index = torch.randn(20, 6), torch.randint(NODES, (20,))
    index[3] = wrong
    for fn in (added, both, put):
        after = cse(passes.add_rows(trace_of(fn, a, index)))
        assert count(after, "_assert_async") == (2 if fn is both else 1)
        if fn is put and wrong < 0:
            torch.testing.assert_close(run(after, a, index), list(put(a, index)))
            continue
        with pytest.raises(RuntimeError, match="out of range"):
            run(after, a, index)


def test_the_range_is_looked_at_where_rows_are_first_added() -> None:
    """Compiled too: the equation stays, in the forward."""
    target = torch.randint(NODES, (EDGES,))
    x, e = (torch.randn(n, 8, requires_grad=True) for n in (NODES, EDGES))
    fast = tessera.jit(lambda x, e, target: messages(x, e, target.flip(0), target), executors=["tile", "aten"])
    fast(x, e, target).backward()
    forward = next(s.trace for s in tessera.stages(fast) if s.name == "forward")
    assert count(forward, "_assert_async") >= 1
    with pytest.raises(RuntimeError, match="out of range|out of bounds"):
        fast(x, e, target.clamp_min(1) + NODES - 1)


def test_an_index_put_of_its_own_is_sorted_anyway() -> None:
    """By PyTorch. To zeros alone: what is there would be read and written whole. And where most places get rows."""
    x, rows, index = torch.randn(NODES, 6), torch.randn(EDGES, 6), torch.randint(-NODES, NODES, (EDGES,))

    def put(x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_put((index,), rows, True)

    assert count(rewritten(put, x, rows, index), "bag_sum") == 1
    for fn, edges in ((lambda x, a, i: x.index_put((i,), a, True), EDGES), (put, NODES - 1)):
        trace = trace_of(fn, x, rows[:edges], index[:edges])
        assert not count(passes.add_rows(trace), "bag_sum")


@pytest.mark.parametrize("lead", [(7,), (2, 3)], ids=str)
def test_columns_are_added_at_indices_of_the_last_dimensions(lead: tuple[int, ...]) -> None:
    """Some twice, some counted from the end."""
    row, column, rows = torch.randint(-5, 5, (30,)), torch.randint(-4, 4, (30,)).int(), torch.randn(*lead, 30)

    def put(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
        where = [*[None] * len(lead), row, column]
        return torch.ops.aten.index_put(rows.new_zeros(*lead, 5, 4), where, rows, True)

    after = rewritten(put, rows, row, column)
    assert count(after, "bag_sum") == 1 and count(after, "index_put") == 0
    with pytest.raises(RuntimeError, match="out of range"):
        run(after, rows, row + 5, column)


BAGS = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "sum", "include_last_offset": True},
    {"mode": "sum", "padding_idx": 3},
    {"mode": "mean", "padding_idx": -2},
    {"mode": "max"},
    {"mode": "sum", "scale_grad_by_freq": True},
]


@pytest.mark.parametrize(
    "options, weighted", [*((o, False) for o in BAGS), *((o, True) for o in BAGS[::2] if o["mode"] == "sum")], ids=str
)
def test_embedding_bags(options: dict, weighted: bool) -> None:
    """Values and gradients are eager's; bags that sum, and gradients of their tables, are sums of bags."""
    table = torch.randn(20, 8, requires_grad=True)
    index, offsets = torch.randint(20, (30,)), torch.tensor([0, 4, 4, 11, 30])
    factors = torch.randn(30) if weighted else None

    def bags(table: Tensor, index: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
        return torch.nn.functional.embedding_bag(index, table, offsets, per_sample_weights=factors, **options)

    fast = tessera.jit(bags, executors=["tile", "aten"], strict=True)
    got, want = fast(table, index, offsets, factors), bags(table, index, offsets, factors)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(y, table, weights) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    joint = next(s.trace for s in tessera.stages(fast) if s.name == "joint cse")
    plain = options["mode"] == "sum" and not {"padding_idx", "scale_grad_by_freq"} & options.keys()
    assert count(joint, "bag_sum") == 2 * plain
    with torch.no_grad():
        infer = tessera.jit(bags, executors=["tile", "aten"], strict=True)
        torch.testing.assert_close(infer(table, index, offsets, factors), want)
        final = tessera.stages(infer)[-1].trace
        assert count(final, "bag_sum") == (options["mode"] != "max")
