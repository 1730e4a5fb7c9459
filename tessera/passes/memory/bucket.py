"""Small exchanges between ranks are joined, so that their latency is paid once.

In: one rank's program in its final order. Out: the same values. Exchanges of one kind, along one axis, of one dtype,
none above `small` bytes, become one of at most `room` bytes: their operands are put side by side as soon as the last
one is there, and taken apart before the first reader. Bytes on the link stay the same. Sums and scattered sums are
taken apart as views; gathered chunks are copied once more, which is why large ones stay alone. The program alone
decides, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from tessera.ir.builder import Builder
from tessera.ir.dist import Collective, axis_in, is_collective, on
from tessera.ir.equation import Equation, Value, values_in
from tessera.ir.schema import normalise
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.torch_internals.operators import OpOverload, OpOverloadPacket

aten = torch.ops.aten

SMALL, ROOM = 1 << 20, 32 << 20  # bytes
IN_A_BUCKET = "in a bucket"
JOINED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass
class Bucket:
    """Exchanges that become one: it can stand after `ready`, and before `used`."""

    ready: int
    used: int
    members: list[Equation] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, ready: int, used: int, nbytes: int, room: int) -> bool:
        return max(self.ready, ready) < min(self.used, used) and self.nbytes + nbytes <= room

    def add(self, eqn: Equation, ready: int, used: int, nbytes: int) -> None:
        self.members.append(eqn)
        self.ready, self.used, self.nbytes = max(self.ready, ready), min(self.used, used), self.nbytes + nbytes


def bucket(trace: Trace, small: int = SMALL, room: int = ROOM) -> Trace:
    """The trace itself where nothing can be joined."""
    buckets = [b for b in _chosen(trace, small, room) if len(b.members) > 1]
    return trace.with_(equations=tuple(_Joined(trace, buckets).run())) if buckets else trace


class _Joined:
    """The program with its buckets: each is exchanged when it is ready, and taken apart when somebody reads."""

    def __init__(self, trace: Trace, buckets: list[Bucket]) -> None:
        self.trace, self.builder = trace, Builder.over(trace)
        self.kept = {*values_in(trace.outputs), *trace.mutations.values()}
        self.waiting = {eqn.out: b for b in buckets for eqn in b.members}  # results that are not there yet
        self.ready: dict[int, list[Bucket]] = {}
        for b in buckets:
            self.ready.setdefault(b.ready, []).append(b)
        self.flats: dict[int, Value] = {}

    def run(self) -> list[Equation]:
        gone = set(self.waiting)
        self.exchange(self.ready.get(-1, ()))
        for i, eqn in enumerate(self.trace.equations):
            if not gone.intersection(eqn.results()):
                self.need(eqn.inputs())
                self.builder.append(eqn)
            self.exchange(self.ready.get(i, ()))
        self.need([*values_in(self.trace.outputs), *self.trace.mutations.values()])
        return self.builder.equations

    def exchange(self, buckets: Sequence[Bucket]) -> None:
        for b in buckets:
            if id(b) not in self.flats:
                self.need([v for eqn in b.members for v in eqn.inputs()])
                self.flats[id(b)] = _exchanged(self.builder, b.members)

    def need(self, values: Sequence[Value]) -> None:
        for v in values:
            if v in self.waiting:
                b = self.waiting[v]
                self.exchange([b])
                _taken_apart(self.builder, self.flats[id(b)], b.members, self.kept)
                for eqn in b.members:
                    self.waiting.pop(eqn.out)


def members(eqn: Equation) -> int:
    """How many exchanges an equation, or the one that it begins, was made of."""
    count, _, rest = eqn.source.note.partition(" ")
    return int(count) if rest == IN_A_BUCKET else 1


def _chosen(trace: Trace, small: int, room: int) -> list[Bucket]:
    makers = {v: i for i, eqn in enumerate(trace.equations) for v in eqn.results()}
    used = dict.fromkeys([*values_in(trace.outputs), *trace.mutations.values()], len(trace.equations))
    for i in range(len(trace.equations) - 1, -1, -1):
        used |= dict.fromkeys(trace.equations[i].inputs(), i)
    open_: dict[tuple, Bucket] = {}
    buckets = []
    joinable = {eqn.out for eqn in trace.equations if _joinable(eqn, small) and eqn.out in used}
    for i, eqn in enumerate(trace.equations):
        if not joinable.intersection(eqn.results()):
            continue
        (x,) = eqn.inputs()
        ready = i - 1 if x in joinable else makers.get(x, -1)  # what another bucket brings is there when it is read
        place = ready, used[eqn.out], max(x.nbytes(), eqn.out.nbytes())
        how = eqn.args[2:] if is_collective(eqn, "all_reduce") else ()
        key = eqn.op, axis_in(eqn.args[1:]), x.dtype, x.tensor.device, how  # type: ignore[arg-type]
        if key not in open_ or not open_[key].takes(*place, room):
            open_[key] = Bucket(-1, len(trace.equations))
            buckets.append(open_[key])
        open_[key].add(eqn, *place)
    return buckets


def _joinable(eqn: Equation, small: int) -> bool:
    if not is_collective(eqn, *JOINED):
        return False
    (x,) = eqn.inputs()
    if not all(type(n) is int for n in (*x.shape, *eqn.out.shape)) or max(x.nbytes(), eqn.out.nbytes()) > small:
        return False
    ranks = eqn.op.mesh.size(axis_in(eqn.args[1:]))  # type: ignore[union-attr, arg-type]
    padded = is_collective(eqn, "reduce_scatter") and x.shape[eqn.args[1]] % ranks  # type: ignore[index, operator]
    return ranks > 1 and not padded


def _exchanged(builder: Builder, group: Sequence[Equation]) -> Value:
    """Operands side by side, as chunks for each rank where they are scattered; then one exchange."""
    op = group[0].op
    assert isinstance(op, Collective)
    with builder.at(group[0], f"{len(group)} {IN_A_BUCKET}"):
        flat = builder.call("cat", [_flat(builder, eqn) for eqn in group], -1)
        axis, rest = axis_in(group[0].args[1:]), group[0].args[2:]
        args = (axis, *rest) if op.name == "all_reduce" else (0, axis)
        return builder.emit(getattr(on(op.mesh), op.name), flat, *args)  # type: ignore[arg-type, return-value]


def _flat(builder: Builder, eqn: Equation) -> Value:
    x, op = eqn.inputs()[0], eqn.op
    shape = _sizes(x)
    if not is_collective(eqn, "reduce_scatter"):
        return _reshaped(builder, _dense(builder, x), [prod(shape)])
    dim, ranks = int(eqn.args[1]), op.mesh.size(eqn.args[2])  # type: ignore[union-attr, arg-type]
    split = [*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :]]
    first = _moved(builder, _reshaped(builder, _dense(builder, x), split), dim, 0)
    return _reshaped(builder, _dense(builder, first), [ranks, prod(shape) // ranks])


def _taken_apart(builder: Builder, flat: Value, group: Sequence[Equation], kept: set[Value]) -> None:
    """Each member's result; what was gathered is copied out, all members at once, sums are views."""
    gathers = is_collective(group[0], "all_gather")
    ranks = _ranks(group[0]) if gathers else 1
    counts = [prod(_sizes(eqn.inputs()[0] if gathers else eqn.out)) for eqn in group]
    with builder.at(group[0]):
        flat = _reshaped(builder, flat, [ranks, sum(counts)] if gathers else [sum(counts)])
        parts = _split(builder, flat, counts, aten.split_with_sizes_copy if gathers else aten.split_with_sizes)
    split = len(builder.equations) - 1
    for i, (eqn, part) in enumerate(zip(group, parts, strict=True)):
        with builder.at(eqn):
            out = _gathered(builder, part, eqn) if gathers else _reshaped(builder, part, _sizes(eqn.out))
            if eqn.out in kept and not gathers:  # what the caller gets holds no bucket
                out = _copied(builder, out)
        at, place = (split, i) if out is part else (-1, 0)
        made = builder.equations[at]
        outputs = tuple(eqn.out if i == place else v for i, v in enumerate(made.outputs))
        builder.equations[at] = made.with_(outputs=outputs)


