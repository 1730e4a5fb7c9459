"""What is kept between runs: written by rows, whole, or twice; what was read before is what was there before."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.spatial.listing import Program
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import simulate
from tessera.spatial.simulator.stepper import step
from tests.spatial.nets import toy


class Kept(nn.Module):
    """Three buffers, and what a step does with them."""

    def __init__(self, does) -> None:
        super().__init__()
        self.does = does
        self.l = nn.Linear(6, 6)
        self.register_buffer("k", torch.zeros(4, 6))
        self.register_buffer("v", torch.ones(6, 4))
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, at: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.does(self, x, at)


def whole(m, x, at):
    m.k += x
    return m.k * 2


def rows_then_whole(m, x, at):
    m.k[at] = x
    m.k *= 0.5
    return m.l(m.k)


def old_view(m, x, at):
    old = m.k.T.clone()
    m.k[at] = x
    return old, m.k.sum(0)


def old_and_new(m, x, at):
    old = m.k * 2
    m.k[at] = x
    return old + m.k


def between(m, x, at):
    m.k[at] = x
    y = m.k * 1
    m.k[(at + 1) % 4] = 2 * x
    return y, m.k


def row_of_its_own(m, x, at):
    m.k[at] = x + m.k[(at + 3) % 4] + m.k[at]
    return m.l(x)


def rolled(m, x, at):
    m.k.copy_(torch.cat([m.k[1:], x]))
    return F.softmax(m.k, -1)


def flipped_rows(m, x, at):
    m.k[torch.arange(4)] = m.k.flip(0) + x
    return x + 1


def swapped(m, x, at):
    k = m.k.clone()
    m.k.copy_(m.v.T + x)
    m.v.copy_(k.T)
    return m.l(x)


def columns(m, x, at):
    m.v[:, at] = x.T
    m.n += 1
    return m.v @ m.k, m.n * 2


def counted(m, x, at):
    m.k[m.n.reshape(1) % 4] = x
    seen = (torch.arange(4) <= m.n)[:, None]
    m.n += 1
    return torch.where(seen, m.k, -1.0).amax(0), m.n.clone()


def masked(m, x, at):
    m.k[m.k < x.sum()] = 3.0
    m.v.zero_()
    return m.k + m.v.T


def added(m, x, at):
    m.k.index_add_(0, at, x)
    m.k.index_put_((at,), x, accumulate=True)
    return m.k


def two_from_one(m, x, at):
    a, b = torch.index_copy(m.k, 0, at, x), torch.index_copy(m.k, 0, (at + 1) % 4, x)
    m.k += 1
    return a - b


DOES = [
    whole, rows_then_whole, old_view, old_and_new, between, row_of_its_own, rolled, flipped_rows, swapped, columns,
    counted, masked, added, two_from_one,
]  # fmt: skip


@pytest.mark.parametrize("does", DOES, ids=lambda does: does.__name__)
@pytest.mark.parametrize(
    "onto",
    [{"machine": toy(2, 2)}, {"machine": "lpx", "chips": 2}, {"machine": "lpx", "chips": 2, "cut": {"pipeline": 2}}],
    ids=["toy", "two chips", "two stages"],
)
def test_every_run_finds_what_the_one_before_it_left(does, onto) -> None:
    torch.manual_seed(0)
    model, xs, state = Kept(does).eval(), torch.randn(3, 1, 6), None
    with torch.no_grad():
        program = map_onto(copy.deepcopy(model), xs[0], torch.tensor([0]), effort="quick", **onto)
        for number, x in enumerate(xs):
            at = torch.tensor([number % 2])
            ran = simulate(program, x, at, state=state)
            if isinstance(program.program, Program) and onto["machine"] != "lpx":
                stepped, cycles = step(program.program, x, at, state=state)
                assert cycles == ran.cycles and all(map(torch.equal, stepped, ran.outputs))
            expected, state = model(x, at), ran.state
            expected = expected if isinstance(expected, tuple) else (expected,)
            torch.testing.assert_close(ran.outputs, expected, rtol=1e-5, atol=1e-5)


def test_statistics_of_a_norm_that_trains() -> None:
    torch.manual_seed(0)
    model, xs, state = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).train(), torch.randn(2, 7, 5), None
    with torch.no_grad():
        program = map_onto(copy.deepcopy(model), xs[0], machine="toy", effort="quick")
        for x in xs:
            ran = simulate(program, x, state=state)
            state = ran.state
            torch.testing.assert_close(ran.output, model(x), rtol=1e-5, atol=1e-5)
    assert state is not None
    torch.testing.assert_close(state["v1_running_var"].flatten(), model[1].running_var)


def test_runs_that_overlap_leave_each_other_what_they_keep() -> None:
    torch.manual_seed(0)
    model, xs, ats = Kept(counted).eval(), torch.randn(3, 1, 6), torch.zeros(3, 1, dtype=torch.int64)
    with torch.no_grad():
        program = map_onto(copy.deepcopy(model), xs[0], ats[0], machine="toy", aim="throughput", effort="quick")
        ran = simulate(program, xs, ats, runs=3)
        expected = [torch.stack(each) for each in zip(*map(model, xs, ats), strict=True)]
    torch.testing.assert_close(ran.outputs, tuple(expected), rtol=1e-5, atol=1e-5)
