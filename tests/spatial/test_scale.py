"""Larger models on larger grids: programs stay small, near their bound, and right."""

from __future__ import annotations

import torch

from tessera.spatial.capture import captured
from tessera.spatial.chips import Cut, cut_over_chips
from tessera.spatial.cuts import Effort
from tessera.spatial.map import map_onto
from tessera.spatial.mapping import one
from tessera.spatial.routes import Routes
from tessera.spatial.simulator.api import simulate
from tessera.tools.bench.spatial import Block, ChannelsLast, Product, Residual, grid


def check(model: torch.nn.Module, x: torch.Tensor, side: int, ratio: float, lines: int) -> None:
    program = map_onto(model.eval(), x, machine=grid(side), effort="quick")
    assert program.bound <= program.cycles <= ratio * program.bound
    assert sum(len(page.instructions) for page in program.listing.pages) < lines
    with torch.no_grad():
        expected = model(x)
    run = simulate(program, x)
    assert run.cycles == program.cycles
    torch.testing.assert_close(run.output, expected, rtol=1e-4, atol=1e-4)


def test_a_block_of_gpt() -> None:
    torch.manual_seed(0)
    check(Block(128, 4), torch.randn(1, 128, 128), 4, 1.8, 3000)


def test_convolutions_with_channels_last() -> None:
    torch.manual_seed(0)
    check(ChannelsLast(Residual(32)), torch.randn(1, 14, 14, 32), 4, 1.8, 3000)


def test_a_product_lies_over_all_cores() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    program = map_onto(Product(512), x, machine=grid(4), effort="quick")
    busy = [sum(i.duration for i in page.instructions if i.units == ("matrix",)) for page in program.listing.pages]
    assert len(busy) == 16 and max(busy) == min(busy) > 0


def test_import_does_not_depend_on_sizes() -> None:
    """As many nodes and pieces for a model sixteen times as large."""
    counts = []
    for wide in (64, 1024):
        graph = captured(Block(wide, 4), (torch.randn(1, wide // 4, wide),), {}).graph
        counts.append([(type(n).__name__, sum(len(m.pieces) for m in n.maps)) for n in graph.nodes])
    assert counts[0] == counts[1]


def test_results_leave_while_the_next_sum_is_taken() -> None:
    """Where a core takes two sums, the first is in the host's hands before the second is done; and products begin
    before whole rows have come."""
    machine = grid(2)
    got = captured(Product(2048).bfloat16(), (torch.zeros(512, 2048).bfloat16(),), {})
    graph, cores = cut_over_chips(got, machine, 1, Cut())
    timed = one(graph, machine, Routes(machine, cores), Effort(4, 1 << 20, 4.0, regions=8, waves=2)).schedule
    products = [s for s in timed.steps if s.kind == "product"]
    assert len({s.target.tile for s in products if s.core == products[0].core and s.target}) > 1
    first_out = min(timed.starts[s] for s in timed.steps if s.kind == "to_host")
    assert first_out < max(timed.starts[s] for s in products)
    last_in = max(timed.starts[s] + s.end for s in timed.steps if s.kind == "from_host")
    assert min(timed.starts[s] for s in products) < last_in
