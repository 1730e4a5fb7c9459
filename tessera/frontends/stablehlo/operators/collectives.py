"""Collectives. With a process group they are torch's functional collectives over it; in a world of one they change
nothing.

What has no meaning in a program of one process (infeed, send, …) is refused by name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tessera.frontends.stablehlo.operators import bodies
from tessera.frontends.stablehlo.registry import NoMeaningError, Site, meaning
from tessera.torch_internals import collectives


def _world(site: Site) -> int:
    """How many processes take part."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    groups = site.get("replica_groups") or []
    alone = isinstance(groups, list) and all(not isinstance(g, list) or len(g) <= 1 for g in groups)
    if alone:
        return 1
    raise NoMeaningError(
        f"{site.operation.name} at {site.operation.line} needs a process group for {groups}; "
        "call torch.distributed.init_process_group first"
    )


def _refused(*names: str) -> None:
    @meaning(*names, raw=True, folds=False)
    def refuse(site: Site, *operands: object) -> None:
        raise NoMeaningError(
            f"{site.operation.name} at {site.operation.line} talks to a host or another program, which is not here"
        )


_refused("infeed", "outfeed", "send", "recv", "partition_id", "replica_id")

_REDUCE = {"add": "sum", "multiply": "product", "maximum": "max", "minimum": "min", "and": "band", "or": "bor"}


@meaning("all_reduce", folds=False)
def all_reduce(site: Site, *xs: torch.Tensor) -> list[torch.Tensor]:
    if _world(site) == 1:
        return list(xs)
    name = bodies.kind(site.region())
    if name not in _REDUCE:
        raise NoMeaningError(f"all_reduce at {site.operation.line}: its body is none that a process group reduces by")
    return [collectives.all_reduce(x, _REDUCE[name], dist.group.WORLD) for x in xs]


@meaning("all_gather", folds=False)
def all_gather(site: Site, *xs: torch.Tensor) -> list[torch.Tensor]:
    if _world(site) == 1:
        return list(xs)
    return [collectives.all_gather_tensor(x, site["all_gather_dim"], dist.group.WORLD) for x in xs]


@meaning("reduce_scatter", folds=False)
def reduce_scatter(site: Site, x: torch.Tensor) -> torch.Tensor:
    if _world(site) == 1:
        return x
    name = bodies.kind(site.region())
    if name not in _REDUCE:
        raise NoMeaningError(f"reduce_scatter at {site.operation.line}: its body is none that a group reduces by")
    dim = site["scatter_dimension"]
    return collectives.reduce_scatter_tensor(x, _REDUCE[name], dim, dist.group.WORLD)


@meaning("all_to_all", folds=False)
def all_to_all(site: Site, *xs: torch.Tensor) -> list[torch.Tensor]:
    world = _world(site)
    if world == 1:
        return list(xs)
    split, joined = site["split_dimension"], site["concat_dimension"]
    out = []
    for x in xs:
        parts = torch.cat(x.chunk(world, split), 0) if split else x
        moved = collectives.all_to_all_single(parts, None, None, dist.group.WORLD)
        out.append(torch.cat(moved.chunk(world, 0), joined))
    return out


@meaning("collective_broadcast", "collective_permute", folds=False)
def moved(site: Site, x: torch.Tensor) -> torch.Tensor:
    if _world(site) == 1:
        return x
    raise NoMeaningError(f"{site.operation.name} at {site.operation.line} has no meaning here with several processes")