def _gathered(builder: Builder, part: Value, eqn: Equation) -> Value:
    """One member's chunks, one a rank, put together along its dimension, without padding."""
    shape, dim = _sizes(eqn.inputs()[0]), int(eqn.args[1])  # type: ignore[arg-type]
    count, whole = shape[dim] * _ranks(eqn), _sizes(eqn.out)[dim]
    if dim:
        chunks = _reshaped(builder, part, [_ranks(eqn), *shape])
        part = _copied(builder, _moved(builder, chunks, 0, dim))
    out = _reshaped(builder, part, [count if d == dim else n for d, n in enumerate(shape)])
    return out if whole == count else _copied(builder, _sliced(builder, out, dim, 0, whole))


def _ranks(eqn: Equation) -> int:
    return eqn.op.mesh.size(axis_in(eqn.args[1:]))  # type: ignore[union-attr, arg-type]


# --- equations whose types are known: nothing is run to learn them --------------------------------


def _sizes(x: Value) -> list[int]:
    return [int(n) for n in x.shape]


def _emit(builder: Builder, op: OpOverload, args: tuple, x: Value, shape: list[int], stride: Sequence) -> Value:
    args, kwargs = normalise(op, args, {})
    type_ = TensorType(x.dtype, tuple(shape), tuple(stride), x.tensor.device)
    return builder.record(op, args, kwargs, type_)  # type: ignore[return-value]


