"""The operations of a kernel at one position: what each writes into the LLVM code.

`Body` knows where it stands (the positions of the axes, the chunk of lanes) and the values so far; the loops around it,
and what reductions carry, come from `lower`.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.ops import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import element_of
from tessera.tile.targets.cpu.code import V
from tessera.tile.targets.cpu.elements import F32, I64, Element, cast, element, narrow, truth, widen
from tessera.tile.targets.cpu.functions import apply
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import Layout
from tessera.tile.targets.cpu.memory import Chunk, Memory
from tessera.tile.targets.cpu.random import philox
from tessera.tile.targets.cpu.reduce import Carried, Kind, Parts
from tessera.util.errors import OptionError


class Body:
    def __init__(self, b: Code, seen: Layout) -> None:
        self.b, self.seen = b, seen
        self.names: dict[str, V] = {}  # symbols and positions along axes
        known = {axis: size.constant for axis, size in seen.sizes.items() if size.constant is not None}
        self.memory = Memory(b, self.names, known)
        self.buffers: dict[SSAValue, V] = {}
        self.values: dict[SSAValue, V] = {}
        self.chunk = Chunk()
        self.carried: dict[Operation, Carried] = {}
        self.turned: dict[Operation, V] = {}  # where a turned load's square stands
        self.row: V = b.const("i64", 0)  # offset in it

    def run(self, op: Operation) -> None:
        """Any operation but a store; its value is remembered."""
        b = self.b
        match op:
            case ReduceOp():
                x = self._float(op.arg)
                if op.kind.data in ("any", "all"):
                    x = truth(b, x, _like(x, element(element_of(op.arg))))
                where = self._position() if op.kind.data.startswith("arg") else None
                return self.carried[op].step(x, where, self._reduce_mask())
            case ReduceExpOp():
                return self.carried[op].step(self._float(op.arg), None, self._reduce_mask())
            case ContractOp():
                return self._contract(op)
            case ScanOp():
                x = self._float(op.arg)
                if self.chunk.axis == self.seen.reduced:
                    x = b.splat(x, self.chunk.lanes)
                result = self._result(self.carried[op].scan(x, self._reduce_mask()), op)
            case LoadOp():
                result = self._load(op)
            case IotaOp():
                where, run = self.memory.offset(self.seen.at[op], self._all(op.indices), self.chunk)
                result = b.bin("add", where, b.lane_numbers("i64", self.chunk.lanes)) if run else where
            case ConstantOp():
                result = self._constant(op)
            case ApplyOp():
                kinds = [element(element_of(v)) for v in op.args]
                result = apply(b, op.fn.data, self._all(op.args), kinds, element(element_of(op.result)))
            case CastOp():
                source, to = element(element_of(op.arg)), element(element_of(op.result))
                result = cast(b, self.values[op.arg], source, to)
            case RandomOp():
                result = philox(b, self.values[op.seed], self.values[op.offset])
            case _:
                raise OptionError(f"the cpu target has no rule for {op.name}")
        self.values[op.results[0]] = result

    def finish(self, op: Operation, how: Kind, parts: Parts) -> None:
        """The values of a reduction whose loop has ended."""
        for result, value in zip(op.results, how.finish(self.b, parts), strict=True):
            self.values[result] = self._result(value, op)

    def _result(self, value: V, op: Operation) -> V:
        e = element(element_of(op.results[0]))
        return narrow(self.b, value, e) if e.short else cast(self.b, value, _like(value, e), e)

    def _all(self, values: Sequence[SSAValue]) -> list[V]:
        return [self.values[v] for v in values]

    def _float(self, v: SSAValue) -> V:
        e = element(element_of(v))
        return widen(self.b, self.values[v], e) if e.short else self.values[v]

    def _reduce_mask(self) -> V | None:
        """Lanes beyond the end must not count; along another axis they have results of their own."""
        return self.chunk.mask if self.chunk.axis == self.seen.reduced else None

    def _position(self) -> V:
        axis = self.seen.reduced or ""
        if self.chunk.axis == axis and self.chunk.lanes:
            return self.b.bin("add", self.names[axis], self.b.lane_numbers("i64", self.chunk.lanes))
        return self.names[axis]

    def _constant(self, op: ConstantOp) -> V:
        assert isinstance(op.value, (IntegerAttr, FloatAttr))
        e, number = element(element_of(op.result)), op.value.value.data
        if e.short:
            return narrow(self.b, self.b.const("float", number), e)
        return self.b.const(e.register, number)

    def _contract(self, op: ContractOp) -> None:
        b = self.b
        x, y = (cast(b, self.values[v], element(element_of(v)), F32) for v in (op.lhs, op.rhs))
        if self._reduce_mask() is not None:
            x = b.select(self._reduce_mask(), x, b.const("float", 0.0))  # type: ignore[arg-type]
            y = b.select(self._reduce_mask(), y, b.const("float", 0.0))  # type: ignore[arg-type]
        self.carried[op].multiply_add(x, y)

    def _load(self, op: LoadOp) -> V:
        e = element(element_of(op.buffer))
        if op in self.turned:
            address = self.b.address(self.turned[op], e.memory, self.row)
            return self.memory.inside(self.b.load(e.memory, self.chunk.lanes, address), e)
        where, run = self.memory.offset(self.seen.at[op], self._indices(op), self.chunk)
        mask = self._truth(op.mask)
        other = self.values[op.other] if op.other is not None else None
        if other is not None:
            other = cast(self.b, other, element(element_of(op.other)), e)  # type: ignore[arg-type]
        return self.memory.load(self.buffers[op.buffer], e, where, run, self.chunk, mask, other)

    def store(self, op: StoreOp, once: V | None) -> None:
        """`once` says whether this point adds, for stores that add."""
        e = element(element_of(op.buffer))
        where, run = self.memory.offset(self.seen.at[op], self._indices(op), self.chunk)
        args = (self.values[op.value], self.buffers[op.buffer], e, where, run, self.chunk, self._truth(op.mask))
        if op.mode.data == "set":
            self.memory.store(*args)
        elif once is None:
            self.memory.add(*args)
        else:
            with self.b.when(once, "once"):
                self.memory.add(*args)

    def _indices(self, op: LoadOp | StoreOp) -> list[V]:
        return [cast(self.b, self.values[v], element(element_of(v)), I64) for v in op.indices]

    def _truth(self, mask: SSAValue | None) -> V | None:
        return None if mask is None else truth(self.b, self.values[mask], element(element_of(mask)))


def _like(x: V, e: Element) -> Element:
    """What a value of a register type is, before it becomes `e`."""
    if x.elem == e.register:
        return e
    return Element({"float": "f32", "double": "f64"}.get(x.elem, x.elem), x.elem, x.elem, x.elem == "i1" or e.unsigned)
