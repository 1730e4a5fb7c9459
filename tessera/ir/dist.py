"""Collectives: the equations in which ranks of a mesh exchange values, or in which a rank's own place counts.

    all_gather(x, dim, axis)           the ranks' chunks of a dimension, joined
    reduce_scatter(x, dim, axis)       the sum of the ranks' x; each keeps its chunk
    all_reduce(x, axis, how)           the sum (max, min) of the ranks' x
    all_to_all(x, split, join, axis)   chunks of one dimension go out, those of another come together
    permute(x, axis, by)               the x of the rank that stands `by` places before
    rows(x, give, take, axis, size)    rows go out, so many to each rank as `give` says; those that come in, then zeros.
                                       With "back" behind it they go to where they came from
    slice(x, dim, axis, by)            a rank's own chunk, or that of the rank `by` places behind it
    in_order(xs, dim, axis)            chunks of this rank and of those 1, 2, … places before it, in the order of ranks
    once(x, axis)                      x on the first rank, zeros on the others
    start(size, axes, device)          the place of a rank's first element along a dimension of that size
    fill(x, dim, size, axes, value)    x with this value where the chunks of a dimension are padding
    begin(x, name, *args)              begins the exchange of that name; what it gives may be handed on, not read. With
                                       "over" behind it a sum is written over x
    wait(y, x, name, *args)            its result, once it is there; until here x must stay as it is

In: a rank's tensors. Out: new tensors, never views. A chunk is as `Placement` cuts it: a dimension that no axis divides
is padded on its way out, and `size`, where given, is what is left of it when it is joined. `on(mesh)` gives the
operators of a mesh. Run, they call the communicator that is bound to it; on fake tensors they only tell types;
`together` is what they mean, for all ranks of a mesh in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tessera.ir.equation import Equation, Special
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Axes, Size, chunk
from tessera.torch_internals.fake import FakeTensor, active_fake_mode
from tessera.util.errors import InputError

EXCHANGES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")  # those that send something
OVER = "over"
ROWS = "rows"  # sends something too, but how much is known only when it runs
NAMES = (*EXCHANGES, ROWS, "slice", "in_order", "once", "start", "fill", "begin", "wait")


@dataclass(frozen=True, eq=False)
class Collective(Special):
    mesh: Mesh = Mesh(())

    def __str__(self) -> str:
        return f"dist.{self.name}"


class Communicator(Protocol):
    """Runs the collectives of one mesh for this rank; `places` is where it stands."""

    places: dict[str, int]
    loads: list[tuple[str, int, int]]  # of the last exchanges of rows their axis, those sent out and those that came

    def exchange(self, name: str, x: Tensor, *args: Any) -> Tensor: ...

    def begin(self, x: Tensor, name: str, *args: Any) -> Tensor: ...

    def wait(self, y: Tensor, x: Tensor, name: str, *args: Any) -> Tensor: ...


class On:
    """The collectives of one mesh, by name."""

    communicator: Communicator | None = None  # what runs them, once there are process groups

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._ops = {name: Collective(name, _bound(self, name), "dist", mesh=mesh) for name in NAMES}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._ops:
            raise AttributeError(f"no collective dist.{name}; there are {', '.join(NAMES)}")
        return self._ops[name]


@functools.cache
def on(mesh: Mesh) -> On:
    return On(mesh)


def is_collective(eqn: Equation, *names: str) -> bool:
    return isinstance(eqn.op, Collective) and (not names or eqn.op.name in names)


def _bound(on: On, name: str) -> Callable:
    """What a program calls."""
    exchanges = name in EXCHANGES or name == ROWS

    def run(*args: Any) -> Tensor:
        bound = on.communicator
        if bound is None or active_fake_mode() is not None:
            return _without_groups(on, name, args)
        return bound.exchange(name, *args) if exchanges else ALONE[name](on.mesh, bound.places, *args)

    def begin(x: Tensor, *what: Any) -> Tensor:  # this and `wait` stand for every exchange of a final program
        bound = on.communicator
        if bound is None or type(x) is FakeTensor:  # a third of what asking for the mode takes
            return _without_groups(on, name, (x, *what))
        return bound.begin(x, *what)

    def wait(y: Tensor, x: Tensor, *what: Any) -> Tensor:
        bound = on.communicator
        if bound is None or type(y) is FakeTensor:
            return _without_groups(on, name, (y, x, *what))
        return bound.wait(y, x, *what)

    call = {"begin": begin, "wait": wait}.get(name, run)
    call.__name__ = name
    return call


def _without_groups(on: On, name: str, args: tuple) -> Tensor:
    """While a program is traced a collective only tells its type; when it runs somebody must be there."""
    if active_fake_mode() is not None:
        return TYPES[name](on.mesh, *args)
    raise InputError(
        f"dist.{name}: no process group stands behind the mesh {on.mesh}; start this program with "
        f"torchrun --nproc-per-node={on.mesh.ranks} and call tessera.mesh first"
    )


# --- types ----------------------------------------------------------------------------------------


def _resized(x: Tensor, sizes: dict[int, Size]) -> Tensor:
    return x.new_empty([sizes.get(d, n) for d, n in enumerate(x.shape)])


def joined_size(here: Size, ranks: int, size: Size | None) -> Size:
    return here * ranks if size is None else size


TYPES: dict[str, Callable[..., Tensor]] = {
    "all_gather": lambda mesh, x, dim, axis, size=None: _resized(
        x, {dim: joined_size(x.shape[dim], mesh.size(axis), size)}
    ),
    "reduce_scatter": lambda mesh, x, dim, axis: _resized(x, {dim: chunk(x.shape[dim], mesh.size(axis))}),
    "all_reduce": lambda mesh, x, axis, how="sum", over=None: _resized(x, {}),
    "all_to_all": lambda mesh, x, split, join, axis, size=None: _resized(
        x, {split: chunk(x.shape[split], mesh.size(axis)), join: joined_size(x.shape[join], mesh.size(axis), size)}
    ),
    "permute": lambda mesh, x, axis, by=1: _resized(x, {}),
    "rows": lambda mesh, x, give, take, axis, size, back=None: _resized(x, {0: size}),
    "slice": lambda mesh, x, dim, axis, by=0: _resized(x, {dim: chunk(x.shape[dim], mesh.size(axis))}),
    "in_order": lambda mesh, xs, dim, axis: _resized(xs[0], {dim: xs[0].shape[dim] * mesh.size(axis)}),
    "once": lambda mesh, x, axis: _resized(x, {}),
    "start": lambda mesh, size, axes, device: torch.empty([], dtype=torch.int64, device=device),
    "fill": lambda mesh, x, dim, size, axes, value: _resized(x, {}),
}


def _raw(mesh: Mesh, x: Tensor, name: str, *args: Any) -> Tensor:
    """What comes in, before it is put together: chunks along the first dimension."""
    if name == "all_gather":
        return _resized(x, {0: x.shape[0] * mesh.size(args[1])})
    if name == "all_to_all":
        split, ranks = args[0], mesh.size(args[2])
        part = chunk(x.shape[split], ranks)
        return _resized(x, {0: part * ranks} if split == 0 else {split: part, 0: x.shape[0] * ranks})
    return TYPES[name](mesh, x, *args)


TYPES["begin"] = _raw
TYPES["wait"] = lambda mesh, y, x, name, *args: TYPES[name](mesh, x, *args)


# --- what one rank does by itself -----------------------------------------------------------------


def padded(x: Tensor, dim: int, ranks: int) -> Tensor:
    """x with zeros at the end of a dimension, so that it has chunks for so many ranks."""
    size = x.shape[dim]
    missing = chunk(size, ranks) * ranks - size
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([missing if d == dim else n for d, n in enumerate(x.shape)])], dim)


def _slice(mesh: Mesh, places: dict[str, int], x: Tensor, dim: int, axis: str, by: int = 0) -> Tensor:
    ranks = mesh.size(axis)
    step, rest = divmod(x.shape[dim], ranks)
    if rest:
        x, step = padded(x, dim, ranks), step + 1
    part = x.narrow(dim, (places[axis] + by) % ranks * step, step)
    return part.clone(memory_format=torch.contiguous_format)


def _in_order(mesh: Mesh, places: dict[str, int], xs: Sequence[Tensor], dim: int, axis: str) -> Tensor:
    return torch.cat([xs[(places[axis] - rank) % len(xs)] for rank in range(len(xs))], dim)


def _once(mesh: Mesh, places: dict[str, int], x: Tensor, axis: str) -> Tensor:
    return x.new_zeros(x.shape) if places[axis] else x.clone(memory_format=torch.contiguous_format)


def first_place(mesh: Mesh, places: dict[str, int], size: Size, axes: Axes) -> tuple[int, int]:
    """The place of a rank's first element along a dimension, and how many elements it has there without padding."""
    start, end, left = 0, int(size), int(size)
    for axis in axes:
        left = int(chunk(left, mesh.size(axis)))
        start = start + places[axis] * left
        end = min(end, start + left)
    return start, max(0, end - start)


