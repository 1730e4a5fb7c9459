"""Models over several chips: cut by tensors, in stages, in batches. The simulator gives PyTorch's answer, in the very
cycles that were scheduled, and every chip has its part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.bounds import interval
from tessera.spatial.capture import captured
from tessera.spatial.chips import Cut, cut_over_chips
from tessera.spatial.graph import Constant, Input
from tessera.spatial.listing.types import Send
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import simulate
from tessera.spatial.stage import shape
from tessera.util.errors import OptionError
from tests.spatial.nets import MLP, Attention, Block, Llama, toy


def rack(topology: str = "mesh", window: int = 3, **figures: object) -> SpatialMachine:
    """Eight toys of 2×2 cores, with links between them on which things arrive within a window."""
    shape = 'shape = [[2, 4], "assumed: a tray"]\n' if topology in ("mesh", "torus") else ""
    chips = (
        f'\n[chips]\ncount = [8, "assumed: a tray"]\ntopology = ["{topology}", "assumed: of several"]\n{shape}'
        f'width = ["16 B", "assumed: half"]\nlatency = [40, "assumed: far"]\njitter = [{window}, "assumed: clocks"]\n'
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
    with pytest.raises(OptionError, match="expected tensor, experts, pipeline, batches"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"tensors": 4})
    with pytest.raises(OptionError, match="to be 4 chips"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"tensor": 2})
    with pytest.raises(OptionError, match="no rectangle"):
        map_onto(MLP(), x, machine=rack(), chips=7)
    with pytest.raises(OptionError, match="multiple of 3 batches"):
        map_onto(MLP(), x, machine=rack(), chips=4, cut={"pipeline": 4, "batches": 3})


def test_sums_go_along_sides() -> None:
    """Of a square of four chips, none reads what the one across the corner has."""
    machine = rack()
    graph, _ = cut_over_chips(captured(MLP(), (torch.randn(2, 64),), {}), machine, 4, Cut(tensor=4))
    columns = shape(machine)[1]
    of = {node.home: node for node in graph.nodes if not isinstance(node, (Constant, Input))}
    read = {(node.chip, of[home].chip) for node in of.values() for m in node.maps for home in m.homes if home in of}
    places = [(divmod(a, columns), divmod(b, columns)) for a, b in read if a != b and a is not None and b is not None]
    assert places and all(a[0] == b[0] or a[1] == b[1] for a, b in places)


def test_small_parts_travel_as_one() -> None:
    """A row of which another chip has a part on each core comes in one send from there."""
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(), nn.RMSNorm(64, eps=1e-6)), torch.randn(1, 64)
    sends = []
    for window in (0, 3):  # without a window nothing is gained
        program = map_onto(model, x, machine=rack(window=window), chips=2, effort="quick")
        agree(model, x, program)
        gone = [i.action.targets for page in program.listing.pages for i in page.instructions
                if isinstance(i.action, Send) and any(t.chip != page.core.chip for t in i.action.targets)]  # fmt: skip
        sends.append(len(gone))
    assert sends[1] < sends[0]


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(6 * 8, 64)
    machine = rack()
    program = map_onto(model, x, machine=machine, chips=4, cut={"pipeline": 4, "batches": 6}, effort="quick")
    agree(model, x, program)
    assert program.mapping is not None
    between, least = interval(program.mapping.schedule, machine)
    assert least <= between <= 1.3 * least
    assert 6 * between < program.cycles  # the first result has all stages before it
