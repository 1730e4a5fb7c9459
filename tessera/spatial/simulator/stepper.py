"""The judge of the judge: a listing run cycle by cycle, on bytes at addresses.

In: a small program and its inputs. Out: the outputs and the number of cycles, or a `Violation`. All memory, on cores
and elsewhere, is one row of bytes, and each knows until when it lives, is touched, and may not be read; what else is in
use is a set for every cycle; a product is values that move through an array (`wavefront.py`). Of the simulator it uses
the elementary functions alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tessera.machines.spatial import Core
from tessera.spatial.listing import Program
from tessera.spatial.listing import types as t
from tessera.spatial.listing.host import computed, operands
from tessera.spatial.simulator import values
from tessera.spatial.simulator.violation import KINDS, Step, Violation
from tessera.spatial.simulator.wavefront import product
from tessera.util.safetensors import flat_bytes

LONGEST, NEVER = 20_000, 1 << 40  # cycles
UNITS = {
    t.Product: "matrix", t.Expression: "vector", t.Copy: "copy", t.Load: "dram", t.Store: "dram", t.FromHost: "host",
    t.ToHost: "host", t.Hosted: "call",
}  # fmt: skip
SUMS: dict[str, str] = dict.fromkeys(("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), "float32")
SUMS |= {"int8": "int32", "uint8": "int32", "float64": "float64"}


def step(
    program: Program, *inputs: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None
) -> tuple[tuple[torch.Tensor, ...], int]:
    given = {f"input {name}": x for (name, _), x in zip(program.listing.inputs, inputs, strict=True)}
    return Stepper(program, {**program.data, **(state or {}), **given}).run(), program.listing.end


@dataclass(eq=False)
class Job:
    """An instruction that runs."""

    core: Core
    of: t.Instruction
    least: int = 1  # cycles
    read: int = 0  # bytes, through the core's ports
    wrote: int = 0
    reads: list[tuple[np.ndarray, bool]] = field(default_factory=list)  # bytes, and whether they may be written over
    writes: list[np.ndarray] = field(default_factory=list)
    together: list[Job] = field(default_factory=list)  # what takes the same time: a send and its recvs

    def __str__(self) -> str:
        return str(Step(self.core, self.of))


def up(amount: int, each: int) -> int:
    return math.ceil(Fraction(amount, each))


class Stepper:
    def __init__(self, program: Program, data: Mapping[str, torch.Tensor]) -> None:
        self.m, self.listing, self.data, self.cycle, self.size = program.machine, program.listing, data, 0, 0
        self.places: dict[tuple[Any, str], tuple[t.Buffer, np.ndarray]] = {}  # (core or elsewhere, name): its bytes
        self.events: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self.used: dict[tuple, Job] = {}  # (cycle, thing): by whom
        self.arrivals: dict[tuple, tuple[Job, torch.Tensor]] = {}  # (core, cycle, unit, sender): what was sent
        self.jobs: list[Job] = []
        m, of = self.m, self.listing
        cores = [page.core for page in of.pages]
        self.need(of.sha256 == m.sha256, "machine")
        self.need(len(set(cores)) == len(cores) and all(map(m.network.alive, cores)), "core")
        for page in of.pages:
            for b in page.buffers:
                fits = b.size == b.type.bytes and b.address % m.sram.align == 0 and b.address + b.size <= m.sram.size
                self.need(fits and (b.lifetime is None or b.lifetime[0] < b.lifetime[1]), "buffer", b)
                self.lay((page.core,), b, self.size + b.address)
            self.size += m.sram.size
        outside = [(("input",), name, kind, False, t.Ref(f"input {name}")) for name, kind in of.inputs]
        outside += [(("output",), name, kind, False, None) for name, kind in of.outputs]
        outside += [(("input", "output", "host"), name, kind, False, None) for name, kind in of.hosted]
        outside += [((f"dram {b.chip}",), b.name, b.type, b.state, b.source) for b in of.drams]
        for where, name, kind, state, source in outside:  # what the host computes with is sent and received there
            self.lay(where, t.Buffer(name, kind, 0, kind.bytes, (0, NEVER), state, source), self.size)
            self.size += kind.bytes
        for chip in {b.chip for b in of.drams}:
            full = sum(b.type.bytes for b in of.drams if b.chip == chip)
            self.need(m.dram and chip < m.chip_count and full <= m.dram.size, "buffer")
        for core, step in ((page.core, step) for page in of.pages for step in page.instructions):
            self.events[step.start].append(functools.partial(self.start, core, step))  # when buffers are born
        self.last = max(of.end, *self.events, 0)
        self.need(self.last <= LONGEST, "machine")
        self.bytes, self.ready = np.zeros(self.size, np.uint8), np.full(self.size, NEVER)
        self.touched, self.dies = np.zeros((2, self.size), int)

    def need(self, right: object, kind: str, *parties: object) -> None:
        if not right:
            core = next((job.core for job in parties if isinstance(job, Job)), None)
            raise Violation(kind, core, self.cycle, KINDS[kind], *map(str, parties))

    def run(self) -> tuple[torch.Tensor, ...]:
        for cycle in range(self.last + 1):
            self.cycle = cycle
            for happens in self.events[cycle]:
                happens()
            for (_, at, *_), (sent, _) in self.arrivals.items():
                self.need(at > cycle, "arrival", sent)
        self.need(not self.arrivals, "arrival", *(sent for sent, _ in self.arrivals.values()))
        ends = [job.of.start + job.of.duration + self.latency(job.of) for job in self.jobs]
        self.need(max(ends, default=0) == self.listing.end, "end")
        for job in self.jobs:
            self.need(job.of.duration == max(of.least for of in job.together), "duration", *job.together)
        for where, name in (("host", self.listing.hosted), ("output", self.listing.outputs)):
            places = [self.places[where, of] for of, _ in name]
            self.need(all((self.ready[at] < NEVER).all() for _, at in places), "output")
        return tuple(self.tensor(of, at) for of, at in places)

    def use(self, job: Job, *thing: object, begin: int | None = None, longer: int = 0) -> None:
        """In every cycle a thing has one user."""
        begin = self.cycle if begin is None else begin
        for cycle in range(begin, begin + job.of.duration + longer):
            user = self.used.setdefault((cycle, *thing), job)
            self.need(user is job, str(thing[0]), user, job)

    def latency(self, of: t.Instruction) -> int:
        return self.m.dram.latency if self.m.dram and isinstance(of.action, t.Load) else 0

    # ── memory

    @staticmethod
    def numbers(shape: tuple[int, ...], size: int) -> np.ndarray:
        """[*shape, size]: bytes of elements, row by row."""
        return np.arange(math.prod(shape) * size).reshape(*shape, size)

    def tensor(self, of: t.Buffer, at: np.ndarray) -> torch.Tensor:
        flat = torch.from_numpy(self.bytes[at.ravel()]).as_strided((at.size,), (1,))  # nothing has any stride
        return flat.view(values.dtype_of(of.type.dtype)).reshape(at.shape[:-1])

    def lay(self, where: tuple[Any, ...], of: t.Buffer, at: int) -> None:
        numbers = self.numbers(of.type.shape, t.SIZES[of.type.dtype]) + at
        for place in where:
            self.need((place, of.name) not in self.places, "buffer", of)
            self.places[place, of.name] = of, numbers
        self.events[of.lifetime[0] if of.lifetime else 0].append(functools.partial(self.bear, where[0], of, numbers))

    def bear(self, where: Any, of: t.Buffer, at: np.ndarray) -> None:
        """From now on a buffer is there, and holds what lies beside the listing, or zeros, or nothing yet."""
        self.need((self.dies[at] <= self.cycle).all(), "overlap", where, of)
        self.dies[at] = of.lifetime[1] if of.lifetime else NEVER
        self.bytes[at], self.ready[at] = 0, 0 if of.source or of.state else NEVER
        if of.source is not None and at.size:
            whole = self.data.get(of.source.name)
            self.need(whole is not None and str(whole.dtype) == f"torch.{of.type.dtype}", "data", of)
            assert whole is not None
            part = self.part(of.source, self.numbers(tuple(whole.shape), whole.element_size()), "data", of)
            self.need(part.shape == at.shape, "data", of)
            self.bytes[at] = flat_bytes(whole).numpy()[part]

    def part(self, ref: t.Ref, numbers: np.ndarray, kind: str, *parties: object) -> np.ndarray:
        """The numbers of what a reference names; a tile of indices names all rows."""
        self.need(len(ref.index) < numbers.ndim, kind, *parties)
        index: list[slice | int] = []
        for of, size in zip(ref.index, numbers.shape, strict=False):
            span = of if isinstance(of, t.Span) else t.Span(of, of + 1) if isinstance(of, int) else t.Span(0, size)
            self.need(0 <= span.start < span.stop <= size, kind, *parties)
            index.append(of if isinstance(of, int) else slice(span.start, span.stop, span.step))
        out = numbers[tuple(index)]
        self.need(out.size and (out.ndim > 2 or not ref.transposed), kind, *parties)
        return np.swapaxes(out, -2, -3) if ref.transposed else out

    def place(self, job: Job, ref: t.Ref, where: str, way: str) -> tuple[t.Buffer, np.ndarray, np.ndarray]:
        """A buffer, the bytes of it that a job touches from now on, and of these the ones that data chooses."""
        self.need((where or job.core, ref.name) in self.places, "bounds", job)
        of, numbers = self.places[where or job.core, ref.name]
        every = chosen = self.part(ref, numbers, "bounds", job)
        life, names = of.lifetime or (0, NEVER), [name for name in ref.index if isinstance(name, str)]
        self.need(life[0] <= self.cycle and self.cycle + job.of.duration <= life[1], "lifetime", job, of)
        self.need(not (ref.transposed and (names or where or way == "write")), "shape", job)
        self.need(len(names) <= (isinstance(job.of.action, t.Copy) and not where), "shape", job)
        for name in names:
            rows = self.read(job, t.Ref(name))
            along = sum(not isinstance(before, int) for before in ref.index[: ref.index.index(name)])
            self.need(rows.dtype in (torch.int32, torch.int64), "type", job)
            self.need(rows.min() >= 0 and rows.max() < every.shape[along], "index", job)
            chosen = np.take(every, rows.reshape(-1).numpy(), along)
        banks = () if where else range(every.min() // self.m.sram.bank_size, every.max() // self.m.sram.bank_size + 1)
        for bank in banks:  # memories lie one behind the other: no two have one of the same number
            self.use(job, "bank", way, bank)
        return of, every, chosen

    def read(self, job: Job, ref: t.Ref, where: str = "", over: bool = False) -> torch.Tensor:
        of, every, chosen = self.place(job, ref, where, "read")
        ready = self.ready[every].max()
        self.need(ready <= self.cycle, "unwritten" if ready == NEVER else "race", job, of)
        job.reads.append((every, over))
        job.read += 0 if where else chosen.size
        return self.tensor(of, chosen)

    def write(self, job: Job, ref: t.Ref, value: torch.Tensor, where: str = "", exact: bool = False) -> None:
        """Nobody can read it before the job ends, so that it may as well be there at once."""
        of, every, chosen = self.place(job, ref, where, "write")
        self.need(value.dtype == values.dtype_of(of.type.dtype), "type", job)
        self.need(value.shape == chosen.shape[:-1] if exact else value.nbytes == chosen.size, "shape", job)
        self.need(of.lifetime or of.state, "constant", job)
        self.need((self.touched[every] <= self.cycle).all(), "race", job)
        end = self.cycle + job.of.duration
        self.bytes[chosen.ravel()] = flat_bytes(value).numpy()
        self.ready[every] = np.where(self.ready[every] < NEVER, end, NEVER)
        self.ready[chosen] = self.touched[every] = end
        job.writes.append(every.ravel())
        job.wrote += 0 if where else chosen.size

    def touch(self, job: Job) -> None:
        """What a job has read is touched until it ends; it writes over this only in the very same place."""
        for at, over in job.reads:
            same = over and any(np.array_equal(at.ravel(), written) for written in job.writes)
            self.need(same or (self.ready[at] <= self.cycle).all(), "race", job)
            self.touched[at] = np.maximum(self.touched[at], self.cycle + job.of.duration)

    # ── instructions

    def start(self, core: Core, of: t.Instruction) -> None:
        """Read, compute, write, and use what the instruction names."""
        self.jobs.append(job := Job(core, of))
        job.together.append(job)
        self.need(self.cycle + of.duration + self.latency(of) <= self.listing.end, "end", job)
        if wanted := UNITS.get(type(of.action)):
            known = len(of.units) == 1 and of.units[0] in self.m.units(core) and not of.routes
            self.need(known and of.units[0].rstrip("0123456789") == wanted, "unit", job)
        for unit in of.units:
            self.use(job, "unit", core, unit, isinstance(of.action, t.Recv))
        match of.action:
            case t.Product():
                self.product(job, of.action)
            case t.Expression(target, tree):
                self.expression(job, target, tree)
            case t.Copy(target, source):
                self.write(job, target, self.read(job, source))
            case t.FromHost(target, place):
                self.write(job, target, self.read(job, place, "input"))
            case t.ToHost(value, place):
                self.write(job, place, self.read(job, value), "output")
            case t.Store(value, place):
                self.write(job, place, self.read(job, value), f"dram {core.chip}")
            case t.Load(target, place):
                arrive = functools.partial(self.load, job, target, self.read(job, place, f"dram {core.chip}"))
                self.events[self.cycle + self.latency(of)].append(arrive)
            case t.Hosted():
                self.call(job, of.action)
            case t.Send():
                self.send(job, self.read(job, of.action.value), of.action.targets)
            case t.Recv():
                self.recv(job, of.action)
        self.touch(job)
        if not isinstance(of.action, t.Load):
            self.ports(job)

    def ports(self, job: Job) -> None:
        for kind, many, size in (("r", self.m.sram.read_ports, job.read), ("w", self.m.sram.write_ports, job.wrote)):
            ports = [port for port in job.of.ports if port[5] == kind]
            known = len(set(ports)) == len(ports) and all(int(port[6:]) < many for port in ports)
            self.need(known and bool(ports) == bool(size), "port", job)
            job.least = max(job.least, up(size, max(1, len(ports)) * self.m.sram.width))
            for port in ports:
                self.use(job, "port", job.core, port)
        outside = {"host": self.m.host, "dram": self.m.dram}.get(UNITS.get(type(job.of.action), ""))
        if outside is not None:
            job.least = max(job.least, up(job.read + job.wrote, outside.width))

    def load(self, job: Job, target: t.Ref, value: torch.Tensor) -> None:
        self.write(job, target, value)
        self.ports(job)

    def call(self, job: Job, a: t.Hosted) -> None:
        given = {name: self.read(job, t.Ref(name), "host") for name in operands(a)}
        try:
            got = computed(a, given)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise Violation("type", job.core, self.cycle, str(error), str(job)) from None
        self.need(len(got) == len(a.results), "shape", job)
        for name, value in (wanted := [(name, of) for name, of in zip(a.results, got, strict=True) if name != "_"]):
            self.write(job, t.Ref(name), value, "host", exact=True)
        self.need(wanted, "race", job)
        size, host = sum(of.nbytes for of in (*given.values(), *(of for _, of in wanted))), self.m.host
        assert host is not None and host.latency is not None and host.rate is not None  # or there is no such unit
        job.least = host.latency + up(size, host.rate)

    def product(self, job: Job, a: t.Product) -> None:
        x, w, array = self.read(job, a.x), self.read(job, a.w), self.m.matrix
        kind = str(x.dtype).removeprefix("torch.")
        self.need(x.ndim == w.ndim == 2 and x.shape[1] == w.shape[0], "shape", job)
        self.need(x.dtype == w.dtype and kind in array.passes and kind in SUMS, "type", job)
        old, sums = self.read(job, a.target, over=True) if a.add else None, values.dtype_of(SUMS[kind])
        fits = old is None or (old.dtype, old.shape) == (sums, (x.shape[0], w.shape[1]))
        self.need(fits, "shape", job)
        value, cycles = product(array, x, w, old, sums)
        self.write(job, a.target, value, exact=True)
        job.least = math.ceil(Fraction(array.passes[kind]) * cycles)
        across, along = up(w.shape[1], array.columns), x.shape[0]
        xs, ws = {  # how often x and w are read
            "weight": (across, 1),
            "input": (1, up(along, array.columns)),
            "output": (across, up(along, array.rows)),
        }[array.stationary]
        job.read += (xs - 1) * x.nbytes + (ws - 1) * w.nbytes

    def expression(self, job: Job, target: t.Ref, tree: t.Tree) -> None:
        every = list(t.nodes(tree))
        refs = dict.fromkeys(of for of in every if isinstance(of, t.Ref))
        tiles = {of: self.read(job, of, over=True) for of in refs}
        names = [of.function for of in every if isinstance(of, t.Call)]
        kinds = {tile.dtype for tile in tiles.values()}
        floats = any(kind.is_floating_point for kind in kinds) or any(isinstance(of, float) for of in every)
        floats |= any(name not in t.WHOLE for name in names)
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        kind = wide if floats else torch.int64 if torch.int64 in kinds else torch.int32

        def value(of: t.Tree) -> torch.Tensor:
            if isinstance(of, t.Ref):
                return tiles[of].to(kind)
            if not isinstance(of, t.Call):
                return torch.tensor(of, dtype=kind)
            given = [value(operand) for operand in of.operands]
            self.need(of.function not in t.REDUCTIONS or given[0].ndim, "shape", job)
            if of.function == "sum":  # each lane in order, then the lanes in order
                lanes = [given[0].unbind(-1)[lane :: self.m.vector.lanes] for lane in range(self.m.vector.lanes)]
                partial = [functools.reduce(torch.add, lane) for lane in lanes if lane]
                return functools.reduce(torch.add, partial).unsqueeze(-1)
            return values.FUNCTIONS[of.function](*given).to(kind)

        of, _, at = self.place(job, target, "", "write")
        try:
            result = values.written(value(tree), of.type.dtype).broadcast_to(at.shape[:-1])
        except Violation:
            raise
        except RuntimeError as error:
            raise Violation("shape", job.core, self.cycle, str(error), str(job)) from None
        self.write(job, target, result, exact=True)
        largest = max([result.numel(), *(tile.numel() for tile in tiles.values())])
        each = sum(Fraction(self.m.vector.cycles_of(name)) for name in names or ["move"])
        job.least = math.ceil(up(largest, self.m.vector.lanes) * each)

    def send(self, job: Job, value: torch.Tensor, targets: tuple[Core, ...]) -> None:
        ends = [route[-1] for route in job.of.routes]
        self.need(ends and ends == list(targets) and len(set(ends)) == len(ends), "route", job)
        before: dict[Core, Core | None] = {job.core: None}
        units: dict[str, None] = {}
        for route, last in zip(job.of.routes, ends, strict=True):
            self.need(route[0] == job.core and len(route) > 1, "route", job)
            at, window = self.cycle, 0
            for a, b in itertools.pairwise(route):
                edge = self.m.edge(a, b)
                self.need(edge and before.setdefault(b, a) == a, "route", job)
                assert edge is not None
                self.need(at + window <= self.last, "arrival", job)
                units |= {edge.unit: None} if a == job.core else {}
                self.use(job, "link", a, b, begin=at, longer=window)
                job.least = max(job.least, up(value.nbytes, edge.width))
                at, window = at + edge.latency, window + edge.jitter
                arrives = edge.arrives
            self.arrivals[last, at + window, arrives, job.core] = job, value
        self.need(tuple(units) == job.of.units, "unit", job)

    def recv(self, job: Job, a: t.Recv) -> None:
        key = job.core, self.cycle, "+".join(job.of.units), a.source
        self.need(key in self.arrivals and not job.of.routes, "arrival", job)
        sent, value = self.arrivals.pop(key)
        sent.together.append(job)
        job.together = sent.together
        if a.add:
            old = self.read(job, a.target, over=True)
            fits = old.dtype == value.dtype and old.numel() == value.numel()
            self.need(self.m.link.reduce and fits, "type", job)
            value = old + value.reshape(old.shape)
        self.write(job, a.target, value)
