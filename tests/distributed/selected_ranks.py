"""What a rank of a gloo group does with rows that a mask selects: as results, and by their order."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import join_group
from test_selected_rows import Words, columns, in_order
from torch import Tensor, nn

import tessera


class Kept(Words):
    """A rank has its own of them."""

    whole = False

    def forward(self, ids: Tensor) -> object:
        return self.up(self.words(ids)).tanh()[ids > 9]


class Sequences(Kept):
    def forward(self, ids: Tensor) -> object:
        x = self.up(self.words(ids))
        rows = x[(ids > 35).any(1)]
        return {"rows": rows[rows[:, 0, 0] > 0], "all": x, "twice": rows.exp()}


class Columns(Kept):
    """Of a mask over something else than the batch, every rank has all that it selects in its own rows."""

    def forward(self, ids: Tensor) -> object:
        x = self.up(self.words(ids))
        return x[..., self.up.bias > 0]


class Whole(Words):
    """What was put in order, or behind other rows, all ranks have."""

    whole = True

    def forward(self, ids: Tensor) -> object:
        x = self.up(self.words(ids))
        rows, few = x[ids > 9], x[ids > 40]
        return rows.sort(0).values, torch.cat([few, rows * 2]), rows.view(-1, 8).exp(), rows.topk(3, 0).values


MODELS = (Kept, Sequences, Columns, Whole)
LOSSES = (in_order, columns)
PLANS = {2: [({"dp": 2}, "zero3"), ({"tp": 2}, "tensor")], 4: [({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"})]}


def batch_of(rows: int) -> Tensor:
    return torch.randint(0, 48, (rows, 8), generator=torch.Generator().manual_seed(2))


def squares(out: object) -> Tensor:
    return sum(x.square().sum() for x in torch.utils._pytree.tree_leaves(out))


def results(model: Words, axes: dict[str, int], plan: object) -> None:
    """Each rank's result, and gradients of the sum of all ranks' squares."""
    mesh, ids = tessera.mesh(device="cpu", **axes), batch_of(8)
    parts, own = axes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in axes else 0
    plain = copy.deepcopy(model)
    wants = [plain(part) for part in ([ids] * parts if model.whole else ids.chunk(parts))]
    squares(wants[own] if model.whole else wants).backward()
    out = tessera.jit(model, mesh=mesh, plan=plan, executors="aten")(ids.chunk(parts)[own])
    squares(out).backward()
    torch.testing.assert_close(out, wants[own], rtol=1e-11, atol=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-12)


def losses(loss: object, axes: dict[str, int], plan: object) -> None:
    """One step, and what it gives beside the loss."""
    mesh, ids, labels = tessera.mesh(device="cpu", **axes), batch_of(8), batch_of(8).flip(0)
    parts, own = axes.get("dp", 1), mesh.get_local_rank("dp") if "dp" in axes else 0
    torch.manual_seed(0)
    model = Words().double()
    plain = copy.deepcopy(model)

    def both(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple:
        return loss(model, ids, labels), F.relu(model(ids)[ids > 20])

    step = tessera.train_step(model, both, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, plan=plan)
    got, rows = step(ids.chunk(parts)[own], labels.chunk(parts)[own])
    want, _ = both(plain, ids, labels)
    mine = ids.chunk(parts)[own]
    torch.testing.assert_close(got, want.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(rows.detach(), F.relu(plain(mine)[mine > 20]).detach(), rtol=1e-11, atol=1e-12)
    want.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        after = q if q.grad is None else q - 0.1 * q.grad
        torch.testing.assert_close(p.detach().full_tensor(), after.detach(), rtol=1e-10, atol=1e-12)


def run(rank: int, world: int, folder: str) -> None:
    join_group(rank, world, f"{folder}/meet")
    for axes, plan in PLANS[world]:
        for kind in MODELS:
            torch.manual_seed(0)
            check(folder, f"{kind.__name__} {axes}", results, kind().double(), axes, plan)
        for loss in LOSSES:
            check(folder, f"{loss.__name__} {axes}", losses, loss, axes, plan)
    dist.barrier()
    dist.destroy_process_group()


def check(folder: str, name: str, fn: object, *args: object) -> None:
    try:
        fn(*args)
    except Exception:
        path = Path(folder) / f"wrong_{dist.get_rank()}.txt"
        path.write_text(f"{path.read_text() if path.exists() else ''}\n{name}: {traceback.format_exc()}")
