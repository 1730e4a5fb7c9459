"""Weights that memory does not hold come from off-chip memory while the program runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial import interpreter
from tessera.spatial.dialect import text
from tessera.spatial.errors import SpaceError
from tessera.spatial.listing import parse
from tessera.spatial.listing.types import Load
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import simulate
from tessera.spatial.simulator.stepper import step
from tessera.spatial.watch.metrics import metrics
from tests.spatial.nets import MLP, Attention, Block, convolutions, toy


def with_dram(
    down: int = 2, across: int = 2, size: str = "32 KiB", width: int = 16, extra: str = "", far: str = "1 MiB"
) -> SpatialMachine:
    """`size` is a core's memory, `far` the memory off the chip."""
    dram = f"""
[dram]
cores = [[[0, 0]], "assumed: a corner"]
size = ["{far}", "assumed: enough"]
width = ["{width} B", "assumed: narrow"]
latency = [7, "assumed: a few"]
"""
    return toy(down, across, dram + extra, size=f'"{size}"')


def loads(program: SpatialProgram) -> int:
    return sum(isinstance(i.action, Load) for page in program.listing.pages for i in page.instructions)


MODELS = {
    "mlp": (lambda: MLP(64, 256), (8, 64), "32 KiB"),
    "tall": (lambda: MLP(64, 96), (17, 64), "28 KiB"),
    "attention": (lambda: Attention(16), (1, 5, 16), "3 KiB"),
    "block": (lambda: Block(64), (1, 5, 64), "32 KiB"),
    "convolutions": (convolutions, (1, 3, 5, 5), "5 KiB"),
    "shared": (lambda: nn.Sequential(*[nn.Linear(64, 64)] * 3), (4, 64), "8 KiB"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_fit_is_streamed(name: str) -> None:
    torch.manual_seed(0)
    make, shape, size = MODELS[name]
    model, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    program = map_onto(model, x, machine=with_dram(size=size), effort="quick")
    assert loads(program)
    ran = simulate(program, x)
    assert ran.cycles == program.cycles >= program.bound >= program.limit
    with torch.no_grad():
        torch.testing.assert_close(ran.output, model(x), rtol=1e-12, atol=1e-12)
    assert sum(metrics(program).gap.values()) == program.cycles - program.bound
    if program.cycles <= 5_000:  # stepping takes the longest; small programs say the same
        (stepped,), cycles = step(program.program, x)
        assert cycles == program.cycles
        torch.testing.assert_close(stepped, ran.output, rtol=1e-12, atol=1e-12)


def test_a_core_alone_keeps_what_it_has_room_for() -> None:
    torch.manual_seed(0)
    model, x = MLP(64, 256).bfloat16(), torch.randn(8, 64).bfloat16()
    weights = sum(p.numel() * 2 for p in model.parameters())
    program = map_onto(model, x, machine=with_dram(1, 1), effort="quick")
    loaded = simulate(program, x).report.bytes["dram"]
    assert 0 < loaded < weights
    assert program.limit <= program.bound
    assert program.mapping is not None
    expected = interpreter.run(program.mapping.tiles, program.machine, [x])
    assert simulate(program, x).output.equal(expected[0])


def test_weights_that_fit_are_not_streamed() -> None:
    model, x = MLP(), torch.randn(16, 64)
    assert loads(map_onto(model, x, machine=with_dram(size="64 KiB"), effort="quick")) == 0


def test_the_limit_counts_what_memory_cannot_hold() -> None:
    model, x = nn.Linear(512, 256, bias=False), torch.randn(1, 512)
    program = map_onto(model, x, machine=with_dram(1, 1, "64 KiB", width=1), effort="quick")
    assert program.limit == 512 * 256 * 4 - 65536 and "off-chip" in program.reasons[1]


def test_more_of_the_memory_or_a_wider_port_never_costs_cycles() -> None:
    torch.manual_seed(0)
    model, x = MLP(64, 256), torch.randn(8, 64)
    machines = [with_dram(size="32 KiB", width=4), with_dram(size="32 KiB"), with_dram(size="256 KiB")]
    cycles = [map_onto(model, x, machine=m).cycles for m in machines]
    assert cycles == sorted(cycles, reverse=True)


def test_listing_and_tiles_come_back() -> None:
    torch.manual_seed(0)
    model, x = MLP(64, 256), torch.randn(8, 64)
    program = map_onto(model, x, machine=with_dram(), effort="quick")
    assert parse(str(program)) == program.listing
    assert program.mapping is not None
    tiles = program.mapping.tiles
    again = text.parse(text.to_text(tiles), tiles.tensors)
    (expected,) = interpreter.run(tiles, program.machine, [x])
    assert interpreter.run(again, program.machine, [x])[0].equal(expected)


def test_chips_stream_each_from_its_own() -> None:
    torch.manual_seed(0)
    model, x = MLP(64, 256), torch.randn(4, 64)
    chips = """
[chips]
count = [2, "assumed: a pair"]
topology = ["all", "assumed: one link"]
width = ["32 B", "assumed: as a link"]
latency = [5, "assumed: far"]
jitter = [0, "assumed: none"]
gates = [[[0, 1]], "assumed: the other corner"]
"""
    machine = with_dram(1, 2, "24 KiB", extra=chips)
    for cut in ({"tensor": 2}, {"pipeline": 2}, {}):
        program = map_onto(model, x, machine=machine, chips=2, cut=cut, effort="quick")
        assert {of.chip for of in program.listing.drams} == {0, 1}
        with torch.no_grad():
            torch.testing.assert_close(simulate(program, x).output, model(x), rtol=1e-5, atol=1e-5)


def test_off_chip_memory_that_is_too_small_is_refused() -> None:
    model, x = nn.Linear(256, 128), torch.randn(1, 256)
    with pytest.raises(SpaceError, match="off-chip memory"):
        map_onto(model, x, machine=with_dram(size="4 KiB", far="64 KiB"), effort="quick")
