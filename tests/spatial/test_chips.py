"""Models over several chips: cut by tensors, in stages, in batches. The simulator gives PyTorch's answer, in the very
cycles that were scheduled, and every chip has its part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import simulate
from tessera.util.errors import OptionError
from tests.spatial.nets import MLP, Attention, Block, Llama, toy


def rack(topology: str = "mesh", **figures: object) -> SpatialMachine:
    """Eight toys of 2×2 cores."""
    shape = 'shape = [[2, 4], "assumed: a tray"]\n' if topology in ("mesh", "torus") else ""
    chips = (
        f'\n[chips]\ncount = [8, "assumed: a tray"]\ntopology = ["{topology}", "assumed"]\n{shape}'
        'width = ["16 B", "assumed: half"]\nlatency = [40, "assumed: far"]\njitter = [3, "assumed: two clocks"]\n'
        'gates = [[[0, 1], [1, 1]], "assumed: an edge"]\n'
    )
    return toy(2, 2, chips, **figures)


def agree(model: nn.Module, x: torch.Tensor, program: SpatialProgram) -> None:
    with torch.no_grad():
        expected = model(x)
    run = simulate(program, x)
    assert run.cycles == program.cycles >= program.bound >= program.limit
    torch.testing.assert_close(run.output, expected, rtol=1e-5, atol=1e-5)


def chips_of(program: SpatialProgram, unit: str = "matrix") -> set[int]:
    return {page.core.chip for page in program.listing.pages if any(unit in i.units for i in page.instructions)}


CUTS = [
    (MLP, (5, 64), "mesh", 2, None),
    (MLP, (16, 64), "torus", 8, None),
    (Attention, (1, 6, 32), "ring", 2, None),
    (Attention, (1, 6, 32), "all", 4, None),  # more chips than groups of heads
    (lambda: Block(32, 4), (1, 8, 32), "mesh", 4, None),
    (lambda: Block(32, 4), (1, 8, 32), "mesh", 4, {"pipeline": 4}),
    (lambda: nn.Sequential(MLP(), MLP()), (8, 64), "torus", 8, {"pipeline": 2, "tensor": 4}),
    (lambda: nn.Sequential(MLP(), MLP()), (12, 64), "mesh", 4, {"pipeline": 4, "batches": 3}),
    (MLP, (8, 64), "mesh", 4, {"tensor": 4, "batches": 2}),
]  # fmt: skip


@pytest.mark.parametrize("make, shape, topology, chips, cut", CUTS)
def test_cuts(make, shape, topology, chips, cut) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    program = map_onto(model, x, machine=rack(topology), chips=chips, cut=cut, effort="quick")
    agree(model, x, program)
    assert len(chips_of(program)) == chips


def test_a_cache_lies_in_parts() -> None:
    torch.manual_seed(0)
    model = Llama(layers=1, longest=8)
    program = map_onto(model, torch.tensor([3]), torch.tensor([0]), machine=rack(), chips=2, effort="quick")
    states = {page.core.chip for page in program.listing.pages if any(b.state for b in page.buffers)}
    assert states == {0, 1}
    word, state = torch.tensor([3]), None
    reference = torch.tensor([3])
    for at in range(6):
        run = simulate(program, word, torch.tensor([at]), state=state)
        word, state, reference = run.output, run.state, model(reference, torch.tensor([at]))
        assert word.equal(reference)


def test_late_links_change_nothing() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(4, 64)
    program = map_onto(model, x, machine=rack(), chips=4, effort="quick")
    assert simulate(program, x, jitter=7).output.equal(simulate(program, x).output)


def test_what_cannot_be_cut() -> None:
    x = torch.randn(4, 64)
    with pytest.raises(OptionError, match="expected tensor, pipeline, batches"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"tensors": 4})
    with pytest.raises(OptionError, match="to be 4 chips"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"tensor": 2})
    with pytest.raises(OptionError, match="no rectangle"):
        map_onto(MLP(), x, machine=rack(), chips=7)
    with pytest.raises(OptionError, match="multiple of 3 batches"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"pipeline": 4, "batches": 3})
