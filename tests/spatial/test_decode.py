"""Decoding: a cache written in place, rows and positions chosen by data, one listing for every token."""

from __future__ import annotations

import copy

import pytest
import torch

from tessera.spatial.errors import MapError
from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import simulate
from tests.spatial.nets import Llama, toy


def decode(
    model: torch.nn.Module, machine: object, count: int, chips: int = 1, cut: dict[str, int] | None = None
) -> tuple[list[int], list[int]]:
    """Greedy words by the machine and by PyTorch, each from its own."""
    first = torch.tensor([3]), torch.tensor([0])
    program = map_onto(model, *first, machine=machine, effort="quick", chips=chips, cut=cut)  # type: ignore[arg-type]
    eager = copy.deepcopy(model)
    mine, theirs, state = [3], [3], None
    for at in range(count):
        run = simulate(program, torch.tensor(mine[-1:]), torch.tensor([at]), state=state)
        assert run.cycles == program.cycles
        state = run.state
        mine.append(int(run.output))
        with torch.no_grad():
            theirs.append(int(eager(torch.tensor(theirs[-1:]), torch.tensor([at]))))
    return mine, theirs


def test_llama_decodes_as_pytorch_does() -> None:
    torch.manual_seed(0)
    mine, theirs = decode(Llama(), toy(2, 2), 10)
    assert mine == theirs and len(set(mine)) > 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    "chips, cut", [(1, None), (4, None), (64, {"pipeline": 64}), (64, {"tensor": 4, "pipeline": 16})]
)
def test_a_llama_decodes_on_many_chips(chips: int, cut: dict[str, int] | None) -> None:
    torch.manual_seed(0)
    model = Llama(layers=4, wide=256, heads=8, groups=4, inner=688, words=1024, longest=64)
    mine, theirs = decode(model, "lpx", 64, chips, cut)
    assert mine == theirs and len(set(mine)) > 32


def test_rows_that_data_choose_want_a_copy_engine() -> None:
    with pytest.raises(MapError, match="has no copy engine .copy.engines., which reads and writes rows .*: called at "):
        map_onto(torch.nn.Embedding(30, 9), torch.tensor([1, 2]), machine=toy(2, 2, engines=0))


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = Llama(layers=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    map_onto(model, torch.tensor([3]), torch.tensor([0]), machine=toy(2, 2), effort="quick")
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())
