"""Functions of one rank's parts in models on a mesh: own collectives and `local_map`, all ranks in one process.

What they mean is written out beside them, over all ranks' parts, in eager PyTorch on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from all_ranks import assert_equal, train_mesh
from steps import compiled_step, pretended, program_of, train_whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.ir.dist import exchange_of
from tessera.util.errors import CaptureError

RANKS = 4


def _written(call: Callable, like: Callable = torch.empty_like) -> Callable:
    """A collective that writes into a tensor of its own."""

    def run(x: Tensor) -> Tensor:
        out = like(x)
        call(out, x.contiguous())
        return out

    return run


def _reduced(x: Tensor, **options: object) -> Tensor:
    y = x * 1
    dist.all_reduce(y, **options)
    return y


def _sent(x: Tensor) -> Tensor:
    y = x * 1
    work = dist.broadcast(y, src=2, async_op=True)
    work.wait()
    return y


def _listed(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x)
    return torch.stack(parts).amax(0)


def _rows(xs: list[Tensor], rank: int) -> Tensor:
    return torch.cat([x.chunk(RANKS)[rank] for x in xs])


def ops(name: str, *args: object) -> Callable:
    """A functional collective over all ranks."""

    def run(x: Tensor) -> Tensor:
        op = getattr(torch.ops._c10d_functional, name)
        return functional.wait_tensor(op(x.contiguous(), *args, dist.group.WORLD.group_name))

    return run


# of each collective: what a rank calls on 4 rows, and what rank r gets of everyone's
COLLECTIVES: dict[str, tuple[Callable, Callable]] = {
    "all_reduce": (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD), lambda xs, r: sum(xs)),
    "average": (ops("all_reduce", "avg"), lambda xs, r: sum(xs) / RANKS),
    "largest": (ops("all_reduce", "max"), lambda xs, r: torch.stack(xs).amax(0)),
    "all_gather": (lambda x: ops("all_gather_into_tensor", RANKS)(x).sum(0), lambda xs, r: torch.cat(xs).sum(0)),
    "columns": (lambda x: ops("all_gather_into_tensor", RANKS)(x.T).chunk(RANKS)[1].T, lambda xs, r: xs[1]),
    "reduce_scatter": (ops("reduce_scatter_tensor", "sum", RANKS), lambda xs, r: sum(xs).chunk(RANKS)[r]),
    "all_to_all": (ops("all_to_all_single", [1] * RANKS, [1] * RANKS), _rows),
    "broadcast": (ops("broadcast", 2), lambda xs, r: xs[2]),
    "plain all_reduce": (_reduced, lambda xs, r: sum(xs)),
    "plain smallest": (lambda x: _reduced(x, op=dist.ReduceOp.MIN), lambda xs, r: torch.stack(xs).amin(0)),
    "plain broadcast": (_sent, lambda xs, r: xs[2]),
    "plain all_gather": (_listed, lambda xs, r: torch.stack(xs).amax(0)),
    "plain gather": (
        lambda x: _written(dist.all_gather_into_tensor, lambda x: x.new_empty(4 * x.shape[0], x.shape[1]))(x).sum(0),
        lambda xs, r: torch.cat(xs).sum(0),
    ),
    "plain reduce_scatter": (
        _written(dist.reduce_scatter_tensor, lambda x: x.new_empty(1, x.shape[1])),
        lambda xs, r: sum(xs).chunk(RANKS)[r],
    ),
    "plain all_to_all": (_written(dist.all_to_all_single), _rows),
    "own rank": (
        lambda x: ops("all_reduce", "sum")(x) * (dist.get_rank() + 1) + dist.get_rank(dist.group.WORLD),
        lambda xs, r: sum(xs) * (r + 1) + r,
    ),
}


GROUPS = {"functional": list(COLLECTIVES)[:8], "written": list(COLLECTIVES)[8:-1], "own rank": ["own rank"]}


class Own(nn.Module):
    """Calls collectives in its forward."""

    def __init__(self, *calls: Callable) -> None:
        super().__init__()
        self.calls, self.up, self.down = calls, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh()
        return self.down(sum(i * y * call(y) for i, call in enumerate(self.calls, 1)))


class Meant(Own):
    """The same of everyone's parts; a call tells what a rank gets."""

    def forward(self, x: Tensor) -> Tensor:
        ys, parts = self.up(x).tanh().chunk(RANKS), []
        for rank, y in enumerate(ys):
            parts.append(sum(i * y * call(ys, rank) for i, call in enumerate(self.calls, 1)))
        return self.down(torch.cat(parts))


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def batches(count: int = 2, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 4).double(), torch.randn(rows, 2).double()) for _ in range(count)]


