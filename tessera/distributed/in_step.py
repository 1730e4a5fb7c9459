"""The reference interpreter of programs on a mesh: all ranks run in step, in one process.

In: the program of one rank and, for each argument, the parts of all ranks. Out: for each output, the parts of all
ranks. One equation after the other is run by every rank; collectives are what `ir/dist` says they mean. What is drawn
at random from a generator is drawn once, as by ranks that were seeded alike. `cut` and `join` lead from whole tensors
to parts and back; `join` checks that ranks which should hold the same do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tessera.ir.dist import Collective, combine, first_place, padded, together
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.interp import finish, resolve
from tessera.ir.placement import Placement, chunk
from tessera.ir.printer import callable_of
from tessera.ir.schema import draws
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.util.errors import InputError

Parts = list  # of one value, what each rank has


def cut(x: Tensor, placement: Placement) -> Parts:
    """The parts of a whole tensor, one for each rank."""
    mesh = placement.mesh
    if placement.marks:
        raise InputError(f"expected a placement whose axes cut plainly, got {placement}")
    parts = []
    for rank in range(mesh.ranks):
        places, part = mesh.coordinates(rank), x
        for dim, axes in enumerate(placement.splits):
            for axis in axes:
                step = chunk(part.shape[dim], mesh.size(axis))
                part = padded(part, dim, mesh.size(axis)).narrow(dim, places[axis] * step, step)
        first = all(places[axis] == 0 for axis, how in placement.parts if how == "sum")
        parts.append(part.clone(memory_format=torch.contiguous_format) if first else torch.zeros_like(part))
    return parts


def join(parts: Sequence[Tensor], placement: Placement, exact: bool = True) -> Tensor:
    """The whole tensor; ranks that should hold the same must, bit for bit unless `exact` is False."""
    mesh = placement.mesh
    if placement.marks:
        return _join_marked(parts, placement, exact)
    out = parts[0].new_zeros([int(n) for n in placement.shape])
    seen: dict[tuple, Tensor] = {}
    combined: dict[tuple, list[Tensor]] = {}
    for rank, part in enumerate(parts):
        places = mesh.coordinates(rank)
        box = tuple(places[axis] for axes in placement.splits for axis in axes)
        where = tuple(places[axis] for axis, _ in placement.parts)
        if (box, where) in seen:
            _same(seen[box, where], part, placement, rank, exact)
            continue
        seen[box, where] = part
        combined.setdefault(box, []).append(part)
    for rank, part in enumerate(parts):
        places = mesh.coordinates(rank)
        box = tuple(places[axis] for axes in placement.splits for axis in axes)
        held = combined.pop(box, None)
        if held is None:
            continue
        part = combine(held, placement.parts[0][1]) if placement.parts else held[0]
        target = out
        for dim, axes in enumerate(placement.splits):
            start, there = first_place(mesh, places, placement.shape[dim], axes)
            target, part = target.narrow(dim, start if there else 0, there), part.narrow(dim, 0, there)
        target.copy_(part)
    return out


def _join_marked(parts: Sequence[Tensor], placement: Placement, exact: bool) -> Tensor:
    """As if chunks lay one after the other; then each goes where it belongs."""
    unfolded = placement.unfolded()
    whole = join([x.reshape([int(n) for n in unfolded.local_shape]) for x in parts], replace(unfolded, marks=()), exact)
    for axis, _ in unfolded.marks:
        dim, ranks = unfolded.dim_of(axis), unfolded.mesh.size(axis)
        assert dim is not None
        if unfolded.splits[dim] != (axis,):
            raise InputError(f"expected one axis in a dimension that is cut in zigzag, got {placement}")
        pairs = whole.unflatten(dim, (ranks, 2, -1))
        whole = torch.cat([pairs.select(dim + 1, 0), pairs.select(dim + 1, 1).flip(dim)], dim).flatten(dim, dim + 1)
    return whole.reshape([int(n) for n in placement.shape])


def _same(a: Tensor, b: Tensor, placement: Placement, rank: int, exact: bool) -> None:
    if torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and _close(a, b, exact)):
        return
    raise InputError(f"rank {rank} holds something else than its peers, of a value that lies as {placement}")


def _close(a: Tensor, b: Tensor, exact: bool) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if exact else torch.allclose(a, b, equal_nan=True)


def run(trace: Trace, args: Sequence[Parts]) -> list[Parts]:
    """Run the program of one rank on all of them."""
    if len(args) != len(trace.inputs):
        raise InputError(f"{trace.name}: expected {len(trace.inputs)} arguments, got {len(args)}")
    ranks = _ranks(trace)
    envs: list[dict[Value, object]] = [
        {**{v: parts[rank] for v, parts in zip(trace.inputs, args, strict=True)}, **trace.constants}
        for rank in range(ranks)
    ]
    for eqn in trace.equations:
        for env, out in zip(envs, _step(eqn, envs, trace), strict=True):
            outs = tuple(out) if eqn.many else (out,) if eqn.outputs else ()  # type: ignore[call-overload]
            env.update({v: o for v, o in zip(eqn.outputs, outs, strict=True) if v is not None})
    results = [finish(trace, env, lambda tree, env=env: _concrete(tree, env, trace)) for env in envs]
    return [list(parts) for parts in zip(*results, strict=True)]


def _step(eqn: Equation, envs: list[dict[Value, object]], trace: Trace) -> list:
    calls = [_concrete((eqn.args, eqn.kwargs), env, trace) for env in envs]
    if isinstance(eqn.op, Collective):
        return together(eqn.op, [args for args, _ in calls])
    fn = callable_of(eqn.op)
    if draws(eqn.op, eqn.args, eqn.kwargs):
        args, kwargs = calls[0]
        return [fn(*args, **kwargs)] * len(envs)
    return [fn(*args, **kwargs) for args, kwargs in calls]


def _concrete(tree: Arg, env: dict[Value, object], trace: Trace) -> tuple:
    symbols: dict[str, object] = {}
    for symbol, (v, dim) in trace.symbols.items():
        if v in env:
            symbols[symbol] = env[v] if dim is None else env[v].shape[dim]  # type: ignore[attr-defined]
    return resolve(tree, env, symbols)


def _ranks(trace: Trace) -> int:
    for v in trace.values():
        if isinstance(v.type, TensorType) and v.type.placement is not None:
            return v.type.placement.mesh.ranks
    raise InputError(f"{trace.name}: expected a program whose values lie on a mesh")
