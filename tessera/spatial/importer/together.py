"""One program for several ranks and batches, as one graph.

In: the program of one rank, with collectives, and where its weights lie. Out: a `Graph` in which every node says
whose it is. An exchange moves nothing here: what is gathered is a map over the homes of several ranks, what is summed
is an expression over such maps. Sends follow when homes are placed on chips.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch

from tessera.ir import dist
from tessera.ir.dist import Collective, first_place
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement, chunk
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.spatial.errors import MapError
from tessera.spatial.graph import ALONE, Graph, Leave, Place
from tessera.spatial.importer.decompose import Decompositions
from tessera.spatial.importer.importer import Importer, dtype_of, has_form, where
from tessera.spatial.importer.values import Item, Known, Lazy, Values, fold
from tessera.spatial.maps import Map, concatenated, padded, zeros
from tessera.torch_internals.fake import FakeTensorMode

Weights = Mapping[Value, tuple[str, torch.Tensor]]
TwoSteps = Callable[[int, int], bool]  # bytes, ranks: is a sum over ranks scattered first and gathered then?
_COMBINED = {"sum": "add", "max": "maximum", "min": "minimum"}


def together(
    trace: Trace, mode: FakeTensorMode, weights: Weights, mesh: Mesh, two_steps: TwoSteps, batches: int = 1,
    carried: tuple[Value, ...] = (), leaves: bool = False, varying: Set[Value] = frozenset(),
) -> Graph:  # fmt: skip
    """`weights` are whole; each rank takes its part. Those that are `varying` have no part in the program. `carried`
    are inputs that an earlier part of the program leaves; what this one leaves in turn, on every rank, are its
    outputs."""
    graph = Graph(trace.name)
    values, apart = Values(graph), Decompositions(mode, has_form)
    given: list[list[tuple[torch.dtype, Map]]] = [[] for _ in trace.outputs]
    for batch in range(batches):
        ranks = [Importer(trace, values, apart, batches, carried, varying) for _ in range(mesh.ranks)]
        for place, im in _each(graph, ranks, batch, 0):
            im.peers = ranks
            im.begin({v: _part(v, *held, place.rank) for v, held in weights.items()})
        for number, eqn in enumerate(trace.equations):
            if isinstance(eqn.op, Collective):
                for im in ranks:
                    im.passed(eqn)
                _exchange(graph, ranks, batch, number, eqn, two_steps)
                continue
            for _, im in _each(graph, ranks, batch, number):
                im.equation(eqn)
        for _, im in _each(graph, ranks, batch, len(trace.equations)):
            im.keep_states()
        for i, o in enumerate(trace.outputs):
            outputs = [im.output(i) for _, im in _each(graph, ranks, batch, len(trace.equations))]
            lies = o.tensor.placement if isinstance(o, Value) and isinstance(o.type, TensorType) else None
            if leaves:
                _leave(graph, ranks, i, outputs, lies)
                continue
            given[i].append((outputs[0][0], _joined([m for _, m in outputs], lies)))
    graph.place = ALONE
    for i, parts in enumerate(given if not leaves else ()):
        m = parts[0][1] if batches == 1 else concatenated([m for _, m in parts], 0)
        graph.outputs.append((f"y{i}" if len(given) > 1 else "y", parts[0][0], m.shape, m.reshape(*fold(m.shape))))
    graph.live()
    assert graph.reads_what_is()
    return graph


def _each(graph: Graph, ranks: list[Importer], batch: int, equation: int) -> Iterator[tuple[Place, Importer]]:
    """The ranks in turn; what is added to the graph is theirs."""
    for rank, im in enumerate(ranks):
        graph.place = Place(batch, rank, equation)
        yield graph.place, im


def _part(v: Value, name: str, data: torch.Tensor, rank: int) -> tuple[str, torch.Tensor]:
    """A rank's part of a weight."""
    lies = v.tensor.placement if isinstance(v.type, TensorType) else None
    if lies is None or lies.is_whole:
        return name, data
    places = lies.mesh.coordinates(rank)
    for dim, axes in enumerate(lies.splits):
        for axis in axes:
            step = data.shape[dim] // lies.mesh.size(axis)
            data = data.narrow(dim, places[axis] * step, step)
    return f"{name}.{rank}", data


