"""Sums of small products are few products, and sums of columns few sums; what they add up to stays."""

from __future__ import annotations

import itertools

import pytest
import torch
from programs import trace_of
from torch import Tensor, nn

import tessera
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.passes.clean.dce import dce
from tessera.passes.patterns import sum_products as passes
from tessera.passes.patterns.sum_products import sum_products

STEPS = 6
LONG = 16  # steps, of which few would be compiled if they did not come together in the end


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU, where launches are all the time there is."""
    monkeypatch.setattr(passes, "DEVICES", ("cpu",))
    monkeypatch.setattr(passes._Sums, "pays", lambda self, terms: len(terms) > 3)
    torch._dynamo.reset()


def count(trace: Trace, name: str) -> int:
    return sum(eqn.opname == name for eqn in trace.equations)


def weights(*given: Tensor) -> tuple[Tensor, Tensor]:
    """What a weight and a bias get from every step, which are not of one size."""
    xs, gs = given[:STEPS], given[STEPS:]
    weight, bias = gs[0].t().mm(xs[0]), gs[0].sum(0)
    for x, g in zip(xs[1:], gs[1:], strict=True):
        weight, bias = weight + g.t().mm(x), bias + g.sum(0)
    return weight, bias


def args() -> list[Tensor]:
    return [torch.randn(rows + 2, width) for width in (5, 3) for rows in range(STEPS)]


def check(fn, given: list[Tensor]) -> Trace:  # noqa: ANN001
    before = trace_of(fn, *given)
    after = dce(sum_products(before))
    verify(after)
    for got, want in zip(run(after, *given), run(before, *given), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    return after


GROUPS = 4  # of six steps: 1, 1, 2, 2


def test_steps_are_few_products_and_sums() -> None:
    after = check(weights, args())
    assert count(after, "mm") == GROUPS and count(after, "sum") == GROUPS
    assert count(after, "cat") == 2 * 2  # a group's product and sum read the same rows


def test_a_group_is_as_long_as_all_before_it_and_stands_behind_its_last_term() -> None:
    def fn(*given: Tensor) -> tuple[Tensor, ...]:
        total = given[0].mm(given[0])
        for x in given[1:]:
            total = total + (x.tanh()).mm(x)
        return (total,)

    after = check(fn, [torch.randn(3, 3) for _ in range(11)])
    names = [eqn.opname for eqn in after.equations if eqn.opname in ("tanh", "mm")]
    runs = [len(list(run)) for name, run in itertools.groupby(names) if name == "tanh"]
    assert runs == [1, 2, 4, 3]  # of the first term there is none


def test_what_is_held_for_a_product_is_no_more_than_steps_have_freed() -> None:
    """The backward of a cell: with all steps in one product, what each step gave would be held until the end."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 32)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(8, 32)
            for now in x.unbind(1):
                state = self.cell(now, state)
            return state.square().sum()

    def peak() -> int:
        fast = tessera.jit(Steps(), executors=["tile", "aten"], strict=True)
        fast(torch.randn(8, LONG, 4)).backward()
        return next(m.predicted.peak for m in tessera.explain(fast).graphs[0].memory if m.program == "backward")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "grouped", lambda terms: [terms])
        whole = peak()
    assert peak() < 0.95 * whole


def test_other_terms_are_added_and_what_others_read_stays() -> None:
    def fn(*given: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = weights(*given)
        first = given[STEPS].t().mm(given[0])
        return weight + first.exp() + first, bias * 2

    after = check(fn, args())
    assert count(after, "mm") == GROUPS + 1 and count(after, "exp") == 1


def test_operands_that_lie_in_rows() -> None:
    def fn(*given: Tensor) -> Tensor:
        total = given[0].mm(given[STEPS])
        for x, y in zip(given[1:STEPS], given[STEPS + 1 :], strict=True):
            total = total + x.mm(y)
        return total

    given = [torch.randn(4, n + 1) for n in range(STEPS)] + [torch.randn(n + 1, 3) for n in range(STEPS)]
    assert count(check(fn, given), "mm") == GROUPS


def test_few_products_stay() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a.mm(b) + c.mm(d)

    trace = trace_of(fn, *(torch.randn(4, 4) for _ in range(4)))
    assert sum_products(trace) is trace


def test_the_gradient_of_a_cell_that_is_called_step_by_step() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.RNNCell(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = x[:, 0] * 0
            for now in x.unbind(1):
                state = self.cell(now + self.out(state), state)
            return state.square().sum()

    model, x = Steps(), torch.randn(4, LONG, 8)
    fast = tessera.jit(model, executors=["tile", "aten"], strict=True)
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    for got, want in zip(torch.autograd.grad(fast(x), list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(got, want)
    joint = next(s.trace for s in tessera.stages(fast) if s.name.endswith("sum_products"))
    assert count(joint, "mm") <= 3 * LONG + 3 * 5  # those that lead back through the steps, and five a weight


def test_other_sums_stay() -> None:
    """Of everything, over other dimensions, of another dtype."""

    def others(*xs: Tensor) -> list[Tensor]:
        ways = [
            lambda x: x.sum(),
            lambda x: x.sum(1),
            lambda x: x.sum((0, 1)),
            lambda x: x.sum([]),
            lambda x: x.sum(0, dtype=torch.float64),
            lambda x: x[0].sum(0),
        ]
        return [torch.stack([w(x) for x in xs]).sum(0) + w(xs[0]) + sum(w(x) for x in xs) for w in ways]

    after = check(others, [torch.randn(3, 4) for _ in range(STEPS)])
    assert count(after, "cat") == 0
