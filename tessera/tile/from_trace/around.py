"""What stands between a region and its kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.ir.equation import Equation, Value
from tessera.ir.trace import Trace


@dataclass(frozen=True)
class Around:
    """What stands around a kernel: all that a call of it needs to know."""

    inputs: tuple[Value, ...]  # of the region, in the order of the kernel's buffers
    stored: tuple[Value, ...]  # what the kernel writes, in the order of the buffers after those
    symbols: tuple[str, ...]
    tail: tuple[Equation, ...]  # views that give the region's outputs from what is stored or came in

    @property
    def buffers(self) -> tuple[Value, ...]:
        return (*self.inputs, *self.stored)


def write_around(body: Trace, around: Around) -> dict[str, list]:
    """As data, for a body of the same form: values and equations by their numbers."""
    number = {v: i for i, v in enumerate(body.values())}
    place = {eqn: i for i, eqn in enumerate(body.equations)}
    return {
        "inputs": [number[v] for v in around.inputs],
        "stored": [number[v] for v in around.stored],
        "symbols": list(around.symbols),
        "tail": [place[eqn] for eqn in around.tail],
    }


def read_around(body: Trace, data: dict) -> Around:
    values = list(body.values())
    return Around(
        tuple(values[i] for i in data["inputs"]),
        tuple(values[i] for i in data["stored"]),
        tuple(data["symbols"]),
        tuple(body.equations[i] for i in data["tail"]),
    )
