"""What a judge says when it refuses: one error, with the kind, the core, the cycle and both parties."""

from __future__ import annotations

from typing import NamedTuple

from tessera.machines.spatial import Core
from tessera.spatial.listing.text import action_text, ref_text
from tessera.spatial.listing.types import Buffer, Instruction
from tessera.util.errors import TesseraError

# kind -> what it means
KINDS = {
    "machine": "the program is for another machine",
    "core": "no such core, or a dead one, or two pages of one",
    "buffer": "a buffer of a wrong size, out of line, or past the end of memory",
    "overlap": "two buffers have the same bytes at the same time",
    "unit": "no such unit, the wrong one, or two users of one",
    "port": "no such port, one too many or too few, or two users of one",
    "bank": "two instructions read, or write, one bank",
    "link": "two sends use one link",
    "route": "a route that is none",
    "duration": "an instruction takes another time",
    "type": "operands of the wrong type",
    "shape": "operands of the wrong shape or length",
    "bounds": "a part that lies outside of its buffer, or a name that is nobody's",
    "lifetime": "an access before a buffer's life or after it",
    "unwritten": "a read of bytes that nobody has written",
    "constant": "a write to a buffer that holds a constant",
    "race": "bytes are touched while another instruction writes them",
    "arrival": "something arrives early, late, from nobody or to nobody",
    "index": "an index outside of its table",
    "data": "a tensor that is missing beside the listing, or is another one",
    "output": "an output that is not sent whole",
    "end": "the program ends at another cycle",
}


class Violation(TesseraError, RuntimeError):
    """A listing breaks the rules of docs/machine.md. `parties` are the lines that meet."""

    def __init__(self, kind: str, core: Core | None, cycle: int, why: str, *parties: str) -> None:
        assert kind in KINDS, kind
        self.kind, self.core, self.cycle, self.why, self.parties = kind, core, cycle, why, parties
        where = f" on core {core}" if core is not None else ""
        between = "".join(f"\n  {party}" for party in parties)
        super().__init__(f"{kind}: cycle {cycle}{where}: {why}{between}")


class Step(NamedTuple):
    """An instruction and the core that runs it."""

    core: Core
    of: Instruction

    @property
    def end(self) -> int:
        return self.of.start + self.of.duration

    def __str__(self) -> str:
        line = f"line {self.of.line}: " if self.of.line else ""
        return f"{line}core {self.core}  @{self.of.start} {'+'.join(self.of.units)}  {action_text(self.of.action)}"

    def refuse(self, kind: str, why: str, *others: object, cycle: int | None = None) -> Violation:
        at = self.of.start if cycle is None else cycle
        return Violation(kind, self.core, at, why, str(self), *map(str, others))


def buffer_text(core: Core, buffer: Buffer) -> str:
    alive = "always" if buffer.lifetime is None else f"{buffer.lifetime[0]}..{buffer.lifetime[1]}"
    line = f"line {buffer.line}: " if buffer.line else ""
    source = f" = {ref_text(buffer.source)}" if buffer.source else ""
    return f"{line}core {core}  {buffer.name} {buffer.type} 0x{buffer.address:04x} +{buffer.size} {alive}{source}"
