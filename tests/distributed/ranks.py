"""What a rank of a gloo group does in tests."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import join_group
from models import GPT, token_batches, token_loss
from torch.distributed.device_mesh import DeviceMesh

import tessera
from tessera.distributed import in_step
from tessera.distributed.weights import whole_of
from tessera.ir.dist import on
from tessera.ir.mesh import Mesh
from tessera.util.errors import InputError, MeshError


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return GPT(1).double()


def train(rank: int, world: int, folder: str, cases: list[tuple[dict, object]]) -> None:
    """Every plan in turn; rank 0 writes down losses and whole weights."""
    join_group(rank, world, f"{folder}/meet")
    for number, (axes, plan) in enumerate(cases):
        mesh = tessera.mesh(device="cpu", **axes)
        model = model_of(rank)  # what rank 0 has counts
        step = tessera.train_step(model, token_loss, optimizer_of(model), executors="aten", mesh=mesh, plan=plan)
        parts, own = axes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in axes else 0
        losses = [float(step(*(x.chunk(parts)[own] for x in batch))) for batch in token_batches(2)]
        weights = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save((losses, weights), Path(folder) / f"{number}.pt")
    for part in (through_jit, accumulated, on_meta, saved, differing):
        part(rank, Path(folder))
    exchange(rank, world)
    of_all_dtypes(rank, world)
    of_what_is_turned_as_it_is_read(rank, world)
    held_dtypes(rank)
    dist.destroy_process_group()


def through_jit(rank: int, folder: Path) -> None:
    """A sharded model is called: this rank's part of the result, and gradients that lie as their weights do."""
    mesh, plan = tessera.mesh(device="cpu", dp=1, tp=2), {"dp": "zero3", "tp": "sequence", "blocks.?": "b/dp, s/tp, d"}
    model = model_of(rank)
    fast = tessera.jit(model, mesh=mesh, plan=plan, executors="aten")
    out = fast(token_batches(1)[0][0])
    out.square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.placements == p.placements
    keep(rank, folder / "jit.pt", [out.detach(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}])
    rows = tessera.shard(model_of(rank), tessera.mesh(device="cpu", dp=2), "zero3")
    ids = token_batches(1)[0][0].chunk(2)[rank]
    out = tessera.jit(rows, executors="aten")(ids)
    assert out.shape[0] == 2
    out.square().sum().backward()
    keep(rank, folder / "rows.pt", [out.detach(), {n: p.grad.full_tensor() for n, p in rows.named_parameters()}])


def accumulated(rank: int, folder: Path) -> None:
    """Two calls share an update; sums of gradients wait where the plan splits them, and the last ones are kept."""
    model = tessera.shard(model_of(rank), tessera.mesh(device="cpu", dp=2), "zero1")
    options = {"accumulate": 2, "clip_norm": 0.5, "keep_grads": True, "executors": "aten"}
    step = tessera.train_step(model, token_loss, optimizer_of(model), **options)
    for batch in token_batches(4):
        step(*(x.chunk(2)[rank] for x in batch))
    assert all(p.grad.to_local().numel() * 2 == p.numel() == p.to_local().numel() for p in model.parameters())
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    keep(rank, folder / "sums.pt", [{n: p.detach().full_tensor() for n, p in model.named_parameters()}, grads])