def _start(mesh: Mesh, places: dict[str, int], size: Size, axes: Axes, device: torch.device) -> Tensor:
    return torch.tensor(first_place(mesh, places, size, axes)[0], device=device)


def _fill(
    mesh: Mesh, places: dict[str, int], x: Tensor, dim: int, size: Size, axes: Axes, value: float | bool
) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    _, there = first_place(mesh, places, size, axes)
    x.narrow(dim, there, x.shape[dim] - there).fill_(value)
    return x


def joined(out: Tensor, dim: int, ranks: int, size: Size | None) -> Tensor:
    """Chunks that lie along the first dimension, put together along another, without padding."""
    out = out if dim == 0 else torch.cat(out.chunk(ranks, 0), dim)
    return out if size is None else out.narrow(dim, 0, size).contiguous()  # type: ignore[arg-type]


def put_together(mesh: Mesh, y: Tensor, name: str, *args: Any) -> Tensor:
    """The result of an exchange, of what came in."""
    match name, args:
        case "all_gather", (dim, axis, *size):
            return joined(y, dim, mesh.size(axis), *size or (None,))
        case "all_to_all", (_, dim, axis, *size):
            return joined(y, dim, mesh.size(axis), *size or (None,))
    return y


ALONE: dict[str, Callable[..., Tensor]] = {
    "slice": _slice,
    "in_order": _in_order,
    "once": _once,
    "start": _start,
    "fill": _fill,
}
ALONE["wait"] = lambda mesh, places, y, x, name, *args: put_together(mesh, y, name, *args)


