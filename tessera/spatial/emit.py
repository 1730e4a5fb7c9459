"""The listing of a schedule: a page for each core.

In: a schedule, a layout, the machine. Out: a `Listing`, with every cycle, address, port and route.
"""

from __future__ import annotations

import os

from tessera.ir.equation import Source
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import durations
from tessera.spatial.graph import Number, Tree
from tessera.spatial.listing.types import (
    Action,
    Call,
    Copy,
    CorePage,
    Dram,
    Expression,
    FromHost,
    Index,
    Instruction,
    Listing,
    Load,
    Product,
    Recv,
    Ref,
    Send,
    Span,
    TensorType,
    ToHost,
)
from tessera.spatial.listing.types import Buffer as Line
from tessera.spatial.listing.types import Tree as ListingTree
from tessera.spatial.memory.layout import Buffer
from tessera.spatial.schedule import Schedule
from tessera.spatial.steps import Step
from tessera.spatial.tiles import Box, Held, Loaded, Part, Tiles


def emit(tiles: Tiles, schedule: Schedule, buffers: list[Buffer], machine: SpatialMachine) -> Listing:
    pages: dict[Core, tuple[list[Line], list[Instruction]]] = {}
    for b in buffers:
        pages.setdefault(b.tile.core, ([], []))[0].append(_line(b))
    for step in schedule.steps:
        for core, instruction in _instructions(step, schedule, machine):
            pages.setdefault(core, ([], []))[1].append(instruction)
    listed = []
    for core in sorted(pages):
        lines, instructions = pages[core]
        instructions.sort(key=lambda i: (i.start, i.units))
        lines.sort(key=lambda b: (b.lifetime or (-1, 0), b.address))
        note = _note(lines, instructions, machine, schedule.cycles)
        listed.append(CorePage(core, tuple(lines), tuple(instructions), note))
    return Listing(
        machine.key, machine.sha256,
        tuple((name, TensorType(durations.dtype_name(dtype), shape)) for name, dtype, shape in tiles.inputs),
        tuple((name, TensorType(durations.dtype_name(dtype), shape)) for name, dtype, shape in tiles.outputs),
        tuple(listed), schedule.cycles, _drams(tiles),
        tuple((name, TensorType(durations.dtype_name(dtype), shape)) for name, dtype, shape in tiles.hosted),
        schedule.every,
    )  # fmt: skip


def _drams(tiles: Tiles) -> tuple[Dram, ...]:
    """The tensors that lie in off-chip memory, on each chip that loads them."""
    found: dict[str, Dram] = {}
    for tile in tiles.tiles:
        if isinstance(tile, Loaded) and tile.dram not in found:
            data = tiles.tensors[tile.tensor]
            kind = TensorType(durations.dtype_name(data.dtype), tuple(data.shape))
            found[tile.dram] = Dram(tile.dram, kind, tile.core.chip, False, Ref(tile.tensor))
    return tuple(found.values())


def _line(b: Buffer) -> Line:
    tile = b.tile
    kind = TensorType(durations.dtype_name(tile.dtype), (tile.rows, tile.columns))
    if isinstance(tile, Held):
        return Line(tile.name, kind, b.address, tile.nbytes, None, tile.state,
                    Ref(tile.tensor, _spans(tile.box)) if tile.tensor else None)  # fmt: skip
    return Line(tile.name, kind, b.address, tile.nbytes, (b.start, b.end), turns=b.turns)


def _spans(box: Box) -> tuple[Index, ...]:
    return Span(box[0], box[1]), Span(box[2], box[3])


def ref(part: Part) -> Ref:
    return Ref(part.tile.buffer.name, () if part.is_whole else _spans(part.box), part.turned)


def _host(step: Step) -> Ref:
    assert step.host is not None
    name, place = step.host
    return Ref(name, tuple(Span(*p) if isinstance(p, tuple) else p for p in place))


