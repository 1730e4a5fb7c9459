"""Data through a listing, event by event.

In: works in order of time, and tensors. Out: the outputs and the state. An instruction reads when it begins and its
results are there when it ends; nothing happens in between, because the checks before have shown that nobody looks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import torch

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.types import (
    Buffer,
    Copy,
    Dram,
    Expression,
    FromHost,
    Hosted,
    Listing,
    Load,
    Product,
    Recv,
    Ref,
    Send,
    Store,
    TensorType,
    ToHost,
)
from tessera.spatial.simulator import values
from tessera.spatial.simulator.flows import Flow
from tessera.spatial.simulator.operands import Bad, Tile, tile
from tessera.spatial.simulator.violation import Step, Violation, buffer_text
from tessera.spatial.simulator.work import Work, called, check_results, computed_in
from tessera.util.errors import InputError


class Stored:
    """A tensor in some memory, and which of its elements have been written."""

    def __init__(self, of: TensorType, known: torch.Tensor | None = None) -> None:
        self.written = torch.full(of.shape, known is not None)
        if known is None:
            known = torch.zeros(of.shape, dtype=values.dtype_of(of.dtype))
        self.data = known.clone(memory_format=torch.contiguous_format)

    def read(self, at: Tile, indices: torch.Tensor | None) -> torch.Tensor | None:
        """A copy of the elements, or None where some were never written."""
        if not bool(at.view(self.written).all()):
            return None
        view = values.raw(at.view(self.data))
        chosen = view if indices is None else view.index_select(at.along, indices)
        turned = chosen.transpose(-1, -2) if at.ref.transposed else chosen
        return turned.clone(memory_format=torch.contiguous_format).view(self.data.dtype)

    def write(self, at: Tile, value: torch.Tensor, indices: torch.Tensor | None) -> None:
        view, mask = values.raw(at.view(self.data)), at.view(self.written)
        shaped = values.raw(value).reshape(at.shape)
        if indices is None:
            view.copy_(shaped)
            mask.fill_(True)
            return
        last = {int(row): place for place, row in enumerate(indices)}  # of equal indices the last one stays
        rows, places = torch.tensor(list(last)), torch.tensor(list(last.values()))
        view.index_copy_(at.along, rows, shaped.index_select(at.along, places))
        mask.index_fill_(at.along, rows, True)


def check_input(name: str, of: TensorType, given: torch.Tensor) -> None:
    got = f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"
    if got != f"{of.dtype}{list(of.shape)}":
        raise InputError(f"simulate: expected {name} to be {of}, got {got}")


def check_state(listing: Listing, given: Mapping[str, torch.Tensor]) -> None:
    """What an earlier run left has the names and types that this program keeps."""
    every = [(page.core, of) for page in listing.pages for of in page.buffers]
    every += [(None, of) for of in listing.drams]
    kept = {(of.source.name if of.source else state_name(core, of)): of for core, of in every if of.state}
    for name, value in given.items():
        if name not in kept:
            names = ", ".join(sorted(kept)[:8]) or "nothing"
            raise InputError(f"simulate: this program keeps no {str(name)[:100]!r} between runs; it keeps {names}")
        if not isinstance(value, torch.Tensor):
            raise InputError(f"simulate: expected the state {name} to be a tensor, got {type(value).__name__}")
        if kept[name].source is None:
            check_input(f"the state {name}", kept[name].type, value)


class Run:
    def __init__(
        self,
        machine: SpatialMachine,
        listing: Listing,
        data: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        self.machine, self.listing = machine, listing
        self.sources = {**data, **state}
        self.buffers = {(page.core, of.name): of for page in listing.pages for of in page.buffers}
        self.memory = {key: Stored(of.type, self.held(key[0], of)) for key, of in self.buffers.items()}
        self.drams = {of.name: Stored(of.type, self.held(None, of)) for of in listing.drams}
        hosted = {name: Stored(of) for name, of in listing.hosted}
        self.outputs = {name: Stored(of) for name, of in listing.outputs}
        self.sent = self.outputs | hosted  # what the host gets, and what it has to give
        self.inputs = {name: Stored(of, inputs[name]) for name, of in listing.inputs} | hosted
        self.travelling: dict[int, torch.Tensor] = {}
        self.pending: list[
            tuple[int, int, Callable[[], None]]
        ] = []  # what is written, by the cycle at which it is there

    def held(self, core: Core | None, of: Buffer | Dram) -> torch.Tensor | None:
        """What a buffer holds before cycle 0."""
        if of.source is None:
            name = state_name(core, of)
            known = self.sources.get(name, torch.zeros(of.type.shape, dtype=values.dtype_of(of.type.dtype)))
            return known if of.state else None
        where = buffer_text(core, of) if core is not None and isinstance(of, Buffer) else f"dram {of.name} {of.type}"
        if (whole := self.sources.get(of.source.name)) is None:
            raise Violation("data", core, 0, f"expected a tensor {of.source.name!r} beside the listing", where)
        part = source_view(of, whole)
        dtype = str(whole.dtype).removeprefix("torch.")
        if part is None or tuple(part.shape) != of.type.shape or dtype != of.type.dtype:
            got = f"{dtype}{list(whole.shape)}"
            raise Violation("data", core, 0, f"expected {of.type} in {of.source.name!r}; it is {got}", where)
        return part

    def run(self, works: list[Work], flows: Mapping[int, Flow]) -> None:
        # By the cycle; what a send hands over is there before who receives it, since every link takes time.
        for number, work in enumerate(sorted(works, key=lambda work: work.step.of.start)):
            self.advance(work.step.of.start)
            self.execute(number, work, flows)
        self.advance(None)

    def advance(self, cycle: int | None) -> None:
        """Everything that is written by this cycle is there."""
        while self.pending and (cycle is None or self.pending[0][0] <= cycle):
            heapq.heappop(self.pending)[2]()

    def execute(self, number: int, work: Work, flows: Mapping[int, Flow]) -> None:
        step = work.step
        match step.of.action:
            case Send():
                self.travelling[id(flows[id(work)])] = self.read(step, work.reads[0])
                return
            case ToHost() | Store():
                assert work.place is not None
                stored = (self.sent if isinstance(step.of.action, ToHost) else self.drams)[work.place.ref.name]
                self.later(number, step.end, stored, work.place, self.read(step, work.reads[0]), None)
                return
            case Hosted() as action:
                heapq.heappush(self.pending, (step.end, number, self.call(work, action)))
                return
        target = work.writes[0]
        stored = self.memory[step.core, target.ref.name]
        indices = self.indices(step, target)
        self.later(number, work.end, stored, target, self.value(work, flows), indices)

    def call(self, work: Work, action: Hosted) -> Callable[[], None]:
        """Run an operator at the host, as PyTorch does; what is returned writes its results."""
        given: dict[str, torch.Tensor] = {}
        for of in work.taken:
            given[of.ref.name] = self.outside(
                work.step, self.sent, of, "to be sent to the host before it is computed on"
            )
        try:
            got = called(action, given)
            check_results(action, work.given, got)
        except Bad as error:
            raise work.step.refuse(error.kind, error.why) from None
        wanted = [value for name, value in zip(action.results, got, strict=True) if name != "_"]

        def write() -> None:
            for of, value in zip(work.given, wanted, strict=True):
                self.sent[of.ref.name].write(of, value, None)

        return write

    def outside(self, step: Step, stored: Mapping[str, Stored], at: Tile, expected: str) -> torch.Tensor:
        if (value := stored[at.ref.name].read(at, None)) is None:
            raise step.refuse("unwritten", f"expected {at.ref.name} {expected}")
        return value

    def later(self, number: int, end: int, stored: Stored, at: Tile, value: torch.Tensor, indices) -> None:
        heapq.heappush(self.pending, (end, number, lambda: stored.write(at, value, indices)))

    def value(self, work: Work, flows: Mapping[int, Flow]) -> torch.Tensor:
        step, target = work.step, work.writes[0]
        match step.of.action:
            case Product(_, _, _, add):
                x, w = work.reads[0], work.reads[1]
                old = self.read(step, work.reads[2]) if add else None
                return values.product(self.machine, self.read(step, x), self.read(step, w), old, target.dtype)
            case Expression(_, tree):
                tiles = {of.ref: self.read(step, of) for of in work.reads}
                computed = computed_in(tree, [of.dtype for of in work.reads])
                value = values.expression(tree, tiles, computed, self.machine.vector.lanes)
                return values.written(value, target.dtype).broadcast_to(target.shape)
            case Copy():
                return self.read(step, work.reads[0])
            case Recv(_, _, add):
                arrived = self.travelling[id(flows[id(work)])]
                return self.read(step, work.reads[0]) + arrived.reshape(target.shape) if add else arrived
            case FromHost() | Load():
                assert work.place is not None
                from_host = isinstance(step.of.action, FromHost)
                stored, expected = (self.inputs, "computed") if from_host else (self.drams, "stored")
                return self.outside(step, stored, work.place, f"to be {expected} before it is read")
        raise AssertionError(step.of.action)

    def read(self, step: Step, at: Tile) -> torch.Tensor:
        value = self.memory[step.core, at.ref.name].read(at, self.indices(step, at))
        if value is None:
            buffer = buffer_text(step.core, self.buffers[step.core, at.ref.name])
            raise step.refuse("unwritten", f"expected {at.ref.name} to be written before it is read", buffer)
        return value

    def indices(self, step: Step, at: Tile) -> torch.Tensor | None:
        if at.rows is None:
            return None
        rows = self.read(step, tile(Ref(at.rows), self.buffers[step.core, at.rows].type)).reshape(-1).long()
        size = at.view(self.memory[step.core, at.ref.name].data).shape[at.along]
        if bool(((rows < 0) | (rows >= size)).any()):
            wrong = int(rows[(rows < 0) | (rows >= size)][0])
            raise step.refuse("index", f"expected indices of 0 to {size - 1}; got {wrong}", f"the values of {at.rows}")
        return rows

    def results(self) -> tuple[torch.Tensor, ...]:
        for name, stored in self.outputs.items():
            if not bool(stored.written.all()):
                missing = int((~stored.written).sum())
                why = f"expected all of {name} to be sent to the host; {missing} elements are not"
                raise Violation("output", None, self.listing.end, why, f"output {name}")
        return tuple(stored.data for stored in self.outputs.values())

    def state(self) -> dict[str, torch.Tensor]:
        """What state buffers hold at the end, by the tensor's name; for the next run."""
        kept: dict[str, torch.Tensor] = {}
        every = [(core, self.buffers[core, name], stored) for (core, name), stored in self.memory.items()]
        every += [(None, of, self.drams[of.name]) for of in self.listing.drams]
        for core, of, stored in every:
            if not of.state:
                continue
            if of.source is None:
                kept[state_name(core, of)] = stored.data
                continue
            whole = kept.setdefault(of.source.name, self.sources[of.source.name].clone())
            part = source_view(of, whole)
            assert part is not None
            values.raw(part).copy_(values.raw(stored.data))
        return kept


def state_name(core: Core | None, of: Buffer | Dram) -> str:
    """Of state that names no tensor."""
    return f"{core} {of.name}" if core is not None else f"dram {of.name}"


def source_view(of: Buffer | Dram, whole: torch.Tensor) -> torch.Tensor | None:
    assert of.source is not None
    try:
        at = tile(of.source, TensorType(of.type.dtype, tuple(whole.shape)))
    except Bad:
        return None
    view = at.view(whole)
    return view.transpose(-1, -2) if of.source.transposed else view
