"""What a rank does in tests of programs that others wrote for many ranks: own collectives, DDP, DTensors."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from generating import GREEDY, GROWING, PROMPT, language_model
from launch import join_group
from models import MoE, token_batches
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tessera
from tessera.ops.factors import experts as experts_rule

WORLD = 2


# --- a model's own collectives --------------------------------------------------------------------


def _rows(xs: list[Tensor], rank: int) -> Tensor:
    return torch.cat([x.chunk(WORLD)[rank] for x in xs])


# of each collective: what a rank calls, and what rank r gets of everyone's x
COLLECTIVES: dict[str, tuple[Callable, Callable]] = {
    "all_reduce": (lambda x, g: functional.all_reduce(x, "sum", g), lambda xs, r: sum(xs)),
    "all_gather": (lambda x, g: functional.all_gather_tensor(x, 0, g), lambda xs, r: torch.cat(xs)),
    "columns": (lambda x, g: functional.all_gather_tensor(x, 1, g), lambda xs, r: torch.cat(xs, 1)),
    "reduce_scatter": (
        lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
        lambda xs, r: sum(xs).chunk(WORLD)[r],
    ),
    "all_to_all": (lambda x, g: functional.all_to_all_single(x, None, None, g), _rows),
    "broadcast": (lambda x, g: functional.broadcast(x, 1, g), lambda xs, r: xs[1]),
    "gather_autograd": (lambda x, g: functional.all_gather_tensor_autograd(x, 0, g), lambda xs, r: torch.cat(xs)),
    "all_to_all_autograd": (lambda x, g: functional.all_to_all_single_autograd(x, None, None, g), _rows),
}


def own_collectives(rank: int) -> None:
    """Results and gradients are those of all ranks' losses together, computed in one process."""
    for name, (call, meaning) in COLLECTIVES.items():
        xs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(r)).requires_grad_() for r in range(WORLD)]
        wants = [meaning([x * 2 for x in xs], r).sin() for r in range(WORLD)]
        total = sum((r + 1) * want.sum() for r, want in enumerate(wants))
        want_grads = torch.autograd.grad(total, xs, materialize_grads=True)
        fast = tessera.jit(lambda x, call=call: call(x * 2, dist.group.WORLD).sin(), executors="aten", strict=True)
        x = xs[rank].detach().requires_grad_()
        out = fast(x)
        ((rank + 1) * out.sum()).backward()
        torch.testing.assert_close(out, wants[rank], msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(x.grad, want_grads[rank], msg=lambda text, name=name: f"grad of {name}: {text}")
        assert "_c10d_functional" in str(tessera.explain(fast))


def unread_collectives(rank: int) -> None:
    """A rank that does not read what all ranks compute still takes part, in the model's order."""

    def f(x: Tensor) -> Tensor:
        first = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        second = functional.all_reduce(x * 3, "sum", dist.group.WORLD)
        return second if rank == 0 else (first + second).exp() - first

    x = torch.arange(3.0) + rank
    fast = tessera.jit(f, executors="aten", strict=True)
    torch.testing.assert_close(fast(x), f(x))


class Shared(nn.Module):
    """Standardises by what all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        mean = functional.all_reduce(y.mean(0), "sum", dist.group.WORLD) / WORLD
        return self.down((y - mean).relu())


def collectives_in_a_step(rank: int) -> None:
    batches = [torch.randn(WORLD, 3, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    torch.manual_seed(0)
    model, plain = Shared().double(), Shared().double()
    plain.load_state_dict(model.state_dict())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = tessera.train_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), executors="aten", strict=True)
    by = torch.optim.SGD(plain.parameters(), 0.1)
    for batch in batches:
        got, want = step(batch[rank]), loss(plain, batch[rank])
        by.zero_grad()
        want.backward()
        by.step()
        torch.testing.assert_close(got, want.detach())
    assert not step.in_parts
    same_weights(model, plain)


class Written(Shared):
    """Sums as PyTorch's plain collectives do, and tells ranks apart."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        total = y.mean(0)
        dist.all_reduce(total)
        return self.down((y - total / WORLD).relu() * (dist.get_rank() + 1))


def kept_on_a_mesh(rank: int) -> None:
    """Each rank gets what it gets in eager PyTorch; gradients are those of one process that has all parts."""
    mesh, xs = (
        tessera.mesh(device="cpu", dp=WORLD),
        torch.randn(WORLD, 4, 4, generator=torch.Generator().manual_seed(0)),
    )

    def standard(model: nn.Module, x: Tensor, scale: int) -> Tensor:
        y = model.up(x)
        mean = model.up(xs.flatten(0, 1)).mean(0)
        return model.down((y - mean).relu() * scale)

    def centred(model: nn.Module, x: Tensor, scale: int) -> Tensor:
        y = model.layer(x)
        return y - y.mean(0)

    for make, meaning in ((Shared, standard), (Written, standard), (lambda: InParts(mesh), centred)):
        torch.manual_seed(0)
        model = make()
        plain, eager = copy.deepcopy(model) if make in (Shared, Written) else make(), model(xs[rank]).detach()
        plain.load_state_dict(model.state_dict())
        wants = [meaning(plain, x, r + 1 if make is Written else 1) for r, x in enumerate(xs)]
        sum(want.square().sum() for want in wants).backward()
        out = tessera.jit(tessera.shard(model, mesh, "ddp"), executors="aten")(xs[rank])
        out.square().sum().backward()
        torch.testing.assert_close(out.detach(), eager)
        torch.testing.assert_close(out.detach(), wants[rank].detach())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)


