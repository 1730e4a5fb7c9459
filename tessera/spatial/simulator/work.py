"""What an instruction reads and writes, and how long that takes: the durations of docs/machine.md.

In: a step and the page that it stands on. Out: its `Work`: tiles read and written, the cycles that its unit needs, its
multiplications. Types, shapes and names are checked here; what meets what in time is checked elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.listing.host import computed, operands
from tessera.spatial.listing.types import (
    WHOLE,
    Buffer,
    Call,
    Copy,
    Expression,
    FromHost,
    Hosted,
    Load,
    Product,
    Recv,
    Ref,
    Send,
    Store,
    TensorType,
    ToHost,
    Tree,
    nodes,
)
from tessera.spatial.simulator import values
from tessera.spatial.simulator.operands import Bad, Tile, tile
from tessera.spatial.simulator.violation import Step

SUMS = {
    "int8": "int32", "uint8": "int32", "float8_e4m3fn": "float32", "float8_e5m2": "float32", "float16": "float32",
    "bfloat16": "float32", "float32": "float32", "float64": "float64",
}  # fmt: skip
UNIT = {
    Product: "matrix", Expression: "vector", Copy: "copy", FromHost: "host", ToHost: "host", Load: "dram",
    Store: "dram", Hosted: "call",
}  # fmt: skip


@dataclass
class Work:
    step: Step
    reads: list[Tile] = field(default_factory=list)
    writes: list[Tile] = field(default_factory=list)
    place: Tile | None = None  # in off-chip memory or at the host
    read_bytes: int = 0
    written_bytes: int = 0
    unit_cycles: int = 0
    macs: int = 0
    over: list[Tile] = field(default_factory=list)  # of what is read, what may be written in the same place
    later: int = 0  # cycles after the start at which memory is held
    taken: list[Tile] = field(default_factory=list)  # at the host, by an operator that runs there
    given: list[Tile] = field(default_factory=list)

    @property
    def host_bytes(self) -> int:
        return sum(of.bytes for of in (*self.taken, *self.given))

    @property
    def begin(self) -> int:
        return self.step.of.start + self.later

    @property
    def end(self) -> int:
        return self.begin + self.step.of.duration

    def traffic(self, width: int) -> int:
        """Cycles at the ports that the instruction names; who names none for its bytes is refused elsewhere."""
        ports = self.step.of.ports
        kinds = (("sram.r", self.read_bytes), ("sram.w", self.written_bytes))
        counts = [(sum(port.startswith(kind) for port in ports), size) for kind, size in kinds]
        return max(-(-size // (max(number, 1) * width)) for number, size in counts)


class Worker:
    """Reads the instructions of one core."""

    def __init__(
        self,
        machine: SpatialMachine,
        buffers: Mapping[str, Buffer],
        places: Mapping[str, Mapping[str, TensorType]],
    ) -> None:
        self.machine, self.buffers, self.places = machine, buffers, places
        self.tiles: dict[Ref, Tile] = {}

    def work(self, step: Step) -> Work:
        work = Work(step)
        try:
            self.fill(work)
        except Bad as error:
            raise step.refuse(error.kind, error.why) from None
        return work

    def fill(self, work: Work) -> None:
        match work.step.of.action:
            case Product() as action:
                self.product(work, action)
            case Expression(target, tree):
                self.expression(work, target, tree)
            case Copy(target, source):
                self.move(work, self.read(work, source), self.write(work, target))
            case Send(value, _):
                self.read(work, value)
            case Recv(target, _, add):
                written = self.write(work, target)
                if add:
                    work.over.append(self.read(work, target))
                    if not self.machine.link.reduce:
                        raise Bad("type", "expected a machine whose links add (link.reduce)")
                if written.rows:
                    raise Bad("shape", "expected a part without an index; a copy writes rows")
            case FromHost(target, place):
                work.place = self.outside("input", place)
                self.move(work, work.place, self.write(work, target))
                work.unit_cycles = self.outside_cycles(work.place, self.machine.host)
            case ToHost(value, place):
                work.place = self.outside("output", place)
                self.move(work, self.read(work, value), work.place)
                work.unit_cycles = self.outside_cycles(work.place, self.machine.host)
            case Load(target, place):
                work.place = self.outside("dram", place)
                self.move(work, work.place, self.write(work, target))
                work.unit_cycles = self.outside_cycles(work.place, self.machine.dram)
                work.later = self.machine.dram.latency if self.machine.dram else 0
            case Store(value, place):
                work.place = self.outside("dram", place)
                self.move(work, self.read(work, value), work.place)
                work.unit_cycles = self.outside_cycles(work.place, self.machine.dram)
            case Hosted() as action:
                self.call(work, action)

    def call(self, work: Work, action: Hosted) -> None:
        """An operator that the host runs: its results have the types and shapes that PyTorch gives them."""
        if (host := self.machine.host) is None or host.latency is None or host.rate is None:
            raise Bad("unit", "expected a machine whose host computes (host.latency, host.rate)")
        work.taken = [self.outside("host", Ref(name)) for name in operands(action)]
        work.given = [self.outside("host", Ref(name)) for name in action.results if name != "_"]
        named = [of.ref.name for of in (*work.taken, *work.given)]
        if not work.given or len(set(named)) != len(named):
            raise Bad("race", "expected results, each a tensor of its own")
        blank = {
            of.ref.name: torch.empty(of.shape, dtype=values.dtype_of(of.dtype), device="meta") for of in work.taken
        }
        check_results(action, work.given, called(action, blank))
        work.unit_cycles = host.latency + _up(work.host_bytes, host.rate)

    def outside_cycles(self, place: Tile, of) -> int:
        return -(-place.bytes // of.width) if of else 1

    # ── operands

    def tile(self, ref: Ref) -> Tile:
        if (known := self.tiles.get(ref)) is None:
            known = self.tiles[ref] = self.new_tile(ref)
        return known

    def new_tile(self, ref: Ref) -> Tile:
        if (buffer := self.buffers.get(ref.name)) is None:
            raise Bad("bounds", f"expected a buffer of this core; there is no {ref.name}")
        rows = None
        if chosen := next((of for of in ref.index if isinstance(of, str)), None):
            if (indices := self.buffers.get(chosen)) is None:
                raise Bad("bounds", f"expected a buffer of indices; there is no {chosen}")
            if indices.type.dtype not in ("int32", "int64"):
                raise Bad("type", f"expected indices of int32 or int64; {chosen} is {indices.type}")
            rows = math.prod(indices.type.shape)
        return tile(ref, buffer.type, rows)

    def read(self, work: Work, ref: Ref) -> Tile:
        of = self.tile(ref)
        work.reads.append(of)
        work.read_bytes += of.bytes
        self.indices(work, of)
        return of

    def write(self, work: Work, ref: Ref) -> Tile:
        of = self.tile(ref)
        if of.ref.transposed:
            raise Bad("shape", "expected a target that is not turned")
        work.writes.append(of)
        work.written_bytes += of.bytes
        self.indices(work, of)
        return of

    def indices(self, work: Work, of: Tile) -> None:
        if of.rows is None:
            return
        if not isinstance(work.step.of.action, Copy):
            raise Bad("shape", f"expected a copy to choose rows by {of.rows}")
        self.read(work, Ref(of.rows))

    def outside(self, kind: str, ref: Ref) -> Tile:
        if (of := self.places[kind].get(ref.name)) is None:
            raise Bad("bounds", f"expected an {kind} of the program; there is no {ref.name}")
        if ref.transposed or any(isinstance(index, str) for index in ref.index):
            raise Bad("shape", f"expected slices of {ref.name}")
        return tile(ref, of)

    @staticmethod
    def move(work: Work, source: Tile, target: Tile) -> None:
        if source.dtype != target.dtype:
            raise Bad(
                "type", f"expected one type; {source.ref.name} is {source.dtype}, {target.ref.name} {target.dtype}"
            )
        if source.count != target.count:
            raise Bad("shape", f"expected as many elements; got {list(source.shape)} and {list(target.shape)}")

    # ── products

    def product(self, work: Work, action: Product) -> None:
        x, w, y = self.tile(action.x), self.tile(action.w), self.write(work, action.target)
        if any(of.rows for of in (x, w, y)):
            raise Bad("shape", "expected operands without an index")
        shapes = x.shape, w.shape, y.shape
        flat = any(len(shape) != 2 for shape in shapes)
        if flat or (*x.shape, w.shape[1]) != (y.shape[0], w.shape[0], y.shape[1]):
            raise Bad("shape", f"expected [m, k] · [k, n] = [m, n]; got {' '.join(map(str, shapes))}")
        passes = self.machine.matrix.passes
        if x.dtype != w.dtype or x.dtype not in passes or x.dtype not in SUMS:
            raise Bad("type", f"expected two of one type out of {', '.join(passes)}; got {x.dtype} and {w.dtype}")
        if y.dtype != SUMS[x.dtype]:
            raise Bad("type", f"expected sums of {SUMS[x.dtype]}; {y.ref.name} is {y.dtype}")
        array = self.machine.matrix
        (m, k), n = x.shape, w.shape[1]
        rows, columns = array.rows, array.columns
        match array.stationary:
            case "weight":
                folds, streamed, reads = _up(k, rows) * _up(n, columns), m, (_up(n, columns), 1)
            case "input":
                folds, streamed, reads = _up(k, rows) * _up(m, columns), n, (1, _up(m, columns))
            case _:
                folds, streamed, reads = _up(m, rows) * _up(n, columns), k, (_up(n, columns), _up(m, rows))
        loaded = 0 if array.stationary == "output" else rows
        fold = loaded + rows + columns + streamed - 2
        cycles = folds * fold if array.loading == "serial" else fold + (folds - 1) * max(streamed, rows)
        work.unit_cycles = math.ceil(Fraction(passes[x.dtype]) * cycles)
        work.macs = m * k * n
        work.reads += [x, w]
        work.read_bytes += x.bytes * reads[0] + w.bytes * reads[1]
        if action.add:
            work.over.append(self.read(work, action.target))

    # ── expressions

    def expression(self, work: Work, target: Ref, tree: Tree) -> None:
        y = self.write(work, target)
        work.over += [self.read(work, ref) for ref in dict.fromkeys(of for of in nodes(tree) if isinstance(of, Ref))]
        shape = self.shape(tree)
        if broadcast([shape, y.shape]) != y.shape:
            raise Bad("shape", f"expected what broadcasts to {list(y.shape)}; got {list(shape)}")
        largest = max(of.count for of in (y, *work.reads))
        names = [of.function for of in nodes(tree) if isinstance(of, Call)] or ["move"]
        vector = self.machine.vector
        each = sum(Fraction(vector.cycles_of(name)) for name in names)
        work.unit_cycles = math.ceil(-(-largest // vector.lanes) * each)

    def shape(self, tree: Tree) -> tuple[int, ...]:
        match tree:
            case Ref():
                return self.tile(tree).shape
            case Call(name, operands):
                shapes = [self.shape(operand) for operand in operands]
                if name in ("sum", "max", "min", "argmax", "argmin"):
                    if not shapes[0]:
                        raise Bad("shape", f"expected a dimension to take the {name} of")
                    return (*shapes[0][:-1], 1)
                if (shape := broadcast(shapes)) is None:
                    raise Bad("shape", f"expected shapes that broadcast; got {', '.join(map(str, shapes))}")
                return shape
        return ()


def called(action: Hosted, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What an operator gives; whatever it raises is a refusal."""
    try:
        return computed(action, tensors)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        told = (str(error).splitlines() or [""])[0]
        raise Bad("type", f"expected operands that {action.op} takes: {told[:200]}") from None