# --- what ranks do together -----------------------------------------------------------------------


def combine(xs: Sequence[Tensor], how: str) -> Tensor:
    """Parts, one after the other in the order of ranks."""
    step = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how]
    return functools.reduce(step, xs)


def _join(xs: Sequence[Tensor], dim: int, size: Size | None) -> Tensor:
    out = torch.cat(list(xs), dim)
    return out if size is None else out.narrow(dim, 0, size).clone()  # type: ignore[arg-type]


def _chunk(x: Tensor, dim: int, place: int, ranks: int) -> Tensor:
    return padded(x, dim, ranks).chunk(ranks, dim)[place].clone()


TOGETHER: dict[str, Callable[..., Tensor]] = {  # of the xs along an axis, what the rank at this place gets
    "all_gather": lambda place, xs, dim, axis, size=None: _join(xs, dim, size),
    "reduce_scatter": lambda place, xs, dim, axis: _chunk(combine(xs, "sum"), dim, place, len(xs)),
    "all_reduce": lambda place, xs, axis, how="sum", over=None: combine(xs, how).clone(),
    "all_to_all": lambda place, xs, split, join, axis, size=None: _join(
        [_chunk(x, split, place, len(xs)) for x in xs], join, size
    ),
    "permute": lambda place, xs, axis, by=1: xs[(place - by) % len(xs)].clone(),
}


def with_zeros(x: Tensor, size: Size) -> Tensor:
    """So many rows, the last ones zeros."""
    return torch.cat([x, x.new_zeros([size - x.shape[0], *x.shape[1:]])])  # type: ignore[list-item]