def _joined(maps: Sequence[Map], lies: Placement | None) -> Map:
    """The whole of an output, from the parts of ranks."""
    if lies is None:
        return maps[0]
    held = dict(enumerate(maps))
    for dim, axes in enumerate(lies.splits):
        for axis in reversed(axes):
            firsts = [rank for rank in held if lies.mesh.coordinates(rank)[axis] == 0]
            held = {r: concatenated([held[p] for p in lies.mesh.peers(r, axis)], dim) for r in firsts}
    return held[0].block(*((0, int(n)) for n in lies.shape))


def _leave(
    graph: Graph, ranks: list[Importer], number: int, outputs: list[tuple[torch.dtype, Map]], lies: Placement | None
) -> None:
    """Every rank leaves the whole of a value on its chip: its own, or the parts of all."""
    maps = [m for _, m in outputs]
    joined = None if lies is None or lies.is_whole else _joined(maps, lies)
    for place, im in _each(graph, ranks, 0, len(ranks[0].trace.equations)):
        m = joined or maps[place.rank]
        home = im.graph.left(number, outputs[0][0], *fold(m.shape))
        graph.add(Leave(home, m.reshape(home.rows, home.columns)))


# --- collectives ---


def _exchange(graph: Graph, ranks: list[Importer], batch: int, number: int, eqn: Equation, two_steps: TwoSteps) -> None:
    """A collective: what each rank gets, of what all have."""
    assert isinstance(eqn.op, Collective)
    mesh, name = eqn.op.mesh, eqn.op.name
    if name not in _TOGETHER and name not in _ALONE:
        raise MapError(f"{eqn.op} has no form on a spatial machine: {where(eqn)}")
    args: list[tuple] = [map_values(eqn.args, lambda v, im=im: im.env[v]) for im in ranks]  # type: ignore[misc]
    given = [im.env[v] for im in ranks for v in eqn.inputs()]
    if all(isinstance(item, Known) for item in given):
        tensors: list[tuple] = [map_values(eqn.args, lambda v, im=im: im.env[v].data) for im in ranks]  # type: ignore
        for im, data in zip(ranks, dist.together(eqn.op, tensors), strict=True):
            im.bind(eqn, [Known(data, eqn.out.name, any(item.varies for item in given))])  # type: ignore[union-attr]
        return
    if name in _ALONE:
        for place, im in _each(graph, ranks, batch, number):
            im.eqn = eqn
            im.bind(eqn, [_ALONE[name](im, mesh, mesh.coordinates(place.rank), *args[place.rank])])
        return
    axis = next(a for a in eqn.args if isinstance(a, str))
    count = mesh.size(axis)
    for place, im in _each(graph, ranks, batch, number):
        args[place.rank] = _written(im, args[place.rank])
    if name == "all_reduce" and (dim := _scattered(eqn, count, two_steps)) is not None:
        parts: list[Item] = []
        for place, im in _each(graph, ranks, batch, number):
            im.eqn = eqn
            xs = [args[peer][0] for peer in mesh.peers(place.rank, axis)]
            parts.append(im.values.plain(_summed_part(im, mesh.coordinates(place.rank)[axis], xs, dim, *args[0][2:])))
        args, name = [(part, dim, axis) for part in parts], "all_gather"
    for place, im in _each(graph, ranks, batch, number):
        im.eqn = eqn
        xs = [args[peer][0] for peer in mesh.peers(place.rank, axis)]
        im.bind(eqn, [_TOGETHER[name](im, mesh.coordinates(place.rank)[axis], xs, *args[place.rank][1:])])


def _scattered(eqn: Equation, ranks: int, two_steps: TwoSteps) -> int | None:
    """The dimension along which a sum is scattered before it is gathered; None where ranks sum all of it."""
    shape = [int(n) for n in eqn.out.shape]
    dim = next((d for d in reversed(range(len(shape))) if shape[d] % ranks == 0 and shape[d] > 1), None)
    return dim if dim is not None and two_steps(int(eqn.out.nbytes()), ranks) else None


def _written(im: Importer, args: tuple) -> tuple:
    """What a rank gives to others. It computes that itself; what a product gave goes out with all the bits of its
    sums."""
    ready = lambda x: x if isinstance(x, Known) or x.tree == 0 else im.values.plain(x)  # noqa: E731
    return tuple(ready(a) if isinstance(a, (Known, Lazy)) else a for a in args)


