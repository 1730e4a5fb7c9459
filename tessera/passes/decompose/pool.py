"""Gradients of average pools over the sizes of what was pooled, which then need not be saved.

dx = aten.avg_pool2d_backward(dy, x, [3, 3], [1, 1], [1, 1], False, False, None)
-->
dx = tessera.avg_pool_backward(dy, [8, 64, 56, 56], [3, 3], [1, 1], [1, 1], False, False, None, True)
"""

from __future__ import annotations

from tessera.ir.builder import emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ops.average_pool import BACKWARD, avg_pool_backward
from tessera.ops.families import per_dimension
from tessera.passes.decompose.nn import Results, rule
from tessera.passes.decompose.pool_offsets import channels_last

DIMENSIONS = {op: n for n, op in BACKWARD.items()}


@rule("avg_pool2d_backward avg_pool3d_backward")
def average_backward(
    eqn: Equation, grad: Value, x: Value, kernel: Arg, stride: Arg, padding: Arg, *others: Arg
) -> Results:
    n = DIMENSIONS[eqn.op]  # type: ignore[index]
    stride = stride if stride or isinstance(stride, int) else kernel
    windows = (per_dimension(sizes, n) for sizes in (kernel, stride, padding))
    return [emit(avg_pool_backward, grad, list(x.shape), *windows, *others, channels_last(eqn.out.tensor))]