def check_results(action: Hosted, declared: list[Tile], got: tuple[torch.Tensor, ...]) -> None:
    if len(got) != len(action.results):
        raise Bad("shape", f"expected {len(got)} results of {action.op}; got {len(action.results)}")
    left = iter(declared)
    for name, value in zip(action.results, got, strict=True):
        if name == "_":
            continue
        of, gives = next(left), f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if gives != f"{of.dtype}{list(of.shape)}":
            raise Bad("type", f"expected {name} to be {gives}, as {action.op} gives it; it is {of.type}")


def _up(a: int, b: int) -> int:
    return -(-a // b)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that all of them broadcast to, as in PyTorch; None where there is none."""
    first, *others = shapes
    if all(shape == first for shape in others):
        return first
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    sizes = [set(column) - {1} for column in columns]
    return tuple(size.pop() if size else 1 for size in sizes) if all(len(size) < 2 for size in sizes) else None


def computed_in(tree: Tree, dtypes: list[str]) -> str:
    """The one type in which an expression is computed; `dtypes` are its operands'."""
    if "float64" in dtypes:
        return "float64"
    inside = list(nodes(tree))
    floats = any("float" in dtype for dtype in dtypes) or any(isinstance(of, float) for of in inside)
    if floats or any(isinstance(of, Call) and of.function not in WHOLE for of in inside):
        return "float32"
    return "int64" if "int64" in dtypes else "int32"