def on_meta(rank: int, folder: Path) -> None:
    """A model without memory is made shard by shard, from what rank 0 draws."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
    torch.manual_seed(rank)
    tessera.shard(model, tessera.mesh(device="cpu", dp=2), "zero3")
    assert model[0].weight.to_local().shape == (3, 4)
    keep(rank, folder / "meta.pt", {n: p.detach().full_tensor() for n, p in model.named_parameters()})


def saved(rank: int, folder: Path) -> None:
    """A state that one mesh wrote is loaded on others, and training goes on."""
    states = folder / "saved"
    for number, (axes, plan) in enumerate(
        [({"dp": 2}, "zero3"), ({"tp": 2}, "tensor"), ({"dp": 1, "tp": 2}, {"dp": "zero3", "tp": "sequence"})]
    ):
        model = tessera.shard(model_of(rank + number), tessera.mesh(device="cpu", **axes), plan)
        optimizer = optimizer_of(model)
        if number:
            tessera.load_state(states, model, optimizer)
        step = tessera.train_step(model, token_loss, optimizer, executors="aten")
        batch = token_batches(3)[number]
        step(*(x.chunk(2)[rank] if axes["dp"] == 2 else x for x in batch) if "dp" in axes else batch)
        tessera.save_state(states, model, optimizer)


def keep(rank: int, path: Path, what: object) -> None:
    if rank == 0:
        torch.save(what, path)


def exchange(rank: int, world: int) -> None:
    """Collectives over gloo are those of the interpreter."""
    tessera.mesh(device="cpu", x=world)
    mesh = Mesh.of(x=world)
    whole = torch.arange(24.0).reshape(4, 6) + 1
    parts = [whole * (r + 1) for r in range(world)]
    for name, *args in (
        ("all_gather", 1, "x"), ("all_gather", 0, "x", 7), ("reduce_scatter", 1, "x"), ("reduce_scatter", 0, "x"),
        ("all_reduce", "x"), ("all_reduce", "x", "max"), ("all_to_all", 0, 1, "x"), ("all_to_all", 1, 0, "x"),
        ("permute", "x", 1), ("slice", 0, "x"), ("once", "x"), ("fill", 0, 7, ("x",), 5.0),
    ):  # fmt: skip
        op = getattr(on(mesh), name)
        want = in_step.together(op, [(x, *args) for x in parts])[rank]
        torch.testing.assert_close(op.fn(parts[rank], *args), want, rtol=0, atol=0)


DTYPES = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
)  # fmt: skip


def numbers(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Large ones among them, as whole numbers wrap around."""
    x = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(rank))
    if dtype in (torch.int16, torch.uint16):
        x = x + 30000
    if dtype in (torch.uint32, torch.uint64):
        bits = torch.iinfo(dtype).bits
        return (x - 2 * rank).to(torch.int64 if bits == 64 else torch.int32).view(dtype)
    return (x + 1j * x.flip(0)).to(dtype) if dtype.is_complex else (x > 2 if dtype == torch.bool else x.to(dtype))


def computed(xs: list[torch.Tensor], how: str) -> torch.Tensor:
    dtype = xs[0].dtype
    if dtype in (torch.uint32, torch.uint64):
        bits = torch.iinfo(dtype).bits
        whole = [[int(v) % 2**bits for v in x.view(torch.int64 if bits == 64 else torch.int32).flatten()] for x in xs]
        make = {"sum": lambda vs: sum(vs) % 2**bits, "max": max, "min": min}[how]
        out = [make(vs) for vs in zip(*whole, strict=True)]
        return torch.tensor(out, dtype=torch.uint64).to(dtype).view(4, 6)
    if dtype == torch.bool:
        return functools.reduce({"sum": torch.logical_or, "max": torch.logical_or, "min": torch.logical_and}[how], xs)
    wide = dtype if dtype.is_complex else torch.float32 if dtype.is_floating_point else torch.int64
    step = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how]
    return functools.reduce(step, [x.to(wide) for x in xs]).to(dtype)


def of_all_dtypes(rank: int, world: int) -> None:
    """What moves arrives, what is added is what one device adds, and without an order there is no largest."""
    tessera.mesh(device="cpu", y=world)
    mesh = Mesh.of(y=world)
    for dtype in DTYPES:
        parts = [numbers(dtype, r) for r in range(world)]
        for name, *args in (
            ("all_gather", 1, "y"), ("all_gather", 0, "y", 7), ("all_to_all", 0, 1, "y"), ("permute", "y", 1),
        ):  # fmt: skip
            op = getattr(on(mesh), name)
            want = in_step.together(op, [(x, *args) for x in parts])[rank]
            assert torch.equal(op.fn(parts[rank], *args).view(torch.uint8), want.view(torch.uint8)), (name, dtype)
        for how in ("sum", "max", "min"):
            if dtype.is_complex and how != "sum":
                with pytest.raises(InputError, match="expected numbers with an order for the"):
                    on(mesh).all_reduce.fn(parts[rank], "y", how)
                continue
            want = computed(parts, how)
            got = on(mesh).all_reduce.fn(parts[rank], "y", how)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (how, dtype)
        got, want = on(mesh).reduce_scatter.fn(parts[rank], 1, "y"), computed(parts, "sum").chunk(world, 1)[rank]
        assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8)), dtype


def of_what_is_turned_as_it_is_read(rank: int, world: int) -> None:
    """Backends read memory; what is negated or conjugated as it is read arrives as it is read."""
    mesh = Mesh.of(y=world)
    for dtype, view in ((torch.float32, torch._neg_view), (torch.complex64, torch.conj)):
        parts = [view(numbers(dtype, r)) for r in range(world)]
        assert parts[0].is_neg() or parts[0].is_conj()
        plain = [x.resolve_conj().resolve_neg() for x in parts]
        for name, *args in (
            ("all_gather", 1, "y"), ("all_to_all", 0, 1, "y"), ("permute", "y", 1), ("all_reduce", "y"),
            ("reduce_scatter", 1, "y"),
        ):  # fmt: skip
            op = getattr(on(mesh), name)
            want = in_step.together(op, [(x, *args) for x in plain])[rank]
            assert torch.equal(op.fn(parts[rank], *args), want), (name, dtype)


