"""What a GPU's multiprocessors hold, in the words that proposals of schedules use.

In: a Machine. Out: numbers of elements, bytes and programs, each a share of the machine's registers, caches or units.
The shares say how a kernel is built, not how fast a machine is: what a thread needs to work, how many rows overlap.
They were measured on an H200; the tests compile kernels for every machine that is described, and they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.machines import Machine
from tessera.util.powers import power_below

WORKING = 28  # registers that a thread needs beside the rows it holds
BUSY = 128  # registers of a thread that carries sums beside a row


@dataclass(frozen=True)
class Limits:
    machine: Machine

    @property
    def units(self) -> int:
        return self.machine.units

    @property
    def programs(self) -> int:
        """Enough to keep every multiprocessor busy."""
        return 4 * self.units

    @property
    def registers(self) -> int:
        """Of one multiprocessor: the elements of f32 that it holds if nothing else is there."""
        return self.machine.size("registers")

    def held(self, warps: int) -> int:
        """Bytes of a row that so many warps hold from one reduction to the next, beside what they need to work."""
        return 4 * (self.registers - WORKING * 32 * warps)

    @property
    def long_row(self) -> int:
        """Elements from which a row that is read once is better read in a loop: many programs have more in flight."""
        return self.registers // 4

    @property
    def longer_row(self) -> int:
        """Elements from which one program with a whole row has a multiprocessor to itself, and nothing overlaps."""
        return self.registers // 2

    @property
    def carried_row(self) -> int:
        """Elements of the longest row whose sums over all rows are carried beside it."""
        return self.registers // 8

    @property
    def step(self) -> int:
        """Bytes of a masked step of a loop: it is loaded ahead into registers, and masks take some too."""
        return 4 * self.registers * 3 // 8

    @property
    def busy_warps(self) -> int:
        """Warps that carry sums, all programs of a multiprocessor together."""
        return self.registers // (32 * BUSY)

    @property
    def cached_row(self) -> int:
        """Bytes of a row that the second-level cache keeps for another loop while all programs loop: a quarter of a
        multiprocessor's share, as a power of two."""
        return power_below(self.machine.size("l2") // (4 * self.units))
