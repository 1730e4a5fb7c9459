"""Before a program runs for the first time, ranks compare what they have.

In: this rank's programs as lines, its plan and its part of the batch. Out: nothing, or an error on all ranks that says
who differs and where: in the sizes of the batch, the plan, or the first equation that is not the same, with its line.
Ranks that stand at the same place of the data axes must have been given the same rows, which a checksum tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from tessera.distributed.compare import everyones, first_difference
from tessera.distributed.plan import DATA
from tessera.distributed.sharding import Sharding
from tessera.util.errors import MeshError


def agree(sharding: Sharding, leaves: Sequence[object], lines: Sequence[str]) -> None:
    """Raise on every rank where one of them differs."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    here = sharding.device_mesh.get_coordinate() or []
    at = dict(zip(sharding.mesh.names, here, strict=True))
    mine = {
        "sizes": [f"{x.dtype} {list(x.shape)}" for x in tensors],
        "plan": f"{sharding.mesh}: {dict(sharding.plan.words)} {dict(sharding.plan.patterns)}",
        "place": [at[axis] for axis in sharding.plan.axes(*DATA)],
        "rows": [_checksum(x) for x in tensors if not isinstance(x, DTensor)],
        "program": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }
    every = everyones(mine)
    for what, told in (("sizes", "a batch of"), ("plan", "the plan")):
        _same(every, what, told)
    _same_rows(every)
    if len({each["program"] for each in every}) > 1:
        first_difference(everyones(list(lines)), "program")  # a line of a program ends with the user's


def _same(every: list[dict], what: str, told: str) -> None:
    for rank, each in enumerate(every):
        if each[what] != every[0][what]:
            raise MeshError(f"rank {rank} has {told} {each[what]}, rank 0 {every[0][what]}; expected the same on all")


def _same_rows(every: list[dict]) -> None:
    first: dict[tuple, int] = {}
    for rank, each in enumerate(every):
        other = first.setdefault(tuple(each["place"]), rank)
        if each["rows"] != every[other]["rows"]:
            raise MeshError(
                f"ranks {other} and {rank} stand at the same place of the data axes and were given different batches; "
                "expected the same rows, as a sampler by the place on those axes gives them"
            )


def _checksum(x: torch.Tensor) -> float:
    """A number that differs where tensors do, nearly always; computed where the tensor is."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1).double()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64).remainder_(8191).sin_()
    return float(torch.nan_to_num(flat * weights).sum())
