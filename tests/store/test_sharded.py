"""Programs of one rank of a mesh, kept on disk: another process begins with them, on this mesh and with this plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import tessera
from tessera.ir.dist import exchange_of
from tessera.passes.memory.bucket import members
from tessera.store.program import COUNTS


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(12, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


IDS = torch.arange(24).view(4, 6) % 12


@contextmanager
def rank(axes: dict[str, int]) -> Iterator:
    """Rank 0 of a mesh whose other ranks do not exist, as in a process of its own."""
    try:
        yield tessera.mesh(device="cpu", fake=True, **axes)
    finally:
        dist.destroy_process_group()


def trained(axes: dict, plan: object, **options: object) -> tuple[list, str, tuple[int, int]]:
    """Losses and weights of two steps, the program, and how many were stored and loaded."""
    torch.manual_seed(0)
    model, before = Model(), dict(COUNTS)
    with rank(axes) as mesh:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = tessera.train_step(model, loss, optimizer, mesh=mesh, plan=plan, **options)
        values = [float(step(IDS)) for _ in range(2)]
        values += [float(p.detach().to_local().double().sum()) for p in model.parameters()]
        (program,) = step.programs.values()
        text = str(program.compilation.executable.ends) + program.compilation.digest
    return values, text, (COUNTS["stored"] - before["stored"], COUNTS["loaded"] - before["loaded"])


@pytest.mark.parametrize("executors", ["aten", ("tile", "aten")], ids=str)
def test_a_step_is_read_where_mesh_and_plan_are_the_same(executors: object) -> None:
    sequence = {"dp": "zero3", "tp": "sequence"}
    first = trained({"dp": 2, "tp": 2}, sequence, executors=executors)
    again = trained({"dp": 2, "tp": 2}, sequence, executors=executors)
    assert again[:2] == first[:2] and (first[2], again[2]) == ((1, 0), (0, 1))


def test_what_decides_a_program_belongs_to_its_key() -> None:
    plan = {"dp": "zero3", "tp": "sequence"}
    trained({"dp": 2, "tp": 2}, plan, executors="aten")
    others = [
        ({"dp": 4, "tp": 2}, plan, {}),
        ({"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "sequence"}, {}),
        ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "async-tp"}, {}),
        ({"dp": 2, "tp": 2}, {**plan, "layers.0": "b/dp, s/tp, d"}, {}),
        ({"dp": 2, "tp": 2}, plan, {"clip_norm": 1.0}),
    ]
    for axes, other, options in others:
        assert trained(axes, other, executors="aten", **options)[2] == (1, 0)


def test_a_call_is_read_and_has_its_gradients() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model, before = Model(), dict(COUNTS)
        with rank({"dp": 2}) as mesh:
            out = tessera.jit(model, mesh=mesh, plan="zero3", executors="aten")(IDS)
            out.square().sum().backward()
            grads = [p.grad.to_local().clone() for p in model.parameters()]
        results.append((out.detach(), grads, [COUNTS[name] - before[name] for name in ("stored", "loaded")]))
    (a, grads, first), (b, others, second) = results
    assert (first, second) == ([1, 0], [0, 1]) and torch.equal(a, b)
    assert all(map(torch.equal, grads, others))


def test_of_many_equal_layers_every_one_is_partitioned() -> None:
    """A call of a deep model exchanges what a shallow one does, for every layer."""
    counts = []
    for layers in (2, 14):
        with rank({"dp": 2}) as mesh:
            fast = tessera.jit(copy.deepcopy(Model(layers)), mesh=mesh, plan="zero3", executors="aten")
            fast(IDS).sum().backward()
            forward, _ = fast.__tessera__.backend.graphs[0].compilation.programs
            counts.append(sum(members(eqn) for eqn in forward.trace.equations if exchange_of(eqn) is not None))
    assert counts == [1 + 2 * 2, 1 + 2 * 14]