class Held(torch.nn.Module):
    """Weights and buffers of rare dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for dtype in DTYPES:
            name = f"of_{str(dtype).removeprefix('torch.')}"
            self.register_buffer(name, numbers(dtype, seed).T)
            self.register_parameter(f"{name}_p", torch.nn.Parameter(numbers(dtype, seed), requires_grad=False))
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.of_int16.sum() + self.of_uint16_p.float().mean()


def held_dtypes(rank: int) -> None:
    """They come from rank 0, lie in parts, and are whole again."""
    torch.manual_seed(0)
    model, first = Held(rank), Held(0)
    plain = copy.deepcopy(model.layer)
    fast = tessera.jit(model, mesh=tessera.mesh(device="cpu", dp=2), plan="zero3", executors="aten")
    x = torch.ones(2, 4)
    first.layer = plain
    torch.testing.assert_close(fast(x), first(x))
    for name, b in first.named_buffers():
        assert torch.equal(model.get_buffer(name).contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    for name, p in first.named_parameters():
        assert torch.equal(whole_of(model.get_parameter(name)).view(torch.uint8), p.view(torch.uint8)), name


# --- what goes wrong ------------------------------------------------------------------------------


class Scaled(torch.nn.Linear):
    """Its number is a part of the program."""

    def __init__(self, by: int) -> None:
        super().__init__(4, 4)
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.by


def differing(rank: int, folder: Path) -> None:
    """Ranks that differ say so on all of them, and go on with what is right."""
    mesh = tessera.mesh(device="cpu", dp=2)
    says = []
    ids = token_batches(1)[0][0]

    def told(fn: Callable, *args: object) -> None:
        try:
            fn(*args)
        except MeshError as error:
            says.append(str(error))

    model = tessera.jit(model_of(0), mesh=mesh, plan="zero3", executors="aten")
    told(model, ids[: 2 - rank])
    told(tessera.shard, torch.nn.Linear(4, 4 + rank), mesh, "ddp")
    told(tessera.jit(tessera.shard(Scaled(1 + rank), mesh, "ddp"), executors="aten"), torch.ones(2, 4))
    columns = tessera.jit(model_of(0), mesh=tessera.mesh(device="cpu", tp=2), plan="tensor", executors="aten")
    told(columns, ids + rank)
    told(lambda: tessera.mesh(device="cpu", **({"dp": 2, "tp": 1} if rank else {"dp": 1, "tp": 2})))
    told(known_sizes, rank, mesh)
    told(edited, rank, mesh, folder)
    told(other_options, rank, mesh)
    dist.barrier()
    (folder / f"differing_{rank}.txt").write_text("\n".join(says))


def known_sizes(rank: int, mesh: DeviceMesh) -> None:
    """Both ranks have a program for either size; given one each, they would take their own for everyone's."""
    model = tessera.jit(Scaled(1), mesh=mesh, plan="zero3", executors="aten")
    for rows in (2, 4, 6, 2):
        model(torch.ones(rows, 4))
    model(torch.ones(4 + 2 * rank, 4))


def other_options(rank: int, mesh: DeviceMesh) -> None:
    """The rate is a number that the one program is given."""
    model = tessera.shard(Scaled(1), mesh, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    tessera.train_step(model, lambda model, x: model(x).sum(), optimizer, executors="aten")(torch.ones(2, 4))


def edited(rank: int, mesh: DeviceMesh, folder: Path) -> None:
    """One rank exchanges something else; files have other names, which is no difference."""
    model = tessera.shard(Scaled(1), mesh, "zero3")
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    step = tessera.train_step(model, loss, torch.optim.SGD(model.parameters()), executors="aten")
    step(torch.ones(2, 4))
    path = folder / f"edited_{rank}.py"
    scattered, summed = r"dist.reduce_scatter\((sum\w*), 0, 'dp'\)", r"dist.slice(dist.all_reduce(\1, 'dp'), 0, 'dp')"
    for differs in ((), (1,)):
        tessera.stages(step)["backward"].save(str(path))
        text = path.read_text()
        assert text.count(" = dist.reduce_scatter") == 2
        path.write_text(re.sub(scattered, summed, text) if rank in differs else text)
        tessera.edit(step, str(path))
        step(torch.ones(2, 4))
