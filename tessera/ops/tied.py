"""A gradient that does not change with `x`, and that autograd takes to depend on it all the same.

`tied(g, x)` is `g`. Its derivative by `x` is zeros, where without it there would be none: eager's gradient of `x ** 1`
is multiplied by `x ** 0`, so it requires gradients and can be asked for one. Nothing reads what `x` holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Special, Value
from tessera.ir.types import Size
from tessera.ops.families import carry
from tessera.ops.op import declare


def _tied(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG001  only derivatives look at x
    return g.clone()


def _jvp(ts: Sequence[Value | None], y: Value, g: Value, x: Value) -> Value:
    return aten.zeros_like(g) if ts[0] is None else ts[0]


def _batch(size: Size, on: Sequence[bool], g: Value, x: Value) -> Value:
    return emit(TIED, carry(g, on[0], size), carry(x, on[1], size))


TIED = Special("tied", _tied)
declare("tessera.tied", "custom", vjp=lambda ct, y, g, x: (ct, aten.zeros_like(ct)), jvp=_jvp, batch=_batch, real=False)
