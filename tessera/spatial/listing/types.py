"""What a listing is made of, as docs/machine.md has it: frozen dataclasses, and a way through expressions.

A `Listing` holds a page for every core; a page holds buffers and instructions; an instruction holds what it does (its
action) and what it names (unit, ports, routes). Everything here can be printed and read again (`text.py`, `parse.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from tessera.machines.spatial import Core
from tessera.machines.spatial.schema import INFIX, REDUCTIONS

SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
# An expression of nothing but these over integers is computed in integers.
_MORE = (
    "neg abs sign relu maximum minimum remainder where gcd bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift"
)
WHOLE = frozenset((*INFIX, *REDUCTIONS, *_MORE.split(" "))) - {"div"}


@dataclass(frozen=True, slots=True)
class TensorType:
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Span:
    """`start:stop:step` of a dimension."""

    start: int
    stop: int
    step: int = 1


# Of a dimension: all of it (None), a part, one element (the dimension goes), or the rows that a tile of indices names.
Index = None | Span | int | str


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer, or a part of one: `x`, `x[0:16, :]`, `x[3]`, `table[rows]`, `x^T`."""

    name: str
    index: tuple[Index, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the vector unit over others, numbers and tiles."""

    function: str
    operands: tuple[Tree, ...]


Tree = Call | Ref | int | float


def nodes(tree: Tree) -> Iterator[Tree]:
    """An expression, and all that it is made of, in the order in which it is written."""
    yield tree
    for operand in tree.operands if isinstance(tree, Call) else ():
        yield from nodes(operand)


@dataclass(frozen=True, slots=True)
class Product:
    """`y = x · w`, or `y += x · w`."""

    target: Ref
    x: Ref
    w: Ref
    add: bool = False


@dataclass(frozen=True, slots=True)
class Expression:
    """`h = gelu(a + b)`."""

    target: Ref
    tree: Tree


@dataclass(frozen=True, slots=True)
class Copy:
    """`b = a^T`, `b = table[rows]`, `b[rows] = a`."""

    target: Ref
    source: Ref


@dataclass(frozen=True, slots=True)
class Send:
    """`send v to 0,1 1,1`."""

    value: Ref
    targets: tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class Recv:
    """`recv v from 0,0`, or `recv v += from 0,0`."""

    target: Ref
    source: Core
    add: bool = False


@dataclass(frozen=True, slots=True)
class FromHost:
    """`recv v from host.x[0:4]`."""

    target: Ref
    place: Ref


@dataclass(frozen=True, slots=True)
class ToHost:
    """`send v to host.y[0:4]`."""

    value: Ref
    place: Ref


@dataclass(frozen=True, slots=True)
class Load:
    """`load v from dram.w[0:4]`."""

    target: Ref
    place: Ref


@dataclass(frozen=True, slots=True)
class Store:
    """`store v to dram.w[0:4]`."""

    value: Ref
    place: Ref


Argument = Ref | int | float | bool | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Hosted:
    """`q r = aten.linalg_qr.default(a, "reduced")`: the host computes, from tensors that it has to others; `_` stands
    for a result that nobody wants. Arguments have their keyword, or none."""

    results: tuple[str, ...]
    op: str
    arguments: tuple[tuple[str, Argument], ...]


Action = Product | Expression | Copy | Send | Recv | FromHost | ToHost | Load | Store | Hosted
Route = tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a core. `lifetime` is None for `always`; `source` is the tensor whose bytes it holds before cycle 0.
    Runs that overlap have it at several places in turn."""

    name: str
    type: TensorType
    address: int
    size: int
    lifetime: tuple[int, int] | None = None
    state: bool = False
    source: Ref | None = None
    turns: int = 1
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Instruction:
    start: int
    units: tuple[str, ...]  # a send to several cores may leave by several
    action: Action
    duration: int
    ports: tuple[str, ...]
    routes: tuple[Route, ...] = ()
    times: int = 1  # `8 × 62`: so many parts of the duration, for the reader
    module: str = ""
    source: str = ""
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CorePage:
    core: Core
    buffers: tuple[Buffer, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    note: str = ""
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Dram:
    """A tensor in a chip's memory off the chip; without a source nothing is in it at cycle 0."""

    name: str
    type: TensorType
    chip: int = 0
    state: bool = False
    source: Ref | None = None
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Listing:
    machine: str
    sha256: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[tuple[str, TensorType], ...]
    pages: tuple[CorePage, ...]
    end: int
    drams: tuple[Dram, ...] = ()
    hosted: tuple[tuple[str, TensorType], ...] = ()  # tensors at the host that are neither input nor output
    every: int | None = None  # cycles after which the next run may begin; None: only when this one has ended
