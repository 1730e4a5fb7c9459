"""Linear layers with weights of 8 bits multiply in 8 bits, where there are many rows.

In: a functional trace without gradients, with `tessera.quantized_linear(x, w, scale, bias, "fp8")` in it. Out: the same
layers as ordinary equations around one product, and why the others stayed as they are. A layer that stays widens its
weights and multiplies in the precision of x.

    quantized_linear(x, w, s, b, "fp8")  -->  top = aten.amax(aten.abs(x), [1], True)
                                              scale = aten.clamp_min(top, …) / 448
                                              q = aten._to_copy(x * aten.reciprocal(scale), dtype=float8_e4m3fn)
                                              y = aten._scaled_mm(q, aten.t(w), scale, aten.unsqueeze(s, 0), …) + b

What makes `q` is arithmetic along rows, which fuses with the norm or the gate before it; layers that read the same x
share it. `ops/fp8` says how far off the result may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import settled, size_hint
from tessera.ops.families import cast
from tessera.ops.fp8 import FEW_ROWS, LARGEST, LEAST, WHOLE, scales_rows

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layers:
    """What became of the layers whose weights have 8 bits, by the names of their results."""

    multiplied: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()  # name, reason
    how: str = ""  # they are scaled and rounded, where the user chose that

    def told(self) -> list[str]:
        """In words."""
        how = f" ({self.how})" if self.how else ""
        lines = [f"multiplied in 8 bits{how}: {_few(self.multiplied)}"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left:
            reasons.setdefault(reason, []).append(name)
        left = [f"not {_few(names)}: {reason}" for reason, names in reasons.items()]
        return (lines if self.multiplied else []) + left


def _few(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def fp8(trace: Trace, refusal: Callable[[torch.device], str]) -> tuple[Trace, Layers]:
    """Multiply in 8 bits where `refusal(device)` is empty and the layer's sizes allow it."""
    reasons = {eqn: why_not(eqn, refusal) for eqn in trace.equations if _is_layer(eqn)}
    layers = Layers(
        tuple(eqn.out.name for eqn, why in reasons.items() if not why),
        tuple((eqn.out.name, why) for eqn, why in reasons.items() if why),
    )
    if not layers.multiplied:
        return trace, layers
    rewrite, products = Rewrite(trace), _Products()
    for eqn in rewrite:
        if reasons.get(eqn) == "":
            assert rewrite.replace(eqn, products.layer), f"{eqn.out} became another type"
    return rewrite.finish(), layers


def _is_layer(eqn: Equation) -> bool:
    return eqn.opname == "quantized_linear" and eqn.bound()[0][4] == "fp8"


def why_not(eqn: Equation, refusal: Callable[[torch.device], str]) -> str:
    """Why a layer stays as it is; empty where it need not."""
    x, w = eqn.inputs()[:2]
    if reason := refusal(x.tensor.device):
        return reason
    if x.dtype not in DTYPES:
        return f"its input is {x.type}; the product gives 16 bits"
    rows = math.prod(x.shape[:-1])
    if settled(rows <= FEW_ROWS):  # of a size that is open there may be many, whatever the first call had
        return f"over {size_hint(rows)} rows reading the weights is all the work"
    for what, side in (("width", w.shape[1]), ("height", w.shape[0])):
        if not isinstance(side, int) or side % WHOLE:
            return f"the weight's {what} of {side} is no multiple of {WHOLE}"
    if w.dtype is not F8:
        return f"its weight was turned into {w.type}"
    return "" if w.tensor.is_row_major else "its weight does not lie row by row"


class _Products:
    def __init__(self) -> None:
        self.rows: dict[Value, tuple[Value, Value]] = {}  # x -> its rows in 8 bits, and their scales

    def layer(self, eqn: Equation) -> Value:
        (x, w, scale, bias, _), _ = eqn.bound()
        if x not in self.rows:
            self.rows[x] = self.quantized(x)
        q, own = self.rows[x]
        y = cast(_product(q, own, aten.t(w), aten.unsqueeze(cast(scale, F32), 0)), x.dtype)
        if bias is not None:
            y = aten.add(y, bias)
        return y if x.ndim == 2 else aten.view(y, list(eqn.out.shape))

    def quantized(self, x: Value) -> tuple[Value, Value]:
        """The rows of x in 8 bits, one after another, and a scale for each."""
        flat = x if x.ndim == 2 else aten.reshape(x, [-1, x.shape[-1]])
        wide = aten._to_copy(flat, dtype=F32)
        top = aten.amax(aten.abs(wide), [1], True)
        scale = aten.div(aten.clamp_min(top, LEAST), LARGEST)
        q = aten._to_copy(aten.mul(wide, aten.reciprocal(scale)), dtype=F8)
        return (q if q.tensor.is_row_major else aten.contiguous(q)), scale


def _product(a: Value, rows: Value, b: Value, columns: Value) -> Value:
    """Two matrices of 8 bits and their scales, multiplied; written out where the library cannot do it."""
    if scales_rows(a.tensor.device.type):
        return aten._scaled_mm(a, b, rows, columns, out_dtype=BF16, use_fast_accum=True)
    left, right = aten.mul(aten._to_copy(a, dtype=F32), rows), aten.mul(aten._to_copy(b, dtype=F32), columns)
    return aten._to_copy(aten.mm(left, right), dtype=BF16)
