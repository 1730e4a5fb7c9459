"""Weights of several blocks under tensor parallelism: a rank has its heads of all blocks, and what follows stays."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, WIDTH, token_batches, token_loss
from steps import compiled_step, program_of, train_whole
from torch import Tensor, nn

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir.dist import exchange_of
from tessera.ir.interp import run
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.verify import verify
from tessera.transforms.shard.partition import shard
from tessera.transforms.vjp import vjp

HEADS = 4
CUTS = {
    "chunk": lambda y: y.chunk(3, -1),
    "split": lambda y: y.split(WIDTH, -1),
    "split by sizes": lambda y: y.split([WIDTH] * 3, -1),
    "slice": lambda y: (y[..., :WIDTH], y[..., WIDTH : 2 * WIDTH], y[..., -WIDTH:]),
    "view": lambda y: y.unflatten(-1, (3, WIDTH)).unbind(-2),
}


class Packed(nn.Module):
    def __init__(self, cut: str) -> None:
        super().__init__()
        self.words, self.norm, self.cut = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), cut
        self.qkv, self.o, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in CUTS[self.cut](self.qkv(self.norm(x)))
        )  # fmt: skip
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(a.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("plan", [{"tp": "tensor"}, {"dp": "zero3", "tp": "sequence"}], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_trains_alike_and_gathers_no_rows(cut: str, plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, batches, axes = Packed(cut).double(), token_batches(2, 8), dict.fromkeys(plan, 2)
    assert_equal(
        train_mesh(model, token_loss, batches, axes, plan), train_whole(model, token_loss, batches, "adam", None)
    )
    _, compilation = compiled_step(model, token_loss, batches[0], axes, plan, "sgd", None)
    assert not [note for note in compilation.account.gathered if "norm" not in note.operator]


MANY, FEW, EACH = 8, 2, 2  # heads of queries, of keys, and how wide one is
UNEQUAL = {
    "split": lambda y: y.split([MANY * EACH, FEW * EACH, FEW * EACH], -1),
    "slice": lambda y: (y[..., : MANY * EACH], y[..., MANY * EACH : -FEW * EACH], y[..., -FEW * EACH :]),
    "groups": lambda y: [
        part.flatten(-3) for part in y.unflatten(-1, (FEW, -1, EACH)).split([MANY // FEW, 1, 1], -2)
    ],
}  # fmt: skip


class Grouped(nn.Module):
    """Fewer heads of keys than of queries in one weight, whose blocks are unequal."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.words, self.norm, self.cut = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), cut
        self.qkv, self.o = nn.Linear(WIDTH, (MANY + 2 * FEW) * EACH), nn.Linear(MANY * EACH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (y.unflatten(-1, (-1, EACH)).transpose(1, 2) for y in UNEQUAL[self.cut](self.qkv(self.norm(x))))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.o(a.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("word", ["tensor", "sequence"])
@pytest.mark.parametrize("cut", UNEQUAL)
def test_unequal_blocks_train_alike(cut: str, word: str, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, batches, plan = Grouped(cut).double(), token_batches(2), {"dp": "zero3", "tp": word}
    mine = train_mesh(model, token_loss, batches, axes, {axis: plan[axis] for axis in axes})
    assert_equal(mine, train_whole(model, token_loss, batches, "adam", None))


def test_it_sends_what_single_projections_send_and_its_weight() -> None:
    def counted(model: nn.Module) -> Counter:
        step = compiled_step(model, token_loss, token_batches(1, 64)[0], {"tp": 2}, {"tp": "tensor"}, "sgd", None)
        exchanges = (exchange_of(eqn) for eqn in program_of(step[1]).equations)
        return Counter(exchange[0] for exchange in exchanges if exchange is not None)

    assert counted(GPT(1)) == {"all_reduce": 8, "all_gather": 3}  # the weight, its gradient, and that of its bias


def test_few_rows_are_gathered_not_the_weight() -> None:
    torch.manual_seed(0)
    model = Packed("chunk")
    step = compiled_step(model, token_loss, token_batches(1, 1)[0], {"tp": 2}, {"tp": "tensor"}, "sgd", None)
    assert [note.operator for note in step[1].account.gathered][0] == "aten.chunk.default"


OPERATORS = {
    "cat": (lambda x: torch.cat([x, 2 * x, -x], 1), "[4, 6/tp]"),
    "chunk": (lambda x: x.chunk(3, 1), "[4, 6/tp:3]"),
    "slice": (lambda x: x[:, 2:4], "[4, 6/tp:3]"),
    "rows": (lambda x: torch.cat([x, x.square()], 0), "[4/tp, 6]"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_blocks_stay(name: str) -> None:
    """Results and gradients are those of whole tensors, without an exchange."""
    fn, text = OPERATORS[name]
    mesh, x = Mesh.of(tp=2), torch.randn(4, 6, dtype=torch.float64)
    trace = trace_function(fn, (x,)).trace
    joint = vjp(trace, list(trace.inputs))
    cts = [torch.randn(v.shape, dtype=torch.float64) for v in joint.pulled]
    place = Placement.parse(text, mesh)
    forward = shard(trace, mesh, {}, homes={trace.inputs[0]: place}).trace
    places = (v.type.placement for v in forward.outputs)
    homes = {joint.trace.inputs[0]: place, **dict(zip(joint.trace.inputs[1:], places, strict=True))}
    sharded = shard(joint.trace, mesh, {}, homes=homes).trace
    verify(sharded)
    assert not any(exchange_of(eqn) for eqn in sharded.equations)
    args = [in_step.cut(t, v.type.placement) for t, v in zip((x, *cts), sharded.inputs, strict=True)]
    got = in_step.run(sharded, args)
    for part, v, want in zip(got, sharded.outputs, run(joint.trace, x, *cts), strict=True):
        torch.testing.assert_close(in_step.join(part, v.type.placement), want)
