"""What one instruction does, for the stepper: bytes read and written, the value, the cycles, everything that it holds.

In: the world at the cycle at which an instruction begins. Out: its `Job`. Addresses are numbers of bytes; parts of
tiles are what numpy makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import torch

from tessera.machines.spatial import Core
from tessera.spatial.listing import Program
from tessera.spatial.listing import types as t
from tessera.spatial.listing.host import computed, operands
from tessera.spatial.listing.text import action_text
from tessera.spatial.simulator import values
from tessera.spatial.simulator.violation import Violation
from tessera.spatial.simulator.wavefront import product
from tessera.util.safetensors import flat_bytes

UNITS = {
    t.Product: "matrix", t.Expression: "vector", t.Copy: "copy", t.Load: "dram", t.Store: "dram", t.FromHost: "host",
    t.ToHost: "host", t.Hosted: "call",
}  # fmt: skip


def elements(ref: t.Ref, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of the elements that a reference names; a tile of indices names all rows."""
    index: list[Any] = []
    for of, size in zip(ref.index, shape, strict=False):
        stop = of.stop if isinstance(of, t.Span) else of + 1 if isinstance(of, int) else 0
        if stop > size or len(ref.index) > len(shape):
            raise IndexError(f"{ref.name} ends before {of}")
        if isinstance(of, t.Span):
            index.append(slice(of.start, of.stop, of.step))
        else:
            index.append(of if isinstance(of, int) else slice(None))
    every = np.arange(math.prod(shape)).reshape(shape)[tuple(index)]
    return np.swapaxes(every, -1, -2) if ref.transposed else every


class Space:
    """Some memory: its bytes, and who owns, reads and writes each of them."""

    def __init__(self, size: int) -> None:
        self.bytes, self.written = np.zeros(size, np.uint8), np.zeros(size, bool)
        self.owner, self.writer, self.readers = np.full(size, -1), np.full(size, -1), np.zeros(size, int)

    def fill(self, at: int, known: torch.Tensor) -> None:
        raw = flat_bytes(known).numpy()
        self.bytes[at : at + len(raw)], self.written[at : at + len(raw)] = raw, True


class Job:
    """An instruction that runs."""

    def __init__(self, number: int, core: Core, of: t.Instruction) -> None:
        self.number, self.core, self.of, self.action = number, core, of, of.action
        self.begin, self.cycles, self.read, self.wrote, self.value = of.start, 0, 0, 0, torch.zeros(0)
        self.more: list[torch.Tensor] = []  # what it writes besides `value`
        self.chosen: list[np.ndarray] = []  # the bytes of each write, where rows are chosen
        self.reads: list[tuple[Any, t.Buffer, np.ndarray, bool]] = []  # space, buffer, bytes, may be written over
        self.writes: list[tuple[Any, t.Buffer, np.ndarray]] = []
        self.tokens: list[tuple[int, int, tuple]] = []

    @property
    def end(self) -> int:
        return self.begin + self.of.duration

    def __str__(self) -> str:
        return f"line {self.of.line}: core {self.core}  @{self.of.start} {self.of.units[0]}  {action_text(self.action)}"


