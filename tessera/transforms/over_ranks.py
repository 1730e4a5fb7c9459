"""One rank's program over parts, as a program over all ranks' parts at once.

In: a trace whose collectives are PyTorch's functional ones, and along which axes of a mesh each of its inputs differs
between ranks. Out: a trace in plain equations. Values that differ have a leading dimension for each such axis, in the
order of the mesh; an exchange is a sum over that dimension, or moves it. So it can be differentiated and partitioned
like everything else: where the partitioner splits those dimensions, it writes the exchanges down again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tessera.ir.builder import Builder, aten, emit
from tessera.ir.call import in_place, sub_traces
from tessera.ir.dist import on
from tessera.ir.equation import Arg, Equation, Value, substitute
from tessera.ir.mesh import Mesh
from tessera.ir.replay import sweep
from tessera.ir.schema import COLLECTIVES
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.transforms.vmap import vmap
from tessera.util.errors import CaptureError

AxesOf = Callable[[object], tuple[str, ...] | None]  # of a process group; None: it is no part of the mesh
HOW = ("sum", "avg", "max", "min")


@dataclass(frozen=True)
class OverRanks:
    trace: Trace
    varies: tuple[tuple[str, ...], ...]  # of each output, the axes along which it differs


def over_ranks(trace: Trace, varies: Mapping[Value, tuple[str, ...]], mesh: Mesh, axes_of: AxesOf) -> OverRanks:
    """`varies` are the axes along which inputs differ; others are the same on all ranks."""
    trace = _named(in_place(trace), mesh, axes_of)
    told = [varies.get(v, ()) for v in trace.inputs]
    differing: list[tuple[str, ...]] = [()] * len(trace.outputs)
    for axis, ranks in reversed(mesh.axes):  # the last axis stands innermost
        if ranks == 1:
            continue
        rows = {v: (_stacked(v.tensor, ranks), 0) for v, axes in zip(trace.inputs, told, strict=True) if axis in axes}
        batched = vmap(trace, rows, ranks, randomness="different", axis=axis)
        trace = sweep(batched.trace)
        differing = [(axis, *axes) if differs else axes for differs, axes in zip(batched.on, differing, strict=True)]
    return OverRanks(trace, tuple(differing))


def _stacked(type_: TensorType, ranks: int) -> TensorType:
    shape = (ranks, *type_.shape)
    return TensorType(type_.dtype, shape, contiguous_strides(shape), type_.device)


def collectives(equations: Iterable[Equation]) -> Iterator[Equation]:
    """A model's own collectives, also those in sub-traces."""
    for eqn in equations:
        if getattr(eqn.op, "namespace", "") in COLLECTIVES:
            yield eqn
        for sub in sub_traces(eqn):
            yield from collectives(sub.equations)


# --- groups become axes ---------------------------------------------------------------------------


def _named(trace: Trace, mesh: Mesh, axes_of: AxesOf) -> Trace:
    """The same with collectives of the mesh, along its axes."""
    builder, env = Builder.over(trace), dict[Value, Arg]()
    with builder:
        for eqn in trace.equations:
            if getattr(eqn.op, "namespace", "") not in COLLECTIVES:
                inner = next((e for sub in sub_traces(eqn) for e in collectives(sub.equations)), None)
                if inner is not None:
                    raise CaptureError(f"{inner.source}: {inner.op} stands in a body of {eqn.op}, which may not run it")
                builder.append(eqn.substitute(env))  # type: ignore[arg-type]
                continue
            with builder.at(eqn):
                env[eqn.out] = _exchange(eqn, [substitute(a, env) for a in eqn.args], mesh, axes_of)
    mutations = {t: substitute(v, env) for t, v in trace.mutations.items()}
    return builder.finish([substitute(o, env) for o in trace.outputs], mutations)  # type: ignore[arg-type]


def _exchange(eqn: Equation, args: list, mesh: Mesh, axes_of: AxesOf) -> Value:
    x, *rest = args
    if eqn.opname == "wait_tensor":
        return x
    axes = axes_of(rest[-1])
    if axes is None:
        raise _refused(eqn, f"expected a group along axes of the mesh {mesh}, got one of other ranks")
    ops, ranks = on(mesh), 1
    for axis in axes:
        ranks *= mesh.size(axis)
    match eqn.opname, rest:
        case "all_reduce", (str(how), _):
            return _reduced(eqn, x, how, ranks, lambda y, axis, *how: emit(ops.all_reduce, y, axis, *how), axes)
        case "reduce_scatter_tensor", (str(how), _, _):
            if how.lower() not in ("sum", "avg"):
                raise _refused(eqn, f"expected a sum or an average, got {how!r}")
            _check_divides(eqn, x, ranks)
            return _reduced(eqn, x, how, ranks, lambda y, axis: emit(ops.reduce_scatter, y, 0, axis), axes)
        case "all_gather_into_tensor", _:
            return _gathered(x, mesh, axes)
        case "broadcast", (int(source), _):
            return aten.select(_gathered(aten.unsqueeze(x, 0), mesh, axes), 0, source)
        case "all_to_all_single", (came, sent, _):
            if len(axes) > 1:
                raise _refused(eqn, f"expected a group along one axis of the mesh {mesh}, got one along {axes}")
            if len({str(n) for n in (*(came or ()), *(sent or ()))}) > 1:
                raise _refused(eqn, f"expected as many rows to and from every rank, got {sent} and {came}")
            _check_divides(eqn, x, ranks)
            return emit(ops.all_to_all, x, 0, 0, axes[0]) if axes else x
    raise _refused(eqn, "expected all_reduce, all_gather, reduce_scatter, all_to_all or broadcast")


def _gathered(x: Value, mesh: Mesh, axes: tuple[str, ...]) -> Value:
    for axis in reversed(axes):
        x = emit(on(mesh).all_gather, x, 0, axis)
    return x


def _reduced(eqn: Equation, x: Value, how: str, ranks: int, step: Callable, axes: tuple[str, ...]) -> Value:
    how = how.lower()
    if how not in HOW or x.dtype == torch.bool:
        raise _refused(eqn, f"expected one of {', '.join(HOW)} of numbers, got {how} of {x.dtype}")
    for axis in axes:
        x = step(x, axis) if how in ("sum", "avg") else step(x, axis, how)
    return aten.div(x, ranks) if how == "avg" else x


def _check_divides(eqn: Equation, x: Value, ranks: int) -> None:
    if isinstance(x.shape[0], int) and x.shape[0] % ranks:
        raise _refused(eqn, f"expected rows that {ranks} ranks divide, got {x.shape[0]}")


def _refused(eqn: Equation, why: str) -> CaptureError:
    return CaptureError(f"{eqn.source}: {eqn.op} is not kept on a mesh: {why}")
