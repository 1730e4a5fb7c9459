"""Resampling of images: nearest, linear and cubic interpolation, one operator each.

All are linear in their input: a tangent takes the operator itself, a cotangent its native backward, and the
cotangent of backward the operator again. Taken apart they would be dozens of equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Value
from tessera.ir.types import Size
from tessera.ops.families import per_element, product
from tessera.ops.op import declare
from tessera.torch_internals.operators import OpOverload

# operator: spatial dimensions, flops an element; those in the second table also take `align_corners`
_NEAREST = {
    f"{prefix}nearest{exact}{n}d": (n, 1)
    for n in (1, 2, 3)
    for prefix, exact in (("upsample_", ""), ("_upsample_", "_exact"))
}
_SMOOTH = {
    "upsample_linear1d": (1, 4), "upsample_bilinear2d": (2, 10), "upsample_trilinear3d": (3, 22),
    "upsample_bicubic2d": (2, 60), "_upsample_bilinear2d_aa": (2, 20), "_upsample_bicubic2d_aa": (2, 60),
}  # fmt: skip


def _emit(op: OpOverload, *args: Arg) -> Value:
    return emit(op, *args)


def _fold(x: Value) -> Value:
    return aten.reshape(x, [product(x.shape[:2]), *x.shape[2:]])


def _family(name: str, n: int, flops: float, aligned: bool) -> None:
    packet, back = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward").default

    def parameters(vec: bool, y: Value, rest: Sequence[Arg]) -> tuple[Arg, ...]:
        """What follows the sizes in the native operators: align_corners, where there is one, and scales."""
        if not vec:
            return tuple(rest[1:])
        factors = rest[-1]
        scales = list(factors) if isinstance(factors, (list, tuple)) else [None] * n
        return (rest[1], *scales) if aligned else tuple(scales)

    def vjp(vec: bool) -> Callable:
        def rule(ct: Value, y: Value, x: Value, *rest: Arg) -> tuple:
            return (lambda: _emit(back, ct, list(y.shape[2:]), list(x.shape), *parameters(vec, y, rest)),)

        return rule

    def batch(op: OpOverload) -> Callable:
        def rule(size: Size, on: Sequence[object], x: Value, *rest: Arg) -> Value:
            y = _emit(op, _fold(x), *rest)
            return aten.reshape(y, [*x.shape[:2], *y.shape[1:]])

        return rule

    def batch_back(size: Size, on: Sequence[object], ct: Value, out: Arg, shape: list[Size], *rest: Arg) -> Value:
        x = _emit(back, _fold(ct), out, [shape[0] * size, *shape[1:]], *rest)
        return aten.reshape(x, [size, *shape])

    for overload in ("vec", "default"):
        op = getattr(packet, overload)
        declare(
            f"aten.{name}.{overload}",
            "resample",
            vjp=vjp(overload == "vec"),
            jvp=lambda ts, y, x, *rest, op=op: _emit(op, ts[0], *rest),
            batch=batch(op),
            cost=per_element(flops),
        )
    declare(
        f"aten.{name}_backward.default",
        "resample",
        vjp=lambda ct, y, g, out, shape, *rest: (lambda: _emit(packet.default, ct, out, *rest),),
        jvp=lambda ts, y, g, *rest: _emit(back, ts[0], *rest),
        batch=batch_back,
        cost=per_element(flops),
    )


for _table, _aligned in ((_NEAREST, False), (_SMOOTH, True)):
    for _name, (_n, _flops) in _table.items():
        _family(_name, _n, _flops, _aligned)