class World:
    """Memory on the chip and off it, and what travels; `cycle` is now."""

    def __init__(self, program: Program, inputs: tuple[torch.Tensor, ...], data: Mapping[str, torch.Tensor]) -> None:
        self.m, self.listing, self.data, self.cycle = program.machine, program.listing, data, 0
        self.pages = {page.core: page for page in self.listing.pages}
        self.spaces: dict[Any, Space] = {core: Space(self.m.sram.size) for core in self.pages}
        self.buffers: dict[Any, dict[str, t.Buffer]] = {
            core: {of.name: of for of in page.buffers} for core, page in self.pages.items()
        }
        outside = [("input", n, of) for n, of in self.listing.inputs]
        outside += [("output", n, of) for n, of in self.listing.outputs]
        outside += [(f"dram {of.chip}", of.name, of.type) for of in self.listing.drams]
        for kind, n, of in outside:
            self.buffers.setdefault(kind, {})[n] = t.Buffer(n, of, 0, of.bytes)
            self.spaces[kind, n] = Space(of.bytes)
        for n, of in self.listing.hosted:
            space = Space(of.bytes)
            for kind in ("host", "input", "output"):
                self.buffers.setdefault(kind, {})[n], self.spaces[kind, n] = t.Buffer(n, of, 0, of.bytes), space
        for (n, _), x in zip(self.listing.inputs, inputs, strict=True):
            self.spaces["input", n].fill(0, x)
        for of in self.listing.drams:
            self.hold(self.spaces[f"dram {of.chip}", of.name], of, 0)
        self.flows: list[dict[str, Any]] = []

    def refuse(self, kind: str, core: Core | None, why: str, *parties: object) -> NoReturn:
        raise Violation(kind, core, self.cycle, why, *map(str, parties))

    def hold(self, space: Space, of: t.Buffer | t.Dram, at: int) -> None:
        """What lies in a buffer before cycle 0."""
        if of.source is None and of.state:
            space.fill(at, torch.zeros(of.type.bytes, dtype=torch.uint8))
        if of.source is None:
            return
        whole = self.data.get(of.source.name)
        if whole is None or str(whole.dtype) != f"torch.{of.type.dtype}":
            self.refuse("data", None, f"expected a tensor {of.source.name} of {of.type.dtype}", of)
        try:
            part = values.raw(whole).reshape(-1)[torch.from_numpy(elements(of.source, tuple(whole.shape)).copy())]
        except IndexError as error:
            self.refuse("data", None, str(error), of)
        if tuple(part.shape) != of.type.shape:
            self.refuse("data", None, f"{of.source.name} has another shape", of)
        space.fill(at, part)

    # ── operands

    def place(self, job: Job, ref: t.Ref, kind: str | None) -> tuple[Any, t.Buffer, np.ndarray]:
        of = self.buffers.get(kind or job.core, {}).get(ref.name)
        if of is None:
            self.refuse("bounds", job.core, f"there is no {ref.name}", job)
        try:
            return (kind, ref.name) if kind else job.core, of, elements(ref, of.type.shape)
        except (IndexError, np.exceptions.AxisError) as error:
            self.refuse("bounds", job.core, str(error), job)

    @staticmethod
    def bytes(of: t.Buffer, at: np.ndarray) -> np.ndarray:
        size = t.SIZES[of.type.dtype]
        return (of.address + at.reshape(-1, 1) * size + np.arange(size)).reshape(-1)

    def read(self, job: Job, ref: t.Ref, kind: str | None = None, over: bool = False) -> torch.Tensor:
        key, of, every = self.place(job, ref, kind)
        at, places = self.chosen(job, ref, every), self.bytes(of, every)
        if not self.spaces[key].written[places].all():
            self.refuse("unwritten", job.core, f"{ref.name} is read before it is written", job, of)
        job.reads.append((key, of, places, over))
        job.read += 0 if kind else self.bytes(of, at).size
        raw = self.spaces[key].bytes[self.bytes(of, at)]
        return torch.from_numpy(raw).view(values.dtype_of(of.type.dtype)).reshape(at.shape)

    def write(self, job: Job, ref: t.Ref, kind: str | None = None) -> tuple[str, tuple[int, ...]]:
        key, of, every = self.place(job, ref, kind)
        at = self.chosen(job, ref, every)
        if ref.transposed:
            self.refuse("shape", job.core, "a target is not turned", job)
        job.writes.append((key, of, self.bytes(of, every)))
        job.chosen.append(self.bytes(of, at))
        job.wrote += 0 if kind else job.chosen[-1].size
        return of.type.dtype, at.shape

    def chosen(self, job: Job, ref: t.Ref, every: np.ndarray) -> np.ndarray:
        names = [index for index in ref.index if isinstance(index, str)]
        if not names:
            return every
        if not isinstance(job.action, t.Copy) or ref.transposed:
            self.refuse("shape", job.core, "only a copy chooses rows", job)
        rows = self.read(job, t.Ref(names[0]))
        if rows.dtype not in (torch.int32, torch.int64):
            self.refuse("type", job.core, f"{names[0]} holds no indices", job)
        along = sum(not isinstance(index, int) for index in ref.index[: ref.index.index(names[0])])
        if rows.min() < 0 or rows.max() >= every.shape[along]:
            self.refuse("index", job.core, f"an index outside of {ref.name}", job)
        return np.take(every, rows.reshape(-1).numpy(), along)

    # ── instructions

    def start(self, job: Job) -> None:
        """Read, compute, and say what is held; the value is written when the job ends."""
        match job.action:
            case t.Product():
                self.product(job, job.action)
            case t.Expression(target, tree):
                self.expression(job, target, tree)
            case t.Copy(target, source):
                self.move(job, self.read(job, source), *self.write(job, target))
            case t.FromHost(target, place):
                self.outside(job, self.m.host, self.read(job, place, "input"), *self.write(job, target))
            case t.ToHost(value, place):
                self.outside(job, self.m.host, self.read(job, value), *self.write(job, place, "output"))
            case t.Load(target, place):
                value = self.read(job, place, f"dram {job.core.chip}")
                self.outside(job, self.m.dram, value, *self.write(job, target))
                job.begin += self.m.dram.latency if self.m.dram else 0
            case t.Store(value, place):
                self.outside(job, self.m.dram, self.read(job, value), *self.write(job, place, f"dram {job.core.chip}"))
            case t.Hosted():
                self.call(job, job.action)
            case t.Send():
                self.send(job, job.action)
            case t.Recv():
                self.recv(job, job.action)
        self.names(job)
        if not isinstance(job.action, t.Send | t.Recv) and job.of.duration != max(1, job.cycles, self.traffic(job)):
            self.refuse("duration", job.core, f"expected {max(1, job.cycles, self.traffic(job))} cycles", job)

    def move(self, job: Job, value: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
        if value.dtype != values.dtype_of(dtype):
            self.refuse("type", job.core, f"{value.dtype} is no {dtype}", job)
        if value.numel() != math.prod(shape):
            self.refuse("shape", job.core, f"{value.numel()} elements are not {math.prod(shape)}", job)
        job.value = value

    def outside(self, job: Job, port: Any, value: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
        self.move(job, value, dtype, shape)
        job.cycles = math.ceil(Fraction(value.numel() * t.SIZES[dtype], port.width)) if port else 0

    def call(self, job: Job, a: t.Hosted) -> None:
        if self.m.host is None or self.m.host.latency is None or self.m.host.rate is None:
            self.refuse("unit", job.core, "this host computes nothing", job)
        given = {name: self.read(job, t.Ref(name), "host") for name in operands(a)}
        try:
            got = computed(a, given)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self.refuse("type", job.core, f"{a.op}: {error}", job)
        if len(got) != len(a.results):
            self.refuse("shape", job.core, f"{a.op} gives {len(got)} results", job)
        wanted = [(name, value) for name, value in zip(a.results, got, strict=True) if name != "_"]
        if not wanted or len({name for name, _ in wanted}) != len(wanted) or any(name in given for name, _ in wanted):
            self.refuse("race", job.core, "a result has no tensor of its own", job)
        for name, value in wanted:
            dtype, shape = self.write(job, t.Ref(name), "host")
            if value.dtype != values.dtype_of(dtype) or tuple(value.shape) != shape:
                self.refuse("type", job.core, f"{name} is {value.dtype}{list(value.shape)}", job)
        job.value, *job.more = [value for _, value in wanted]
        size = sum(map(self.bytes_of, (*given.values(), job.value, *job.more)))
        job.cycles = self.m.host.latency + math.ceil(Fraction(size, self.m.host.rate))

    def product(self, job: Job, a: t.Product) -> None:
        dtype, shape = self.write(job, a.target)
        x, w = self.read(job, a.x), self.read(job, a.w)
        if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or shape != (x.shape[0], w.shape[1]):
            self.refuse("shape", job.core, f"{x.shape} · {w.shape} is not {shape}", job)
        kind = str(x.dtype).removeprefix("torch.")
        sums = {"int8": "int32", "uint8": "int32", "float64": "float64"}.get(kind, "float32")
        if (
            x.dtype != w.dtype
            or kind not in self.m.matrix.passes
            or dtype != sums
            or kind in ("int16", "int32", "int64")
        ):
            self.refuse("type", job.core, f"{x.dtype} · {w.dtype} is no {dtype}", job)
        rows, columns = self.m.matrix.rows, self.m.matrix.columns
        across, along = math.ceil(w.shape[1] / columns), x.shape[0]
        again = {
            "weight": (across - 1, 0),
            "input": (0, math.ceil(along / columns) - 1),
            "output": (across - 1, math.ceil(along / rows) - 1),
        }[self.m.matrix.stationary]  # how often more x and w are read
        job.read += sum(more * of.numel() * of.element_size() for more, of in zip(again, (x, w), strict=True))
        old = self.read(job, a.target, over=True) if a.add else None
        job.value, cycles = product(self.m, x, w, old, values.dtype_of(sums))
        job.cycles = math.ceil(Fraction(self.m.matrix.passes[kind]) * cycles)

    def expression(self, job: Job, target: t.Ref, tree: t.Tree) -> None:
        dtype, shape = self.write(job, target)
        tiles: dict[t.Ref, torch.Tensor] = {}
        names: list[str] = []
        floats = False

        def look(of: t.Tree) -> None:
            nonlocal floats
            if isinstance(of, t.Ref):
                if of not in tiles:
                    tiles[of] = self.read(job, of, over=True)
                floats |= tiles[of].is_floating_point()
            elif isinstance(of, t.Call):
                names.append(of.function)
                floats |= of.function not in t.WHOLE
                for operand in of.operands:
                    look(operand)
            else:
                floats |= isinstance(of, float)

        look(tree)
        kinds = {tile.dtype for tile in tiles.values()}
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        kind = wide if floats else torch.int64 if torch.int64 in kinds else torch.int32

        def value(of: t.Tree) -> torch.Tensor:
            if isinstance(of, t.Ref):
                return tiles[of].to(kind)
            if not isinstance(of, t.Call):
                return torch.tensor(of, dtype=kind)
            operands = [value(operand) for operand in of.operands]
            if of.function in t.REDUCTIONS and operands[0].ndim == 0:
                self.refuse("shape", job.core, f"nothing to take the {of.function} of", job)
            if of.function == "sum":
                lanes: list[Any] = [None] * min(self.m.vector.lanes, operands[0].shape[-1])
                for i, column in enumerate(operands[0].unbind(-1)):
                    lane = i % len(lanes)
                    lanes[lane] = column if lanes[lane] is None else lanes[lane] + column
                total = lanes[0]
                for lane in lanes[1:]:
                    total = total + lane
                return total.unsqueeze(-1)
            return values.FUNCTIONS[of.function](*operands).to(kind)

        try:
            job.value = values.written(value(tree), dtype).broadcast_to(shape)
        except RuntimeError as error:
            if isinstance(error, Violation):
                raise
            self.refuse("shape", job.core, "shapes do not broadcast", job)
        largest = max([math.prod(shape), *(tile.numel() for tile in tiles.values())])
        each = sum(Fraction(self.m.vector.cycles_of(name)) for name in names or ["move"])
        job.cycles = math.ceil(math.ceil(Fraction(largest, self.m.vector.lanes)) * each)

    # ── what travels

    def send(self, job: Job, a: t.Send) -> None:
        job.value = self.read(job, a.value)
        if (
            not a.targets
            or [route[-1] for route in job.of.routes] != list(a.targets)
            or len(set(a.targets)) < len(a.targets)
        ):
            self.refuse("route", job.core, "expected a route for every target", job)
        flow: dict[str, Any] = {"jobs": [job], "value": job.value, "got": {}, "at": {}, "need": 1}
        before: dict[Core, Core] = {}
        held: dict[tuple[Core, Core], tuple[int, int]] = {}
        for route in job.of.routes:
            at, window = job.of.start, 0
            if route[0] != job.core or len(route) < 2:
                self.refuse("route", job.core, "expected routes that begin here and lead away", job)
            for a_core, b_core in zip(route, route[1:], strict=False):
                edge = self.m.edge(a_core, b_core)
                if edge is None or b_core == job.core or before.setdefault(b_core, a_core) != a_core:
                    self.refuse("route", job.core, f"no link, or no tree, from {a_core} to {b_core}", job)
                held[a_core, b_core] = at, at + job.of.duration + window
                at, window = at + edge.latency, window + edge.jitter
                flow["need"] = max(flow["need"], math.ceil(Fraction(self.bytes_of(job.value), edge.width)))
                flow["at"][route[-1]] = at + window, edge.arrives
        leaves = dict.fromkeys(self.m.neighbours(job.core)[route[1]].unit for route in job.of.routes)
        if tuple(leaves) != job.of.units:
            self.refuse("unit", job.core, f"expected {'+'.join(leaves)}", job)
        job.tokens += [(begin, end, ("link", *link)) for link, (begin, end) in held.items()]
        flow["need"] = max(flow["need"], self.traffic(job))
        self.flows.append(flow)

    @staticmethod
    def bytes_of(value: torch.Tensor) -> int:
        return value.numel() * value.element_size()

    def recv(self, job: Job, a: t.Recv) -> None:
        dtype, shape = self.write(job, a.target)
        for flow in self.flows:
            sent = flow["jobs"][0]
            now = flow["at"].get(job.core) == (self.cycle, "+".join(job.of.units))
            if now and sent.core == a.source and job.core not in flow["got"]:
                break
        else:
            self.refuse("arrival", job.core, f"nothing arrives now from {a.source}", job)
        flow["got"][job.core] = job
        flow["jobs"].append(job)
        self.move(job, flow["value"], dtype, shape)
        if a.add:
            if not self.m.link.reduce:
                self.refuse("type", job.core, "links do not add", job)
            job.value = self.read(job, a.target, over=True) + flow["value"].reshape(shape)
        flow["need"] = max(flow["need"], self.traffic(job))

    # ── units and ports

    def traffic(self, job: Job) -> int:
        counts = [sum(port[5] == kind for port in job.of.ports) for kind in "rw"]
        pairs = zip((job.read, job.wrote), counts, strict=True)
        return max(math.ceil(Fraction(size, max(1, count) * self.m.sram.width)) for size, count in pairs)

    def names(self, job: Job) -> None:
        """The unit, the ports and the banks that a job holds."""
        wanted = UNITS.get(type(job.action))
        for unit in job.of.units:
            if unit not in self.m.units(job.core) or (wanted and unit.rstrip("0123456789") != wanted):
                self.refuse("unit", job.core, f"{unit} is no unit for this", job)
            way = {t.Send: "out", t.Recv: "in"}.get(type(job.action), "")
            job.tokens.append((job.of.start, job.of.start + job.of.duration, ("unit", job.core, unit, way)))
        if (wanted and len(job.of.units) != 1) or (job.of.routes and not isinstance(job.action, t.Send)):
            self.refuse("unit", job.core, "one unit and no route", job)
        for kind, many, size in (("r", self.m.sram.read_ports, job.read), ("w", self.m.sram.write_ports, job.wrote)):
            mine = [port for port in job.of.ports if port[5] == kind]
            if len(set(mine)) != len(mine) or any(int(port[6:]) >= many for port in mine) or bool(size) != bool(mine):
                self.refuse("port", job.core, f"expected ports sram.{kind}0 to {many - 1}, if any is needed", job)
        for port in job.of.ports:
            job.tokens.append((job.begin, job.end, ("port", job.core, port)))
        for way, places in (("read", [read[:3] for read in job.reads]), ("write", job.writes)):
            banks: set[int] = set()
            for key, _, at in places:
                if key == job.core:
                    banks |= set(range(at.min() // self.m.sram.bank_size, at.max() // self.m.sram.bank_size + 1))
            job.tokens += [(job.begin, job.end, ("bank", job.core, way, bank)) for bank in banks]
