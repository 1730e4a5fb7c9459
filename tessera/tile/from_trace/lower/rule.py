"""How an operator of a trace is lowered: the form of a rule, and the table of them.

A rule answers "what is the result at this index?" by reading the operator's arguments at indices of its own. Views
only change the index; pointwise operators apply functions; reductions combine along the reduced axis. The other
`lower_*` files fill the table, by family.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.tile.from_trace.index import Index, Indices, Ranges
from tessera.tile.from_trace.values import Emit, T
from tessera.torch_internals.operators import OpOverload, op_name, overload_name

POINTWISE, VIEW, SELECT, SOURCE, REDUCE, SCAN = "pointwise", "view", "select", "source", "reduce", "scan"
CONTRACT = "contract"


class Reader(Protocol):
    """What a rule may ask for."""

    emit: Emit
    ranges: Ranges

    def read(self, x: Arg, at: Indices) -> T: ...
    def under(self, condition: T) -> Reader: ...
    def along(self, source: Value, dims: list[int], at: Indices) -> tuple[Reader, Indices]: ...
    def combine(self, kind: str, x: T, source: Value, dims: list[int]) -> T: ...
    def running(self, kind: str, x: T, source: Value, dim: int) -> T: ...
    def depth(self, out: Value, at: Indices, size: Index) -> Index: ...
    def contract(self, lhs: T, rhs: T) -> T: ...


@dataclass(frozen=True)
class Call:
    """One equation with its arguments bound to the schema, and the number of the result that is asked for."""

    eqn: Equation
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    number: int = 0

    @staticmethod
    def of(eqn: Equation, number: int = 0) -> Call:
        positional, keyword = eqn.bound()
        return Call(eqn, tuple(positional), keyword, number)

    @property
    def out(self) -> Value:
        value = self.eqn.outputs[self.number]
        assert value is not None
        return value

    @property
    def first(self) -> Value:
        assert isinstance(self.args[0], Value)
        return self.args[0]


Move = Callable[[Ranges, Call, Indices], Indices]


@dataclass(frozen=True)
class Rule:
    kind: str
    lower: Callable[[Reader, Call, Indices], T]
    pull: Move | None = None  # of a view: its argument's index from its own
    push: Move | None = None  # and back, where it shows every element once
    dims: Callable[[Call], list[int]] | None = None  # of a reduction or scan: the dimensions of its first argument
    depth: Callable[[Call], Index] | None = None  # of a matrix product: the size of the dimension it sums over
    sides: Callable[[Call], tuple[Value, Value]] | None = None  # and its operands
    flipped: bool = False  # the second of which is (n, k), as the weight of a linear layer
    refuses: Callable[[Call], str] | None = None  # why a call of this operator has no lowering
    over_rows: bool = False  # of a reduction: a plain sum, which a kernel that reduces rows can take over them too
    expensive: bool = False  # not to be computed twice
    raises: Callable[[Call], str] | None = None  # why PyTorch may raise on a CPU, as no kernel can; or nothing


RULES: dict[str, Rule] = {}


def define(names: str, rule: Rule) -> None:
    for text in names.split():
        assert text not in RULES, f"two lowerings of {text}"
        RULES[text] = rule
    _rule_of.cache_clear()


def rule_of(op: object) -> Rule | None:
    """The lowering of an operator, by `name.overload` or by its name."""
    return _rule_of(op) if isinstance(op, OpOverload) else None


@functools.cache
def _rule_of(op: OpOverload) -> Rule | None:
    if op.namespace not in ("aten", "prims", "tessera"):
        return None
    if op.namespace == "tessera":  # names of its own: `aten.uniform` draws, `tessera.uniform` computes
        return RULES.get(f"tessera.{op_name(op)}")
    return RULES.get(f"{op_name(op)}.{overload_name(op)}") or RULES.get(op_name(op))


def wrap(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def dims_of(given: Arg, rank: int) -> list[int]:
    """Dimensions as an operator's argument names them; none or an empty list means all; a number has none."""
    if given is None or given == [] or not rank:
        return list(range(rank))
    listed = given if isinstance(given, (list, tuple)) else [given]
    return sorted({wrap(d, rank) for d in listed})  # type: ignore[arg-type]


DTYPES = frozenset(
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)