def alike(model: nn.Module, meant: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both in double precision, with the same weights."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    meant.load_state_dict(model.state_dict())
    return model.double(), meant.double()


def same(model: nn.Module, meant: nn.Module, axes: dict, plan: dict, data: list | None = None) -> None:
    """Losses, weights and state after a few steps are those of eager PyTorch on the whole batch."""
    model, meant = alike(model, meant)
    want = train_whole(meant, squares, data or batches(), "adam", None)
    assert_equal(train_mesh(model, squares, data or batches(), axes, plan), want)


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # some have new names since PyTorch 2.13
def test_own_collectives(kind: str) -> None:
    calls, meanings = zip(*(COLLECTIVES[name] for name in GROUPS[kind]), strict=True)
    same(Own(*calls), Meant(*meanings), {"dp": RANKS}, {"dp": "zero3"})


@pytest.mark.parametrize(
    ("axes", "plan", "ranks"),
    [
        ({"dp": 2, "ep": 2}, {"dp": "zero1", "ep": "ddp"}, [0, 1, 2, 3]),  # a group along two axes
        ({"dp": 4, "tp": 2}, {"dp": "zero3", "tp": "tensor"}, [0, 2, 4, 6]),
        ({"pp": 2, "dp": 4}, {"pp": "gpipe", "dp": "ddp"}, [0, 1, 2, 3]),
    ],
)
def test_own_collectives_beside_other_axes(axes: dict, plan: dict, ranks: list[int]) -> None:
    """Groups are found by their ranks."""
    same(Own(lambda x: functional.all_reduce(x, "sum", ranks)), Meant(lambda xs, r: sum(xs)), axes, plan)


def test_batches_of_other_sizes() -> None:
    """From the second size on one program serves all."""
    model = Own(lambda x: functional.all_reduce(x.mean(0), "sum", dist.group.WORLD))
    meant = Meant(lambda xs, r: sum(x.mean(0) for x in xs))
    same(model, meant, {"dp": RANKS}, {"dp": "ddp"}, [*batches(1), *batches(1, 24), *batches(1, 32)])


def test_collectives_in_a_checkpoint() -> None:
    def again(x: Tensor) -> Tensor:
        return checkpoint(lambda x: functional.all_reduce(x.sin(), "sum", dist.group.WORLD), x, use_reentrant=False)

    same(Own(again), Meant(lambda xs, r: sum(x.sin() for x in xs)), {"dp": RANKS}, {"dp": "ddp"})


class Running(Own):
    """Keeps what all ranks have seen."""

    def __init__(self, *calls: Callable) -> None:
        super().__init__(*calls)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for call in self.calls:
            self.seen.mul_(0.9).add_(call(y.sum(0).detach()))
        return self.down(y + self.seen)


def test_buffers_that_are_the_same_on_all_ranks() -> None:
    same(Running(ops("all_reduce", "sum")), Running(lambda x: x), {"dp": RANKS}, {"dp": "ddp"})


# --- local_map ------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """Runs a function of parts between two layers. `make` wraps it for a mesh; without one its meaning is called."""

    def __init__(self, make: Callable | None, meaning: Callable) -> None:
        super().__init__()
        self.make, self.meaning = make, meaning
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        call = self.meaning if self.make is None else self.make(ALONG)
        return self.down(call(self.up(x).tanh(), self.up.weight))


ALONG: dict = {}


@pytest.fixture(autouse=True)
def meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh that a test's model runs on, and groups; models are copied, and those are not."""
    make = tessera.mesh

    def kept(**options: object) -> DeviceMesh:
        mesh = make(**options)
        ALONG.update({axis: mesh[axis] for axis in mesh.mesh_dim_names})
        ALONG["both"], ALONG["others"] = mesh, dist.new_group([0, 3])
        return mesh

    monkeypatch.setattr(tessera, "mesh", kept)


def _product(mesh: dict) -> Callable:
    """Columns of one, rows of the other: ranks have summands."""

    def function(y: Tensor, w: Tensor) -> Tensor:
        return functional.all_reduce(y @ w @ w.T, "sum", mesh["tp"])

    return local_map(function, [Replicate()], ([Replicate()], [Shard(1)]), device_mesh=mesh["tp"])


def _summands(mesh: dict) -> Callable:
    words = [Shard(0), Replicate()], [Replicate(), Shard(1)]
    return local_map(
        lambda y, w: (y @ w @ w.T).unflatten(0, (1, -1))[0], [Shard(0), Partial()], words, device_mesh=mesh["both"]
    )


def _centred(mesh: dict) -> Callable:
    """By rows along dp, by columns along tp."""
    words = [Shard(0), Shard(1)]
    return local_map(
        lambda y, w: y - y.mean() + w.sum(), words, (words, [Replicate(), Replicate()]), device_mesh=mesh["both"]
    )


def _blocks(y: Tensor, w: Tensor) -> Tensor:
    rows = [torch.cat([b - b.mean() for b in row.chunk(2, 1)], 1) for row in y.chunk(2)]
    return torch.cat(rows) + w.sum()


def _halves(mesh: dict) -> Callable:
    """Summands go in: one rank has all of them."""
    words = [Partial()], [Replicate()]
    return local_map(lambda y, w: y * w.sum() + 1, [Partial()], words, device_mesh=mesh["tp"])


MAPS = {
    "a product": (_product, lambda y, w: y @ w @ w.T),
    "summands": (_summands, lambda y, w: y @ w @ w.T),
    "blocks": (_centred, _blocks),
    "summands in": (_halves, lambda y, w: y * w.sum() + 2),
}


@pytest.mark.parametrize("name", MAPS)
def test_local_map(name: str) -> None:
    make, meaning = MAPS[name]
    same(Mapped(make, meaning), Mapped(None, meaning), {"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "tensor"})


def exchanges(model: nn.Module, axes: dict, plan: object) -> list[tuple[str, int]]:
    """What a step's program exchanges: the name, and how many elements a rank gives."""
    _, compilation = compiled_step(model.double(), squares, batches(1)[0], axes, plan, "sgd", None)
    found = [(exchange_of(e), e) for e in program_of(compilation).equations]
    return [(exchange[0], prod(e.inputs()[0].shape)) for exchange, e in found if exchange is not None]


def test_cotangents_go_the_way_back() -> None:
    """A gathered value's cotangent is reduced and scattered; that of what all ranks got is there already."""

    def gathered(x: Tensor) -> Tensor:
        whole = ops("all_gather_into_tensor", RANKS)(x)
        return (x @ whole.T).softmax(-1) @ whole

    names = exchanges(Own(gathered), {"dp": RANKS}, "ddp")
    assert ("all_gather", 4 * 8) in names and ("reduce_scatter", 16 * 8) in names, names
    names = exchanges(Own(lambda x: ops("all_reduce", "sum")(x.mean(0))), {"dp": RANKS}, "ddp")
    weights = 2 * 8 + 2 + 1  # those of the last layer, and the loss
    assert names == [("all_reduce", 8), ("all_reduce", weights + 8), ("all_reduce", 8 * 4 + 8)], names


# --- what is refused ------------------------------------------------------------------------------


def refusal(model: nn.Module, loss: Callable = squares) -> str:
    with pretended({"dp": 2, "tp": 2}) as mesh, pytest.raises(CaptureError) as error:
        by = torch.optim.SGD(model.double().parameters(), 0.1)
        plan = {"dp": "ddp", "tp": "tensor"}
        tessera.train_step(model, loss, by, executors="aten", mesh=mesh, plan=plan)(*(x[:8] for x in batches(1)[0]))
    assert __file__.rpartition("/")[2] in str(error.value)
    return str(error.value)


def _mapped(function: Callable, out: list, ins: tuple | None, **options: object) -> nn.Module:
    return Mapped(lambda mesh: local_map(function, out, ins, device_mesh=mesh["both"], **options), lambda y, w: y)


TWO = [Replicate(), Replicate()]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_mapped(lambda y, w: y * 2, TWO, ([Shard(0), Replicate()], TWO)), "differs between ranks along dp"),
        (_mapped(lambda y, w: y, TWO, None), "with in_placements"),
        (_mapped(lambda y, w: y, TWO, (TWO,)), "for 2 arguments, got 1"),
        (_mapped(lambda y, w: y, TWO, ([Replicate()], TWO)), "each of the axes"),
        (_mapped(lambda y, w: y.add_(1), [Shard(0), Replicate()], ([Shard(0), Replicate()], TWO)), "writes none"),
        (_mapped(lambda y, w: w, TWO, (TWO, [Replicate(), Shard(0)])), "differs between ranks along tp"),
        (Own(lambda x: functional.all_reduce(x, "product", dist.group.WORLD)), "sum, avg, max, min"),
        (Own(lambda x: functional.all_reduce(x, "sum", ALONG["others"])), "got one of other ranks"),
        (Own(lambda x: _alone(dist.reduce, x)), "writes into a tensor"),
        (
            Own(lambda x: x if dist.get_rank() else functional.all_reduce(x, "sum", dist.group.WORLD)),
            "asks for the value",
        ),
    ],
)
def test_refused(model: nn.Module, words: str) -> None:
    assert words in refusal(model)


def _alone(call: Callable, x: Tensor) -> Tensor:
    y = x * 1
    call(y, 0)
    return y


def test_refused_outside_of_the_model() -> None:
    """There values are those of the whole batch; a model's results must have rows, or be everyone's."""

    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.all_reduce(squares(model, x, y), "sum", dist.group.WORLD)

    assert "outside of the model" in refusal(Own(lambda x: x), summed)

    class Loss(Own):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    assert "differs along dp" in refusal(Loss(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD)))

    class Counts(Own):
        def __init__(self, *calls: Callable) -> None:
            super().__init__(*calls)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += self.up(x).sum(0).detach()
            return super().forward(x)

    said = refusal(Counts(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD)))
    assert "different values for what is one" in said