def _rows_together(mesh: Mesh, args: Sequence[tuple]) -> list[Tensor]:
    axis, size = args[0][3:5]
    results = []
    for rank in range(mesh.ranks):
        place = mesh.coordinates(rank)[axis]
        came = [x.split([*give.tolist(), len(x) - int(give.sum())])[place]
                for x, give, *_ in (args[peer] for peer in mesh.peers(rank, axis))]  # fmt: skip
        results.append(with_zeros(torch.cat(came), size))
    return results


def exchange_of(eqn: Equation) -> tuple[str, tuple] | None:
    """The exchange that an equation is or begins: its name, and its arguments behind the value."""
    if is_collective(eqn, *EXCHANGES, ROWS):
        return eqn.op.name, eqn.args[1:]  # type: ignore[union-attr]
    if is_collective(eqn, "begin"):
        return eqn.args[1], eqn.args[2:]  # type: ignore[return-value]
    return None


def axis_in(args: Sequence[object]) -> str:
    """The axis among the arguments of an exchange."""
    return next(a for a in args if isinstance(a, str))


def _as_it_comes(name: str, *args: Any) -> tuple:
    """The arguments of an exchange that leaves chunks one after the other along the first dimension."""
    match name:
        case "all_gather":
            return 0, args[1]
        case "all_to_all":
            return args[0], 0, args[2]
    return args


def together(op: Collective, args: Sequence[tuple]) -> list[Tensor]:
    """What all ranks of the mesh get, given the arguments of each."""
    mesh = op.mesh
    if op.name in ALONE:
        return [ALONE[op.name](mesh, mesh.coordinates(rank), *args[rank]) for rank in range(mesh.ranks)]
    if op.name == ROWS:
        return _rows_together(mesh, args)
    if op.name == "begin" and args[0][1] == ROWS:
        return _rows_together(mesh, [(x, *rest) for x, _, *rest in args])
    name, rest = (args[0][1], _as_it_comes(*args[0][1:])) if op.name == "begin" else (op.name, args[0][1:])
    axis = axis_in(rest)
    results = []
    for rank in range(mesh.ranks):
        xs = [args[peer][0] for peer in mesh.peers(rank, axis)]
        came = TOGETHER[name](mesh.coordinates(rank)[axis], xs, *rest)
        results.append(came if OVER in rest else came.contiguous())  # as types say, and as it comes from a group
    return results


# --- costs ----------------------------------------------------------------------------------------


def bytes_sent(eqn: Equation) -> float:
    """What one rank sends in an exchange, by the best known way (rings)."""
    exchange = exchange_of(eqn)
    if exchange is None:
        return 0.0
    assert isinstance(eqn.op, Collective)
    name, args = exchange
    x = eqn.inputs()[0]
    given = min(x.nbytes(), eqn.out.nbytes()) if name == ROWS else x.nbytes()  # either has room to spare; if balanced
    return exchange_bytes(name, given, eqn.op.mesh.size(axis_in(args)))


def bytes_copied(eqn: Equation) -> float:
    """What a rank reads and writes to lay an exchange's operand out for it, and its result where it came in chunks;
    `begin` does the one, `wait` the other."""
    copied, waits = 0.0, is_collective(eqn, "wait")
    exchange = (eqn.args[2], eqn.args[3:]) if waits else exchange_of(eqn)
    if exchange is None:
        return copied
    name, args = exchange
    if not waits:
        cut = name in ("reduce_scatter", "all_to_all") and args[0] != 0
        copied += 2.0 * eqn.inputs()[0].nbytes() if cut or (name == "all_reduce" and OVER not in args) else 0.0
    if not is_collective(eqn, "begin") and joins(str(name), args):
        copied += 2.0 * eqn.out.nbytes()
    return copied


def joins(name: str, args: Sequence[object]) -> bool:
    """Are chunks that come in put together along another dimension than the first?"""
    return (name == "all_gather" and args[0] != 0) or (name == "all_to_all" and args[1] != 0)


def exchange_bytes(name: str, given: float, ranks: int) -> float:
    """Bytes a rank sends, of those it gives to a collective over so many ranks."""
    if ranks == 1:
        return 0.0
    match name:
        case "all_gather":
            return given * (ranks - 1)
        case "all_reduce":
            return 2 * given * (ranks - 1) / ranks
        case "permute":
            return given
        case _:
            return given * (ranks - 1) / ranks