def _combine(im: Importer, xs: Sequence[Item], how: str = "sum") -> Item:
    """In the order of ranks."""
    return functools.reduce(lambda a, b: im.apply(_COMBINED[how], a, b), xs)


def _chunk(im: Importer, x: Item, dim: int, place: int, ranks: int) -> Item:
    """One of so many chunks, as a placement cuts them."""
    size = _shape(x)[dim]
    step = int(chunk(size, ranks))

    def part(m: Map) -> Map:
        sides = [0] * (2 * m.ndim)
        sides[2 * (m.ndim - 1 - dim) + 1] = step * ranks - size
        m = padded(m, sides)
        return m.block(*((place * step, (place + 1) * step) if d == dim else (0, n) for d, n in enumerate(m.shape)))

    return _moved(im, [x], lambda maps: part(maps[0]))


def _moved(im: Importer, xs: Sequence[Item], fn: Callable[[list[Map]], Map]) -> Item:
    m = fn([im.values.map(x) for x in xs])
    return Lazy(m.shape, dtype_of(xs[0]), 0, (m,), im.name(), im.eqn.source)  # type: ignore[union-attr]


def _shape(x: Item) -> tuple[int, ...]:
    return tuple(x.data.shape) if isinstance(x, Known) else x.shape


def _gathered(im: Importer, place: int, xs: Sequence[Item], dim: int, axis: str, size: int | None = None) -> Item:
    def joined(maps: list[Map]) -> Map:
        m = concatenated(maps, dim)
        return m if size is None else m.block(*((0, size if d == dim else n) for d, n in enumerate(m.shape)))

    return _moved(im, xs, joined)


def _summed_part(im: Importer, place: int, xs: Sequence[Item], dim: int, how: str = "sum") -> Item:
    return _combine(im, [_chunk(im, x, dim, place, len(xs)) for x in xs], how)


def _exchanged(
    im: Importer, place: int, xs: Sequence[Item], split: int, join: int, axis: str, size: int | None = None
) -> Item:
    return _gathered(im, place, [_chunk(im, x, split, place, len(xs)) for x in xs], join, axis, size)


# Of the xs along an axis, what the rank at this place gets.
_TOGETHER: dict[str, Callable[..., Item]] = {
    "all_gather": _gathered,
    "reduce_scatter": lambda im, place, xs, dim, axis: _summed_part(im, place, xs, dim),
    "all_reduce": lambda im, place, xs, axis, how="sum": _combine(im, xs, how),
    "all_to_all": _exchanged,
    "permute": lambda im, place, xs, axis, by=1: xs[(place - by) % len(xs)],
}


def _sliced(im: Importer, mesh: Mesh, places: dict[str, int], x: Item, dim: int, axis: str, by: int = 0) -> Item:
    return _chunk(im, x, dim, (places[axis] + by) % mesh.size(axis), mesh.size(axis))


def _in_order(im: Importer, mesh: Mesh, places: dict[str, int], xs: Sequence[Item], dim: int, axis: str) -> Item:
    return _gathered(im, 0, [xs[(places[axis] - rank) % len(xs)] for rank in range(len(xs))], dim, axis)


def _once(im: Importer, mesh: Mesh, places: dict[str, int], x: Item, axis: str) -> Item:
    return _moved(im, [x], lambda maps: zeros(maps[0].shape)) if places[axis] else x


def _start(im: Importer, mesh: Mesh, places: dict[str, int], size: int, axes: tuple, device: object) -> Item:
    return Known(torch.tensor(first_place(mesh, places, size, axes)[0]))


def _filled(
    im: Importer, mesh: Mesh, places: dict[str, int], x: Item, dim: int, size: int, axes: tuple, value: float
) -> Item:
    """Another value where a chunk is padding."""
    _, there = first_place(mesh, places, size, axes)
    shape = _shape(x)
    inside = (torch.arange(shape[dim]) < there).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return x if there >= shape[dim] else im.apply("where", Known(inside.expand(shape), "inside"), x, value)


_ALONE: dict[str, Callable[..., Item]] = {
    "slice": _sliced, "in_order": _in_order, "once": _once, "start": _start, "fill": _filled,
}  # fmt: skip
