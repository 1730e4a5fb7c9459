"""Looking backwards from a value: what made it, past casts and other things that patterns do not mind."""

from __future__ import annotations

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import maker_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType


class Makers:
    def __init__(self, trace: Trace) -> None:
        self.makers = trace.makers()

    def of(self, v: Arg, *names: str) -> Equation | None:
        return maker_of(self.makers, v, *names)

    def uncast(self, v: Arg) -> Arg:
        """A value before it was brought to another dtype."""
        while (eqn := self.of(v, "_to_copy", "to")) is not None and is_float(eqn.args[0]):
            v = eqn.args[0]
        return v

    def pair(self, v: Arg, *names: str) -> tuple[Value, Value] | None:
        """The two tensors that one of these operators joins to a value, if nothing scales one of them."""
        eqn = self.of(v, *names)
        if eqn is None or eqn.kwargs or len(eqn.args) != 2 or not all(map(is_float, eqn.args)):
            return None
        return eqn.args[0], eqn.args[1]  # type: ignore[return-value]


def both_ways(pair: tuple[Value, Value] | None) -> list[tuple[Value, Value]]:
    """The factors of a product in either order."""
    return [] if pair is None else [pair, (pair[1], pair[0])]


def is_float(x: object) -> bool:
    return isinstance(x, Value) and isinstance(x.type, TensorType) and x.dtype.is_floating_point


def is_plain(dtype: torch.dtype) -> bool:
    """What the operators of opset 23 compute with."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)