class InParts(nn.Module):
    """Its function sees a rank's own rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.centred = local_map(lambda x: x - x.mean(0), [Shard(0)], ([Shard(0)],), device_mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.centred(self.layer(x))


def local_maps(rank: int) -> None:
    """Regions over parts stay what they are in a model of DTensors, and in one over plain tensors."""
    mesh = tessera.mesh(device="cpu", dp=WORLD)
    model = InParts(mesh)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tessera.jit(model, executors="aten")(x), model(x))
    for name, p in list(model.layer.named_parameters()):
        setattr(model.layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
    results = []
    for call in (model, tessera.jit(model, executors="aten")):
        out = call(distribute_tensor(x, mesh, [Shard(0)]))
        out.square().sum().backward()
        results.append((whole(out.detach()), whole(model.layer.weight.grad)))
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0])


# --- modules that PyTorch lays out ----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(4, 8).double(), torch.randn(4, 4).double()


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), whole(q.detach()), rtol=1e-9, atol=1e-11)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def trained(model: nn.Module, call: Callable, part: Callable) -> list[Tensor]:
    """Five steps of plain training; `call` is the model, however compiled."""
    by, losses = optimizer_of(model), []
    for i in range(5):
        loss = squares(call, *map(part, batch_of(i)))
        by.zero_grad()
        loss.backward()
        by.step()
        losses.append(whole(loss.detach()))
    return losses


def stepped(model: nn.Module, part: Callable, **options: object) -> list[Tensor]:
    step = tessera.train_step(model, squares, optimizer_of(model), executors="aten", **options)
    losses = [whole(step(*map(part, batch_of(i)))) for i in range(5)]
    line = str(tessera.explain(step))
    assert ("tessera.shard(" in line) == (step.__class__.__name__ == "TrainStep"), line
    return losses


def as_they_are(wrap: Callable, part: Callable, who: str) -> None:
    """Wrapped models train as they do in eager PyTorch, through `jit` and through `train_step`."""
    models = [wrap(net()) for _ in range(3)]
    fast = tessera.jit(models[0], executors="aten", strict=False)
    want = trained(models[2], models[2], part)
    torch.testing.assert_close(trained(models[0], fast, part), want)
    torch.testing.assert_close(stepped(models[1], part), want)
    for model in models[:2]:
        same_weights(model, models[2])
    assert who in tessera.explain(fast).elsewhere


def under_ddp(rank: int) -> None:
    as_they_are(DistributedDataParallel, lambda x: x.chunk(WORLD)[rank], "DistributedDataParallel")


def under_fully_shard(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))

    def wrap(model: Net) -> nn.Module:
        for block in (model.a, model.b):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    as_they_are(wrap, lambda x: x.chunk(WORLD)[rank], "fully_shard")


# --- weights that lie on a mesh already -----------------------------------------------------------


def parallelized(mesh: DeviceMesh) -> Net:
    model = net()
    for block in (model.a, model.b):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def kept_placements(rank: int) -> None:
    """`parallelize_module` on one axis, then `shard` on a mesh that has it: weights stay, the rest follows the plan."""
    mesh = tessera.mesh(device="cpu", dp=1, tp=WORLD)
    as_they_are(lambda _: parallelized(mesh["tp"]), lambda x: x, "DTensors")
    plain, model = net(), parallelized(mesh["tp"])
    before = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    tessera.shard(model, mesh, {"dp": "zero3", "tp": "tensor"})
    want = trained(plain, plain, lambda x: x)
    torch.testing.assert_close(stepped(model, lambda x: x), want)
    same_weights(model, plain)
    assert len(before) == 8
    for name, p in model.named_parameters():
        assert p.placements[1:] == before.get(name, (Replicate(),)), name


def dtensors(rank: int) -> None:
    """DTensors in, DTensors out; their gradients lie as they do."""
    mesh = tessera.mesh(device="cpu", x=WORLD)
    model, plain = net(), net()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    tessera.shard(model, mesh, "tensor")
    x, y = batch_of(9)[0], batch_of(9)[0].requires_grad_()
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out, want = tessera.jit(model, executors="aten")(given), plain(y)
    assert isinstance(out, DTensor) and out.placements == (Shard(0),) and out.shape == want.shape
    for result in (out, want):
        result.square().sum().backward()
    torch.testing.assert_close(whole(out.detach()), want.detach())
    assert given.grad is not None and given.grad.placements == (Shard(0),)
    torch.testing.assert_close(whole(given.grad), y.grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.placements == p.placements == (Shard(0),)
        torch.testing.assert_close(whole(p.grad), q.grad)
        p.grad = q.grad = None
    for part in (lambda x: distribute_tensor(x, mesh, [Shard(0)]), lambda x: distribute_tensor(x, mesh, [Replicate()])):
        torch.testing.assert_close(stepped(model, part), trained(plain, plain, lambda x: x))
        same_weights(model, plain)


# --- generating -----------------------------------------------------------------------------------


def generated(rank: int) -> None:
    """One process's tokens on every rank; a rank's cache has its own heads."""
    mesh = tessera.mesh(device="cpu", tp=WORLD)
    for name in ("gpt2", "mixtral"):  # test_generate has the others
        model = language_model(name)
        want = model.generate(PROMPT, **GREEDY)
        fast = tessera.jit(model, mesh=mesh, plan="tensor" if name == "gpt2" else "hf", executors="aten")
        for _ in range(2):  # the second time with a cache of its own, and the same programs
            assert fast.generate(PROMPT, **GREEDY).tolist() == want.tolist(), name
        assert len(fast.__tessera__.compilations()) == 2, name


def grown_caches(rank: int) -> None:
    """A cache that grows: the same tokens, and every length has a program of its own."""
    model = language_model("llama")
    want = model.generate(PROMPT, **GROWING)
    fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", tp=WORLD), plan="tensor", executors="aten")
    assert fast.generate(PROMPT, **GROWING).tolist() == want.tolist()
    assert len(fast.__tessera__.compilations()) == GROWING["max_new_tokens"]


def experts_answer(rank: int) -> None:
    """Without gradients, over an axis of experts: results of this rank's rows, and the tokens that follow them. Rows
    go in parts, however few there are."""
    experts_rule.PART = 0
    mesh = tessera.mesh(device="cpu", ep=WORLD)
    torch.manual_seed(0)
    model = MoE(2).double()
    plain, (ids, _) = copy.deepcopy(model), token_batches(1, 4)[0]
    fast = tessera.jit(model, mesh=mesh, plan="experts", executors="aten")
    with torch.no_grad():
        got, want = fast(ids.chunk(WORLD)[rank]), plain(ids).chunk(WORLD)[rank]
    assert (got - want).norm() <= 1e-11 * want.norm()
    model = language_model("mixtral")
    want = model.generate(PROMPT, **GREEDY)[rank : rank + 1]
    fast = tessera.jit(model, mesh=mesh, plan="experts", executors="aten")
    assert fast.generate(PROMPT[rank : rank + 1], **GREEDY).tolist() == want.tolist()


PARTS = (
    own_collectives, unread_collectives, collectives_in_a_step, kept_on_a_mesh, local_maps, under_ddp,
    under_fully_shard, kept_placements, dtensors, generated, grown_caches, experts_answer,
)  # fmt: skip


def run(rank: int, folder: str) -> None:
    """Every part in turn; what went wrong is written down."""
    join_group(rank, WORLD, f"{folder}/meet", 60)
    for part in PARTS:
        torch.compiler.reset()
        try:
            part(rank)
        except Exception:
            (Path(folder) / f"{part.__name__}_{rank}.txt").write_text(traceback.format_exc())
        dist.barrier()
    (Path(folder) / f"done_{rank}").touch()
    dist.destroy_process_group()
