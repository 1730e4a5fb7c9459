"""Experts over chips: on different ones, in slices on all, in slots. What the simulator gives is PyTorch's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from tessera.spatial.errors import MapError
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import simulate
from tessera.spatial.stage import stage_of
from tessera.util.errors import OptionError
from tests.spatial.nets import MLP, MoE
from tests.spatial.test_chain import Logits
from tests.spatial.test_chips import agree, chips_of, rack

CUTS = [
    (2, {"experts": 2}), (4, {"experts": 4}), (8, {"experts": 8}), (8, {"experts": 4, "tensor": 2}),
    (4, {"experts": 2, "pipeline": 2}), (4, {"experts": 2, "batches": 2, "pipeline": 2}), (2, None),
]  # fmt: skip


@pytest.mark.parametrize("chips, cut", CUTS, ids=str)
def test_cuts(chips: int, cut: dict[str, int] | None) -> None:
    torch.manual_seed(0)
    model, x = MoE(), torch.randn(12, 32)
    program = map_onto(model, x, machine=rack(size='"256 KiB"'), chips=chips, cut=cut, effort="quick")
    agree(model, x, program)
    assert len(chips_of(program)) == chips
    if cut != {"experts": 2, "pipeline": 2} and cut is not None and "batches" not in cut:
        stacks = model.up.nbytes + model.gate.nbytes + model.down.nbytes
        assert all(stacks <= held * chips < 2 * stacks for held in weights_of(program).values())


def weights_of(program: SpatialProgram) -> dict[int, int]:
    """Bytes of what lies in a chip's memory before cycle 0."""
    held: Counter[int] = Counter()
    for page in program.listing.pages:
        held[page.core.chip] += sum(b.size for b in page.buffers if b.lifetime is None)
    return held


@pytest.mark.parametrize("chips", [2, pytest.param(4, marks=pytest.mark.sweep), 8])
def test_two_of_eight_on_an_lpx(chips: int) -> None:
    torch.manual_seed(0)
    model, x = MoE(), torch.randn(4, 32)
    agree(model, x, map_onto(model, x, machine="lpx", chips=chips, cut={"experts": chips}, effort="quick"))


def test_choices_that_find_no_slot_are_counted() -> None:
    """A capacity that the model has leaves out what PyTorch leaves out; slots leave out what comes too late. The
    cycles are the same whichever experts are chosen."""
    torch.manual_seed(0)
    model, x, machine = MoE(capacity=1.0), torch.randn(12, 32), rack(size='"256 KiB"')
    program = map_onto(model, x, machine=machine, chips=2, cut={"experts": 2}, effort="quick")
    agree(model, x, program)
    places = model.router(x).topk(2, -1).indices
    lost = sum(max(0, n - 3) for n in places.flatten().bincount().tolist())
    first = simulate(program, x)
    second = simulate(program, x, state=first.state)
    assert lost and first.state["overflow"].item() == lost and second.state["overflow"].item() == 2 * lost
    model.capacity = None
    cut = {"experts": 2, "slots": 3}
    slotted = map_onto(model, x, machine=machine, chips=2, cut=cut, effort="quick")
    run = simulate(slotted, x)
    torch.testing.assert_close(run.output, first.output)
    assert run.state["overflow"].item() == lost and run.cycles == slotted.cycles
    assert simulate(slotted, x[:1].expand(12, 32)).state["overflow"].item() == 2 * (12 - 3)


def test_experts_of_transformers_in_blocks() -> None:
    """A chain whose blocks have experts on different chips, found in a Mixtral."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = MixtralConfig(**sizes, num_hidden_layers=3, vocab_size=32, num_local_experts=4)
    model, ids = Logits(AutoModelForCausalLM.from_config(config).eval()), torch.arange(4)[None]
    machine = rack("torus", size='"256 KiB"', banks=2)
    program = map_onto(model, ids, machine=machine, chips=4, cut={"experts": 2, "pipeline": 2, "blocks": 3})
    run = simulate(program, ids)
    assert run.cycles == program.cycles >= program.bound >= program.limit
    torch.testing.assert_close(run.output, model(ids), rtol=1e-5, atol=1e-5)


def test_groups_are_rectangles_of_rectangles() -> None:
    stage = stage_of(rack(), 2, 4)
    assert sorted(stage.places()) == [(i, j) for i in range(2) for j in range(4)]
    assert stage.mesh.ranks == 8 and stage.sides == (2, 4)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.kept[at] = x
        return x + self.kept.sum(0)


def test_what_cannot_be_cut() -> None:
    x, machine = torch.randn(12, 32), rack(size='"256 KiB"')
    with pytest.raises(OptionError, match="expected tessera.experts in MLP"):
        map_onto(MLP(32), x, machine=machine, chips=2, cut={"experts": 2})
    with pytest.raises(MapError, match="number of experts that 8 divides, got 4"):
        map_onto(MoE(count=4), x, machine=machine, chips=8, cut={"experts": 8})
    with pytest.raises(OptionError, match="tensor times experts times pipeline to be 4 chips"):
        map_onto(MoE(), x, machine=machine, chips=4, cut={"experts": 2})
    with pytest.raises(OptionError, match="keeps nothing between runs"):
        at = torch.zeros(2, 1, dtype=torch.int64)
        map_onto(Keeps(), x[:2, :8], at, machine=machine, chips=2, cut={"pipeline": 2, "batches": 2})
