"""What the partitioner remembers of one program does not change what it makes of the next."""

from __future__ import annotations

import pytest
import torch

from tessera.frontends.functional.trace import trace_function
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.transforms.shard import remembered
from tessera.transforms.shard.partition import shard

MESH = Mesh.of(tp=2)
TEXTS = {"columns": ["[4, 8]", "[8, 16/tp]", "[16/tp, 8]"], "rows": ["[4/tp, 8]", "[8, 16]", "[16, 8]"]}
STAYS = {"nothing": {}, "weights": {"tp": "weights"}, "activations": {"tp": "activations"}}


def program(texts: list[str], stays: dict[str, str]) -> str:
    args = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16, 8)
    trace = trace_function(lambda x, up, down: torch.relu(x @ up) @ down, args).trace
    places = {v: Placement.parse(text, MESH) for v, text in zip(trace.inputs, texts, strict=True)}
    return str(shard(trace, MESH, places, trace.inputs[1:], stays).trace)


@pytest.mark.parametrize("first", STAYS)
def test_as_if_it_were_the_first_program(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(texts, stays) for texts in TEXTS.values() for stays in STAYS.values()]
    alone = []
    for case in cases:
        monkeypatch.setattr(remembered, "_choices", {})
        alone.append(program(*case))
    monkeypatch.setattr(remembered, "_choices", {})
    for texts in TEXTS.values():
        program(texts, STAYS[first])
    assert [program(*case) for case in cases] == alone == [program(*case) for case in cases]


def test_no_more_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_choices", {})
    monkeypatch.setattr(remembered, "MOST", 0)
    program(TEXTS["columns"], {})
    assert remembered._choices
    remembered.choices_on(MESH, {}, {})
    assert not any(remembered._choices.values())
