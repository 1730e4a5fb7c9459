"""Sequences on several ranks: attention by all-to-alls or round a ring, and whole training steps of such plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal
from attention import Case
from attention import check as check_attention
from models import GPT, token_batches
from steps import compiled_step, pretended, program_of, train_ranks, train_whole
from test_plans import ACTIVATION, check, program
from torch import Tensor

import tessera
from tessera.distributed.plan import Plan
from tessera.ir.dist import bytes_sent, exchange_of
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.util.errors import OptionError

MESH = Mesh.of(dp=2, cp=2)


@pytest.mark.parametrize("text", ["[32/dp/cp:4, 4]", "[8/cp:zigzag/dp, 4]", "[32/dp/cp:4:zigzag, 4] +tp"])
def test_marks_are_read_as_they_are_written(text: str) -> None:
    assert str(Placement.parse(text, Mesh.of(dp=2, cp=2, tp=2))) == text


@pytest.mark.parametrize("text", ["[6/cp:zigzag]", "[12/cp:4]", "[32/cp:4/dp]"])
def test_marked_axes_cut_evenly(text: str) -> None:
    with pytest.raises(OptionError, match="expected marked axes that divide dimension 0"):
        Placement.parse(text, MESH)


def test_a_dimension_made_of_two() -> None:
    place = Placement.parse("[32/dp/cp:4:zigzag, 5]", MESH)
    assert str(place.unfolded()) == "[4/dp, 8/cp:zigzag, 5]" and place.local_shape == (8, 5)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, ring=False), Case(3, ring=False, causal=False, length=6),
        Case(2, ring=False, pairs=2), Case(4, ring=False, pairs=2), Case(2, ring=False, causal=False, mask="numbers"),
        Case(2, ring=True), Case(3, ring=True, length=12, zigzag=True), Case(2, ring=True, pairs=2, zigzag=True),
        Case(3, ring=True, causal=False, length=6), Case(2, ring=True, causal=False, mask="truths", zigzag=True),
        Case(3, ring=True, causal=False, length=12, mask="numbers", zigzag=True),
        Case(2, ring=True, causal=False, mask="numbers"), Case(4, ring=True, causal=False, mask="lower"),
        Case(2, ring=True, causal=False, mask="padding", pairs=2),
    ],
    ids=str,
)  # fmt: skip
def test_attention(case: Case, backward: bool) -> None:
    sharded = check_attention(replace(case, backward=backward))
    names = {eqn.op.name for eqn in sharded.trace.equations if exchange_of(eqn) is not None}
    assert names == ({"permute"} if case.ring else {"all_to_all"}) and not sharded.notes


def test_a_ring_in_zigzag_has_equal_work() -> None:
    """All ranks run one text; under a causal mask it has half the products of an open one, and the diagonal's."""
    calls = [e for e in check_attention(Case(4, True, zigzag=True, length=16)).trace.equations if "flash" in str(e.op)]
    sizes = [(e.args[0].shape[2], e.args[1].shape[2]) for e in calls if "backward" not in str(e.op)]
    assert sizes == [(4, 4)] + [(2, 2)] * 6


WORDS = ("ulysses", "ring")


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("word", WORDS)
def test_alone(model: str, word: str) -> None:
    check(model, {"cp": 2}, word)


class Padded(torch.nn.Module):
    """Queries see what stands before them and is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(48, 8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 48)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(self.words(ids)).chunk(3, -1))
        places = torch.arange(ids.shape[1])
        seen = keep[:, None, None] & (places <= places[:, None])
        return self.head(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))


def padded_loss(model: torch.nn.Module, ids: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, keep).flatten(0, 1), torch.where(keep, labels, -100).flatten())


def test_a_ring_with_padding() -> None:
    """A mask of the batch is cut as the batch is; queries get all of its columns, and keys go round."""
    torch.manual_seed(0)
    model = Padded().double()
    keep = torch.arange(8) < torch.tensor([8, 5, 3, 6])[:, None]
    batches = [[*batch, keep] for batch in token_batches(2)]
    plan = {"dp": "zero3", "cp": "ring"}
    step, compilation = compiled_step(model, padded_loss, batches[0], {"dp": 2, "cp": 2}, plan, "adam", None)
    exchanges = [exchange_of(e) for e in program_of(compilation).equations]
    assert any(exchange and exchange[0] == "permute" for exchange in exchanges)
    mine = train_ranks(model, step, compilation, batches)
    assert_equal(mine, train_whole(model, padded_loss, batches, "adam", None))


def by_name(local: Trace) -> dict[str, float]:
    """Bytes of exchanges along cp that are no sums, by what they do."""
    sums: dict[str, float] = {}
    for e in local.equations:
        exchange = exchange_of(e)
        if exchange is not None and "cp" in exchange[1] and exchange[0] != "all_reduce":
            sums[exchange[0]] = sums.get(exchange[0], 0.0) + bytes_sent(e)
    return sums


LAYERS = 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_ulysses(ranks: int) -> None:
    """Queries, keys, values and results, each way."""
    each = 4 * ACTIVATION * (ranks - 1) / ranks**2
    assert by_name(program("gpt", {"cp": ranks}, "ulysses")) == {"all_to_all": LAYERS * 2 * each}


@pytest.mark.parametrize(("ranks", "recompute", "times"), [(2, "auto", 3), (4, "auto", 3), (2, "none", 2)])
def test_bytes_of_a_ring(ranks: int, recompute: str, times: int) -> None:
    """Keys and values go round in forward, again in backward unless they are kept, and their gradients behind them."""
    each = 2 * ACTIVATION * (ranks - 1) / ranks
    assert by_name(program("gpt", {"cp": ranks}, "ring", recompute=recompute)) == {"permute": LAYERS * times * each}


def test_a_call_gives_whole_sequences() -> None:
    """What is called has the batch's rows; the sequence is put together again."""
    with pretended({"cp": 2}) as mesh:
        fast = tessera.jit(GPT(1), mesh=mesh, plan="ring", executors="aten")
        with torch.no_grad():
            assert fast(token_batches(1)[0][0]).shape == (4, 8, 48)


@pytest.mark.parametrize(
    ("axes", "plan", "says"),
    [
        ({"a": 2, "b": 2}, {"a": "ring", "b": "ulysses"}, "expected one axis that splits the sequence, got a and b"),
        ({"cp": 2}, {"cp": "rings"}, "did you mean 'ring'"),
    ],
)
def test_bad_plans(axes: dict, plan: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Plan.of(plan, Mesh.of(axes))


@pytest.mark.parametrize(
    ("shape", "says"),
    [((4, 7), "expected a sequence that cp=2 divides, got 7 places"), ((4,), "the second dimension of the batch")],
)
def test_bad_sequences(shape: tuple, says: str) -> None:
    with pretended({"cp": 2}) as mesh:
        fast = tessera.jit(torch.nn.Embedding(4, 4), mesh=mesh, plan="ulysses", executors="aten")
        with pytest.raises(OptionError, match=says):
            fast(torch.zeros(shape, dtype=torch.int64))
