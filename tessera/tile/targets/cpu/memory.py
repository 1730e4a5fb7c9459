"""Loads and stores: how an address varies over the lanes decides the instruction.

Along the vector axis an address that stays is one scalar access, one that grows by one is a vector access, anything
else a gather or scatter. Lanes beyond the end, and lanes a kernel's own mask switches off, touch no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.tile.dialect.index import Index
from tessera.tile.targets.cpu.code import SIZES, V, suffix, type_of
from tessera.tile.targets.cpu.elements import Element, narrow, widen
from tessera.tile.targets.cpu.host import HostCode as Code
from tessera.tile.targets.cpu.layout import bound, chunk_stride


@dataclass(frozen=True)
class Chunk:
    """What one pass through a body handles: `lanes` neighbours along `axis`, those where `mask` holds."""

    axis: str | None = None
    lanes: int = 0
    mask: V | None = None
    piece: int = 0  # a stretch of the axis that holds the chunk, and starts at a multiple of its own length


@dataclass(frozen=True)
class Number:
    """An index while an expression is folded: a Python int or an integer value."""

    b: Code
    v: V | int
    elem: str = "i64"

    def _value(self) -> V:
        return self.v if isinstance(self.v, V) else self.b.const(self.elem, self.v)

    def _with(self, other: Number, op: str, fold: int) -> Number:
        if isinstance(self.v, int) and isinstance(other.v, int):
            return Number(self.b, fold, self.elem)
        return Number(self.b, self.b.bin(op, self._value(), other._value()), self.elem)

    def __add__(self, other: Number) -> Number:
        if other.v == 0:
            return self
        return other if self.v == 0 else self._with(other, "add", _int(self) + _int(other))

    def __mul__(self, other: Number) -> Number:
        if other.v == 1:
            return self
        return other if self.v == 1 else self._with(other, "mul", _int(self) * _int(other))

    def __floordiv__(self, other: Number) -> Number:
        return self._with(other, "udiv", _int(self) // (_int(other) or 1))

    def __mod__(self, other: Number) -> Number:
        return self._with(other, "urem", _int(self) % (_int(other) or 1))


def _int(n: Number) -> int:
    return n.v if isinstance(n.v, int) else 0


@dataclass
class Memory:
    """Writes accesses into `b`, with the values of names at hand."""

    b: Code
    names: dict[str, V]  # symbols and axes; the vector axis stands at its chunk's first lane
    extents: dict[str, int] = field(default_factory=dict)  # sizes of axes that are known

    def scalar(self, expr: Index, gathered: list[V] | None = None) -> V:
        return self._evaluate(expr, self.names, gathered or [])

    def _evaluate(self, expr: Index, names: dict[str, V], gathered: list[V], elem: str = "i64") -> V:
        def look(name: str) -> Number:
            v = names[name] if name in names else gathered[int(name.removeprefix("_"))]
            return Number(self.b, v if v.elem == elem else self.b.convert("trunc", v, elem), elem)

        return expr.evaluate(look, lambda n: Number(self.b, n, elem))._value()

    def offset(self, expr: Index, gathered: list[V], chunk: Chunk) -> tuple[V, bool]:
        """The element offset, and whether it is that of the first lane of a run (else a vector holds every lane's)."""
        axis, lanes = chunk.axis, chunk.lanes
        if not lanes or axis is None or any(g.lanes for g in gathered):
            return self._each(expr, gathered, chunk), False
        stride = chunk_stride(expr, axis, chunk.piece or lanes)
        if stride is None:
            return self._each(expr, gathered, chunk), False
        first = self.scalar(expr, gathered)
        if stride.constant == 0:
            return first, False
        if stride.constant == 1:
            return first, True
        step = self.b.bin("mul", self.b.lane_numbers("i64", lanes), self.scalar(stride, gathered))
        return self.b.bin("add", first, step), False

    def _each(self, expr: Index, gathered: list[V], chunk: Chunk) -> V:
        """Every lane's offset; in 32 bits where they suffice, since vectors divide them well."""
        if not chunk.lanes or chunk.axis is None or chunk.axis not in expr.names():
            return self._evaluate(expr, self.names, gathered)
        largest = bound(expr, self.extents)
        elem = "i32" if largest is not None and largest < 2**31 else "i64"
        start = self.names[chunk.axis]
        start = start if elem == "i64" else self.b.convert("trunc", start, elem)
        positions = self.b.bin("add", start, self.b.lane_numbers(elem, chunk.lanes))
        where = self._evaluate(expr, {**self.names, chunk.axis: positions}, gathered, elem)
        return where if elem == "i64" else self.b.convert("sext", where, "i64")

    # --- access ---

    def load(self, base: V, e: Element, where: V, run: bool, chunk: Chunk, mask: V | None, other: V | None) -> V:
        b = self.b
        if mask is None and not run and not where.lanes:
            return self.inside(b.load(e.memory, 0, b.address(base, e.memory, where)), e)
        lanes = chunk.lanes if run else max(where.lanes, mask.lanes if mask is not None else 0)
        wide = lanes or 1  # a masked scalar is a vector of one
        keep = self._mask(mask, chunk if lanes else Chunk(), wide)
        rest = self._rest(other, e, wide)
        if run:
            address = b.address(base, e.memory, where)
            loaded = (
                b.load(e.memory, lanes, address)
                if keep is None
                else self._masked("load", e.memory, wide, [address, keep, rest])
            )
        elif not where.lanes and not (mask is not None and mask.lanes):
            address = b.address(base, e.memory, where)
            loaded = b.lane(self._masked("load", e.memory, 1, [address, keep, rest]), 0)
        else:
            addresses = b.address(base, e.memory, b.splat(where, wide))
            keep = keep if keep is not None else b.const("i1", 1, wide)
            loaded = self._masked("gather", e.memory, wide, [addresses, keep, rest])
        return self.inside(loaded, e)

    def load_raw(self, base: V, e: Element, where: V, chunk: Chunk) -> V:
        """A run of elements as they stand in memory."""
        address = self.b.address(base, e.memory, where)
        if chunk.mask is None:
            return self.b.load(e.memory, chunk.lanes, address)
        return self._masked("load", e.memory, chunk.lanes, [address, chunk.mask, self._rest(None, e, chunk.lanes)])

    def store(self, x: V, base: V, e: Element, where: V, run: bool, chunk: Chunk, mask: V | None) -> None:
        b = self.b
        x = self._out(x, e)
        lanes = chunk.lanes if run else max(where.lanes, x.lanes, mask.lanes if mask is not None else 0)
        wide = lanes or 1
        keep = self._mask(mask, chunk if lanes else Chunk(), wide)
        if lanes and not run:
            addresses = b.address(base, e.memory, b.splat(where, wide))
            keep = keep if keep is not None else b.const("i1", 1, wide)
            self._masked_store("scatter", b.splat(x, wide), addresses, keep)
        elif keep is None:
            b.store(b.splat(x, lanes), b.address(base, e.memory, where))
        else:
            self._masked_store("store", b.splat(x, wide), b.address(base, e.memory, where), keep)

    def add(self, x: V, base: V, e: Element, where: V, run: bool, chunk: Chunk, mask: V | None) -> None:
        """Add to memory, atomically, lane by lane."""
        b = self.b
        lanes = chunk.lanes if run else max(where.lanes, x.lanes, mask.lanes if mask is not None else 0)
        if not lanes:
            if mask is None:
                return self._add_one(x, b.address(base, e.memory, where), e)
            with b.when(mask, "add"):
                self._add_one(x, b.address(base, e.memory, where), e)
            return
        if run:
            where = b.bin("add", where, b.lane_numbers("i64", lanes))
        x, where = b.splat(x, lanes), b.splat(where, lanes)
        keep = self._mask(mask, chunk, lanes)
        with b.loop(b.const("i64", 0), b.const("i64", lanes), 1, "lane") as k:
            value = b.value(f"extractelement {x}, {k}", x.elem, 0)
            address = b.address(base, e.memory, b.value(f"extractelement {where}, {k}", "i64", 0))
            if keep is None:
                self._add_one(value, address, e)
            else:
                with b.when(b.value(f"extractelement {keep}, {k}", "i1", 0), "add"):
                    self._add_one(value, address, e)

    def _add_one(self, x: V, address: V, e: Element) -> None:
        b = self.b
        if e.short:
            name = f"add.{e.name}"
            if name not in b.helpers:
                b.helpers[name] = _add_short(b, name, e)
            b.emit(f"call void @{name}({address}, {widen(b, x, e)})")
            return
        x = self._out(x, e)
        op = "or" if e.name == "i1" else "fadd" if e.is_float else "add"
        b.emit(f"{'%' + b.fresh('old')} = atomicrmw {op} {address}, {x} monotonic")

    # --- parts ---

    def _mask(self, mask: V | None, chunk: Chunk, lanes: int) -> V | None:
        mine = self.b.splat(mask, lanes) if mask is not None else None
        if chunk.mask is None:
            return mine
        return chunk.mask if mine is None else self.b.bin("and", mine, chunk.mask)

    def _rest(self, other: V | None, e: Element, lanes: int) -> V:
        if other is None:
            return V("zeroinitializer", e.memory, lanes)
        return self.b.splat(self._out(other, e), lanes)

    def _masked(self, what: str, elem: str, lanes: int, args: list[V | None]) -> V:
        address, keep, rest = args
        assert address is not None and keep is not None and rest is not None
        name = f"llvm.masked.{what}.{suffix(elem, lanes)}.{suffix('ptr', address.lanes)}"
        kind = type_of(elem, lanes)
        # The alignment is an argument up to LLVM 21; later versions read this form too.
        self.b.declare(name, kind, [address.type, "i32", keep.type, rest.type])
        text = f"call {kind} @{name}({address}, i32 {SIZES[elem]}, {keep}, {rest})"
        return self.b.value(text, elem, lanes, pure=False)

    def _masked_store(self, what: str, x: V, address: V, keep: V) -> None:
        name = f"llvm.masked.{what}.{suffix(x.elem, x.lanes)}.{suffix('ptr', address.lanes)}"
        self.b.declare(name, "void", [x.type, address.type, "i32", keep.type])
        self.b.emit(f"call void @{name}({x}, {address}, i32 {SIZES[x.elem]}, {keep})")

    def inside(self, x: V, e: Element) -> V:
        """What was loaded, as a register holds it."""
        return self.b.compare("ne", x, self.b.like(x, 0)) if e.name == "i1" else x

    def _out(self, x: V, e: Element) -> V:
        return self.b.convert("zext", x, "i8") if e.name == "i1" and x.elem == "i1" else x


def _add_short(b: Code, name: str, e: Element) -> str:
    """A 16-bit float has no atomic addition: compare and exchange until nobody was in between."""
    inner = Code(b.host)
    inner.label("entry")
    first = inner.load("i16", 0, V("%p", "ptr"))
    inner.go("again")
    inner.label("again")
    inner.emit(f"%old = phi i16 [ {first.name}, %entry ], [ %seen, %again ]")
    total = inner.fadd(widen(inner, V("%old", "i16"), e), V("%x", "float"))
    new = narrow(inner, total, e)
    inner.emit(f"%pair = cmpxchg ptr %p, i16 %old, {new} monotonic monotonic")
    inner.emit("%seen = extractvalue { i16, i1 } %pair, 0")
    inner.emit("%done = extractvalue { i16, i1 } %pair, 1")
    inner.branch(V("%done", "i1"), "end", "again")
    inner.label("end")
    inner.emit("ret void")
    b.declared.update(inner.declared)
    return "\n".join([f"define internal void @{name}(ptr %p, float %x) {{", *inner.lines, "}"])