def _instructions(step: Step, schedule: Schedule, machine: SpatialMachine) -> list[tuple[Core, Instruction]]:
    start = schedule.starts[step]
    where, module = _place(step.source), step.source.module
    held = {use.resource: schedule.lanes[step, use] for use in step.uses}
    ports = _ports(held, step.core, "write" if step.kind != "send" else "")
    if step.kind == "send":
        targets = tuple(part.tile.core for part, _, _ in step.arrivals)
        routes = tuple(route for _, route, _ in step.arrivals)
        units = tuple(dict.fromkeys(machine.neighbours(route[0])[route[1]].unit for route in routes))
        action: Action = Send(ref(step.reads[0]), targets)
        sent = Instruction(start, units, action, step.duration, ports, routes, 1, module, where)
        return [(step.core, sent), *(_arrival(step, a, held, start, machine, module, where) for a in step.arrivals)]
    unit = _unit(step, held, machine)
    times = 1
    if step.kind == "product":
        (m, k), n = step.reads[0].shape, step.reads[1].shape[1]
        count, _ = durations.folds(machine, m, k, n)
        whole = durations.product(machine, m, k, n, step.reads[0].tile.dtype) == step.duration
        times = count if whole and machine.matrix.loading == "serial" and step.duration % count == 0 else 1
    return [(step.core, Instruction(start, (unit,), _action(step), step.duration, ports, (), times, module, where))]


def _arrival(
    step: Step, arrival: tuple, held: dict, start: int, machine: SpatialMachine, module: str, where: str
) -> tuple[Core, Instruction]:
    part, route, delay = arrival
    core = part.tile.core
    unit = machine.neighbours(route[-2])[core].arrives
    ports = tuple(f"sram.w{i}" for i in held[("write", core)])
    return core, Instruction(
        start + delay, (unit,), Recv(ref(part), step.core), step.duration, ports, (), 1, module, where
    )


def _ports(held: dict[tuple, list[int]], core: Core, writes: str) -> tuple[str, ...]:
    reads = [f"sram.r{i}" for i in held.get(("read", core), ())]
    return (*reads, *(f"sram.w{i}" for i in held.get((writes, core), ())))


def _unit(step: Step, held: dict[tuple, list[int]], machine: SpatialMachine) -> str:
    name = next(r[2] for r in held if r[0] == "unit")
    lane = held[("unit", step.core, name)][0]
    if name == "copy" or (name == "matrix" and machine.matrix.count > 1):
        return f"{name}{lane}"
    return name


def _action(step: Step) -> Action:
    match step.kind:
        case "product":
            assert step.target is not None
            return Product(ref(step.target), ref(step.reads[0]), ref(step.reads[1]), step.add)
        case "expression":
            assert step.target is not None and step.tree is not None
            return Expression(ref(step.target), tree(step.tree, [ref(p) for p in step.reads]))
        case "copy":
            assert step.target is not None
            return Copy(ref(step.target), ref(step.reads[0]))
        case "gather":
            assert step.target is not None
            return Copy(ref(step.target), Ref(step.reads[0].tile.buffer.name, (step.reads[1].tile.buffer.name,)))
        case "scatter":
            assert step.target is not None
            return Copy(Ref(step.target.tile.buffer.name, (step.reads[0].tile.buffer.name,)), ref(step.reads[1]))
        case "from_host":
            assert step.target is not None
            return FromHost(ref(step.target), _host(step))
        case "load":
            assert step.target is not None and isinstance(step.target.tile, Loaded)
            return Load(ref(step.target), Ref(step.target.tile.dram, _spans(step.target.tile.box)))
        case "call":
            assert step.host_call is not None
            return step.host_call
        case "to_host":
            return ToHost(ref(step.reads[0]), _host(step))
    raise AssertionError(step.kind)


def tree(of: Tree, operands: list[Ref]) -> ListingTree:
    if isinstance(of, int):
        return operands[of]
    if isinstance(of, Number):
        return int(of.value) if isinstance(of.value, bool) else of.value
    return Call(of.fn, tuple(tree(a, operands) for a in of.args))


def _place(source: Source) -> str:
    return f"{os.path.basename(source.file)}:{source.line}" if source.file else ""


def _note(lines: list[Line], instructions: list[Instruction], machine: SpatialMachine, cycles: int) -> str:
    """For people: how full memory is, and how busy the units are."""
    top = max((b.address + b.turns * b.size for b in lines), default=0)
    busy = {}
    for i in instructions:
        for unit in i.units:
            kind = unit.rstrip("0123456789")
            if kind in ("matrix", "vector"):
                busy[kind] = busy.get(kind, 0) + i.duration
    shares = " · ".join(f"{kind} {100 * n / max(cycles, 1):.0f} %" for kind, n in sorted(busy.items()))
    return f"{top:,} of {machine.sram.size:,} B" + (f" · {shares}" if shares else "")
