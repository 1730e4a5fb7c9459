"""A linear layer whose products are of 8 bits, forward and backward, with what its operands are rounded by.

    fp8_linear(x, w, bias, scaling, scales, history)  ->  y, as aten.linear

Every operand of a product is a matrix `(rows, columns)` that lies row by row and is summed along its columns:

    y  = x · wᵀ   by rows of x and rows of w         x, w in e4m3
    dx = g · w    by rows of g and columns of w      g in e5m2, or e4m3 where every row has a scale
    dw = gᵀ · x   by columns of g and columns of x

so each of x, w and g is rounded at most twice (`Operand.by_rows`, `Operand.by_columns`), and with one scale for a
tensor the second is the first one turned. A scale is the largest magnitude over the largest number of the format.
`scaling` is "tensor" or "row". With `scales` given (of x, w and g, from earlier steps) nothing waits for the largest
magnitude of this step; what is beyond the scale's range becomes the largest number, and backward adds this step's to
`history`. NaN or infinity in a tensor makes NaN of all that it is multiplied with (in its row, where that has a scale).

The same code gives equations, in terms of `tessera.ir.builder.aten`, and runs on tensors, in terms of `torch.ops.aten`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.ir.builder import aten, emit
from tessera.ir.equation import ACTIVE, Equation, Special, Value, without_recompute
from tessera.ops.families import sum_to
from tessera.ops.fp8 import EIGHT_BITS, LEAST, multiplies
from tessera.ops.matmul import fold, unfold
from tessera.ops.op import declare
from tessera.torch_internals.operators import foreach_copy_

E4M3, E5M2, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
SCALINGS = ("tensor", "row")
Sided = tuple[Any, Any]  # a matrix of 8 bits, and its scale or scales


class Operand:
    """A matrix in 16 bits, and what products read in its place. `of` is where operators are looked up."""

    def __init__(self, of: Any, x: Any, dtype: torch.dtype, scaling: str, scale: Any = None) -> None:  # noqa: ANN401
        self.of, self.x, self.dtype, self.scaling = of, x, dtype, scaling
        self.largest = EIGHT_BITS[dtype]
        self.delayed = scale is not None
        self.top: Any = None  # the largest magnitude, where the whole matrix has one scale
        if scaling == "tensor":
            self.top = self._single(of.amax(of.amax(of.abs(x), [1]), [0]))
            # times 0.0: what was rounded hides infinity, the scale does not
            self.scale = of.add(scale, of.mul(self.top, 0.0)) if self.delayed else self._scale(self.top)
            self.q = self._rounded(scale if self.delayed else self.scale)

    def by_rows(self) -> Sided:
        if self.scaling == "tensor":
            return self._lain(self.q), self.scale
        scale = self._scale(self._single(self.of.amax(self.of.abs(self.x), [1], True)))
        return self._lain(self._rounded(scale)), scale

    def by_columns(self) -> Sided:
        """Of the matrix turned: its rows are columns of this one."""
        of = self.of
        if self.scaling == "tensor":
            return self._lain(of.t(self.q)), self.scale
        scale = self._scale(self._single(of.amax(of.abs(self.x), [0])))
        return self._lain(of.t(self._rounded(scale))), of.unsqueeze(scale, 1)

    def _single(self, x: Any) -> Any:  # noqa: ANN401
        return x if x.dtype is F32 else self.of._to_copy(x, dtype=F32)

    def _scale(self, top: Any) -> Any:  # noqa: ANN401
        return self.of.div(self.of.clamp_min(top, LEAST), self.largest)

    def _rounded(self, scale: Any) -> Any:  # noqa: ANN401
        of = self.of
        scaled = of.mul(self._single(self.x), of.reciprocal(scale))
        if self.delayed:
            scaled = of.clamp(scaled, -self.largest, self.largest)
        return of._to_copy(scaled, dtype=self.dtype)

    def _lain(self, q: Any) -> Any:  # noqa: ANN401
        """Row by row, as the library wants it."""
        if q.tensor.is_row_major if isinstance(q, Value) else q.is_contiguous():
            return q
        return self.of.clone(q, memory_format=torch.contiguous_format)


def product(of: Any, a: Sided, b: Sided, dtype: torch.dtype, fast: bool) -> Any:  # noqa: ANN401
    """`a · bᵀ`. The library gives 16 bits; where it has no such product, the same is written out."""
    (left, mine), (right, yours) = a, b
    rows = len(mine.shape) == 2
    right, yours = of.t(right), of.t(yours) if rows else yours
    if multiplies(_device(left).type, left.dtype, rows):
        out = torch.bfloat16 if rows else dtype
        y = of._scaled_mm(left, right, mine, yours, out_dtype=out, use_fast_accum=fast or rows)
    else:
        y = of.mm(*(of.mul(of._to_copy(m, dtype=F32), s) for m, s in ((left, mine), (right, yours))))
    return y if y.dtype is dtype else of._to_copy(y, dtype=dtype)


def _device(x: Any) -> torch.device:  # noqa: ANN401
    return x.tensor.device if isinstance(x, Value) else x.device


def gradient_dtype(scaling: str) -> torch.dtype:
    """Gradients need range more than digits; where every row has a scale of its own it is there already."""
    return E5M2 if scaling == "tensor" else E4M3


def _operands(of: Any, x: Any, w: Any, scaling: str, scales: Any) -> tuple[Operand, Operand]:  # noqa: ANN401
    mine, yours, _ = scales or (None, None, None)
    return Operand(of, x, E4M3, scaling, mine), Operand(of, w, E4M3, scaling, yours)


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None, scaling: str, scales: list[Tensor] | None, history: Tensor | None
) -> Tensor:
    of = torch.ops.aten
    a, b = _operands(of, x.flatten(0, -2), w, scaling, scales)
    y = product(of, a.by_rows(), b.by_rows(), x.dtype, fast=True).view(*x.shape[:-1], w.shape[0])
    return y if bias is None else y + bias


FP8_LINEAR = Special("fp8_linear", _run)


def written_out(eqn: Equation) -> Value:
    """Without a gradient."""
    x, w, bias, scaling, scales, _ = eqn.args
    a, b = _operands(aten, fold(x), w, scaling, scales)  # type: ignore[arg-type]
    return _result(product(aten, a.by_rows(), b.by_rows(), x.dtype, fast=True), x, bias)  # type: ignore[union-attr,arg-type]


def _result(y: Value, x: Value, bias: Value | None) -> Value:
    y = unfold(y, [*x.shape[:-1], y.shape[-1]])
    return y if bias is None else aten.add(y, bias)


def _forward(
    need: Sequence[object],
    x: Value,
    w: Value,
    bias: Value | None,
    scaling: str,
    scales: list[Value] | None,
    history: Value | None,
) -> Generator[Value, Value, tuple]:
    rows = fold(x)
    builder, tags = ACTIVE[-1], ACTIVE[-1].tags  # type: ignore[attr-defined]
    mine, yours, its = scales or (None, None, None)
    a = Operand(aten, rows, E4M3, scaling, mine)
    builder.tags = without_recompute(tags)  # type: ignore[attr-defined]  # weights are rounded once a step
    b = Operand(aten, w, E4M3, scaling, yours)
    right, turned = b.by_rows(), b.by_columns() if need[0] else None
    builder.tags = tags  # type: ignore[attr-defined]
    y = product(aten, a.by_rows(), right, x.dtype, fast=True)
    columns = a.by_columns() if need[1] else None
    ct = yield _result(y, x, bias)

    g = fold(ct)
    dx = dw = None
    if turned is not None or columns is not None:
        c = Operand(aten, g, gradient_dtype(scaling), scaling, its)
        dx = None if turned is None else unfold(product(aten, c.by_rows(), turned, x.dtype, fast=False), x.shape)
        dw = None if columns is None else product(aten, c.by_columns(), columns, w.dtype, fast=False)
        if history is not None:
            emit(RECORD_AMAX, [history], [a.top, b.top, c.top])
    return dx, dw, lambda: sum_to(g, bias) if bias is not None else None


# --- largest magnitudes of earlier steps ---


def _scales(histories: list[Tensor]) -> Tensor:
    """A row of three for each layer: the scales of x, w and g. Before anything was recorded they are 1."""
    top = torch.stack(histories).amax(1)
    scales = torch.cat([top.narrow(1, 0, 2) / EIGHT_BITS[E4M3], top.narrow(1, 2, 1) / EIGHT_BITS[E5M2]], 1)
    return torch.where(top > 0, scales, 1.0)


def _record(histories: list[Tensor], tops: list[Tensor]) -> None:
    """One more step at the beginning of each history, `(steps, 3)`. What is not finite is no measure of others."""
    now = torch.stack(tops).view(-1, 1, 3)
    before = torch.stack(histories)
    known = torch.where(now.isfinite(), now, before.narrow(1, 0, 1))
    after = torch.cat([known, before.narrow(1, 0, before.shape[1] - 1)], 1)
    foreach_copy_(histories, list(after.unbind()))


AMAX_SCALES = Special("amax_scales", _scales, pure=False)  # another step's would do nothing right
RECORD_AMAX = Special("record_amax", _record, pure=False)


def _cost(eqn: Equation) -> float:
    x, w = eqn.inputs()[:2]
    return 2.0 * x.tensor.numel() * w.tensor.numel() / max(w.tensor.shape[1], 1)  # type: ignore[operator,type-var]


declare("tessera.fp8_linear", "matmul", forward=_forward, cost=_cost)
