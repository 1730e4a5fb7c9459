"""What the patterns ask of a trace: who made a value, who reads it, what it is a view or a norm of.

In: a functional trace. `Pattern.find` fills `replaced`, equation -> what is emitted at its place; what nobody wants
any more is swept away after it. Norms are recognised whole (`aten.rms_norm`) and written out in single precision, with
the cast before or after the weight: what stands in for them rounds once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import bind
from tessera.ir.trace import Trace
from tessera.ops.rows.limits import DTYPES
from tessera.passes.clean.dce import dce
from tessera.util.names import names

ORDERED = names("view reshape _unsafe_view unsqueeze squeeze flatten unflatten contiguous clone alias detach")
MOVING = names("transpose permute")


class Norm(NamedTuple):
    """`source / rms(source) * (weight + shift)` along the last dimension."""

    source: Value
    weight: Value
    eps: float
    shift: float


class Pattern(Rewrite):
    """One pattern, rewritten wherever a trace has it."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.replaced: dict[Equation, Callable[[], None]] = {}

    def run(self) -> Trace:
        self.find()
        if not self.replaced:
            return self.trace
        for eqn in self:
            if eqn in self.replaced:
                self.erase()
                with self.at(eqn):
                    self.replaced[eqn]()
        return dce(self.finish())

    def find(self) -> None:
        raise NotImplementedError

    def emit(self, op: object, args: tuple[Arg, ...], results: list[Value]) -> None:
        """An equation whose results keep the names they had."""
        self.builder.emit(op, *args)  # type: ignore[arg-type]
        last = self.builder.equations[-1]
        assert [v.tensor.shape for v in last.results()] == [v.tensor.shape for v in results]
        self.builder.equations[-1] = last.with_(outputs=tuple(results))

    # --- who makes and who reads ---

    def only(self, v: Value, *readers: Equation) -> bool:
        """Nothing but these equations wants a value."""
        return v not in self.results and set(self.users.get(v, ())) <= set(readers)

    def uncast(self, v: Arg) -> Arg:
        """A value before it was given another precision."""
        eqn = self.maker(v, "_to_copy")
        if eqn is None:
            return v
        before, after = eqn.inputs()[0].tensor, eqn.out.tensor
        floats = (*DTYPES, torch.float32)
        same = before.dtype in floats and after.dtype in floats and before.device == after.device
        return eqn.args[0] if same else v

    # --- views ---

    def in_order(self, v: Value) -> Value:
        """What holds the elements of a value in the same order, through views."""
        while (eqn := self.makers.get(v)) is not None and self.keeps_order(eqn):
            v = eqn.inputs()[0]
        return v

    def passed_on(self, v: Value) -> Value:
        """What is made of a value alone without changing the order of its elements, at the end of the views."""
        while (eqn := self.reader(v)) is not None and self.keeps_order(eqn):
            v = eqn.out
        return v

    def keeps_order(self, eqn: Equation) -> bool:
        """A view that leaves elements in their order: dimensions move only past those of size one."""
        name = eqn.opname
        if name not in MOVING:
            return name in ORDERED
        shape = eqn.inputs()[0].shape
        moved = [d for d in self.order(eqn) if shape[d] != 1]
        return moved == sorted(moved)

    @staticmethod
    def order(eqn: Equation) -> list[int]:
        """Where the dimensions of a transposition's result stood before."""
        rank = eqn.out.ndim
        if eqn.opname == "permute":
            return [d % rank for d in eqn.args[1]]  # type: ignore[union-attr,operator]
        order = list(range(rank))
        one, two = eqn.args[1:3]
        order[one], order[two] = order[two], order[one]  # type: ignore[index,call-overload]
        return order

    # --- norms ---

    def norm(self, v: Value) -> Norm | None:
        norm = self.whole_norm(v) or self.written_norm(v)
        if norm is None or norm.source.dtype not in DTYPES or v.dtype != norm.source.dtype:
            return None
        source, weight = norm.source, norm.weight.tensor
        along = weight.shape == source.shape[-1:] and weight.stride == (1,)
        return norm if along and v.shape == source.shape else None

    def whole_norm(self, v: Value) -> Norm | None:
        eqn = self.maker(v, "rms_norm")
        if eqn is None:
            return None
        (source, shape, weight, eps), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        if len(shape) != 1 or weight is None or eps is None:  # type: ignore[arg-type]
            return None
        return Norm(source, weight, eps, 0.0)  # type: ignore[arg-type]

    def written_norm(self, v: Value) -> Norm | None:
        """`weight * unit(x)`, either cast from single precision."""
        for weight, unit in pairs(self.maker(self.uncast(v), "mul")):
            source, eps = self.unit(self.uncast(unit)) or (None, 0.0)
            if source is None:
                continue
            gain, shift = self.shifted(self.uncast(weight))
            if isinstance(gain, Value):
                return Norm(source, gain, eps, shift)
        return None

    def shifted(self, weight: Arg) -> tuple[Arg, float]:
        """`w + 1.0` -> w and 1.0."""
        eqn = self.maker(weight, "add")
        if eqn is None or len(eqn.args) != 2 or eqn.kwargs or not isinstance(eqn.args[1], int | float):
            return weight, 0.0
        return self.uncast(eqn.args[0]), float(eqn.args[1])

    def unit(self, v: Arg) -> tuple[Value, float] | None:
        """`x * rsqrt(mean(x * x) + eps)` in single precision -> x before its cast, and eps."""
        for x, factor in pairs(self.maker(v, "mul")):
            root = self.maker(factor, "rsqrt")
            total = self.maker(root.args[0], "add") if root is not None else None
            if total is None or len(total.args) != 2 or total.kwargs or not isinstance(total.args[1], int | float):
                continue
            mean = self.maker(total.args[0], "mean")
            if mean is None or not isinstance(x, Value) or x.dtype != torch.float32 or not self.means_squares(mean, x):
                continue
            source = self.uncast(x)
            return (source, float(total.args[1])) if isinstance(source, Value) else None
        return None

    def means_squares(self, mean: Equation, x: Value) -> bool:
        positional, keyword = bind(mean.op, mean.args, mean.kwargs)  # type: ignore[arg-type]
        if len(positional) < 3 or keyword.get("dtype") is not None:
            return False
        squares, dims, keep = positional[:3]
        if not keep or list(dims or ()) not in ([-1], [x.ndim - 1]):  # type: ignore[call-overload]
            return False
        eqn = self.maker(squares, "pow", "mul", "square")
        if eqn is None or eqn.args[0] is not x:
            return False
        return eqn.opname == "square" or eqn.args[1] == 2 or eqn.args[1] is x


def pairs(eqn: Equation | None) -> list[tuple[Arg, Arg]]:
    """The two arguments of an equation, in both orders."""
    if eqn is None or len(eqn.args) != 2 or eqn.kwargs:
        return []
    one, two = eqn.args
    return [(one, two), (two, one)]
