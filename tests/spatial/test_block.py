"""A block of a Llama in eight bits that decodes over eight chips, run on data: values and caches are PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import simulate
from tessera.tools.bench.spatial import in_bfloat16
from tessera.tools.bench.spatial_models import Eight, LlamaBlock
from tests.spatial.test_chips import rack


def unrounded(model: LlamaBlock) -> LlamaBlock:
    """The block with the same weights, which rounds nothing to eight or sixteen bits."""
    other = copy.deepcopy(model)
    other._apply(lambda t: t.float() if t.dtype == torch.bfloat16 else t)
    for layer in other.modules():
        if isinstance(layer, Eight):
            layer.forward = lambda y, w=layer.weight: y @ w.float().t()
    return other


def decodes(machine: SpatialMachine, *sizes: int) -> None:
    """Rows, width, heads, groups of them, inner width, longest context. A sum in another order may fall on the other
    side when it is rounded to eight bits: so both are held against what nothing was rounded in."""
    torch.manual_seed(0)
    rows, wide, *_, longest = sizes
    model = LlamaBlock(*sizes).eval()
    in_bfloat16(model)
    x, at = torch.randn(rows, wide).bfloat16(), torch.tensor([longest // 2])
    program = map_onto(model, x, at, machine=machine, chips=8, effort="quick")
    run = simulate(program, x, at)
    assert run.cycles == program.cycles >= program.bound >= program.limit
    with torch.no_grad():
        exact = unrounded(model)(x.float(), at)
        expected = model(x, at).float()  # writes its caches
    got = run.output.float()
    assert (expected - exact).norm() < 0.1 * (exact - x.float()).norm()
    assert (got - exact).norm() < 1.2 * (expected - exact).norm()
    for name, buffer in (("keys", model.attention.keys), ("values", model.attention.values)):
        parts = [t for key, t in run.state.items() if name in key]
        kept = torch.cat([t.view(longest, rows, -1, buffer.shape[-1]) for t in parts], 2).float()
        torch.testing.assert_close(kept, buffer.float(), rtol=0.1, atol=0.1)
        others = torch.arange(longest) != at
        assert kept[others].equal(buffer.float()[others])


def test_a_small_block() -> None:
    decodes(rack(size='"4 MiB"', passes="{ float8_e4m3fn = 1, bfloat16 = 1"), 2, 128, 8, 8, 256, 16)


@pytest.mark.sweep
def test_a_block_of_70b() -> None:
    decodes(spatial_machine("lpx"), 1, 8192, 64, 8, 28672, 1024)