def _dense(builder: Builder, x: Value) -> Value:
    return x if x.tensor.stride == contiguous_strides(x.shape) else _copied(builder, x)


def _copied(builder: Builder, x: Value) -> Value:
    args, kwargs = normalise(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    type_ = TensorType(x.dtype, x.shape, contiguous_strides(x.shape), x.tensor.device)
    return builder.record(aten.clone.default, args, kwargs, type_)  # type: ignore[return-value]


def _sliced(builder: Builder, x: Value, dim: int, start: int, end: int) -> Value:
    shape = [end - start if d == dim else n for d, n in enumerate(_sizes(x))]
    return _emit(builder, aten.slice.Tensor, (x, dim, start, end), x, shape, x.tensor.stride)


def _split(builder: Builder, x: Value, counts: list[int], op: OpOverloadPacket) -> list[Value]:
    """So many columns each, of the last dimension."""
    types = []
    for count in counts:
        shape = (*x.shape[:-1], count)
        copied = op is aten.split_with_sizes_copy
        types.append(
            TensorType(x.dtype, shape, contiguous_strides(shape) if copied else x.tensor.stride, x.tensor.device)
        )
    args, kwargs = normalise(op.default, (x, counts, x.ndim - 1), {})
    return builder.record(op.default, args, kwargs, types)  # type: ignore[return-value]


def _moved(builder: Builder, x: Value, dim: int, to: int) -> Value:
    if dim == to:
        return x
    order = [d for d in range(x.ndim) if d != dim]
    order.insert(to, dim)
    shape, stride = [_sizes(x)[d] for d in order], [x.tensor.stride[d] for d in order]
    return _emit(builder, aten.permute.default, (x, order), x, shape, stride)


def _reshaped(builder: Builder, x: Value, shape: list[int]) -> Value:
    """Of what is dense, or of dense rows: each row's elements in a new form."""
    if _sizes(x) == shape:
        return x
    stride = list(contiguous_strides(shape))
    if x.ndim == 2 and x.tensor.stride != contiguous_strides(x.shape):
        stride[0] = x.tensor.stride[0]
    return _emit(builder, aten.view.default, (x, shape), x, shape, stride)
