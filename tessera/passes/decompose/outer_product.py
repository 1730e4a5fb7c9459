"""Matrix products over a depth of one, which are multiplications.

The gradient of a layer with one output is such a product. The library writes it as a matrix of its own, which kernels
behind it read again; a multiplication is part of them.
"""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.passes.decompose.nn import Results, rule


@rule("mm bmm matmul")
def outer_product(eqn: Equation, a: Value, b: Value) -> Results:
    matrices = a.ndim > 1 and b.ndim > 1
    return aten.mul(a, b) if matrices and type(a.shape[-1]) is int and a.shape[-1] == 1 else None
