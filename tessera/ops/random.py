"""Random operators: what they draw does not depend on their arguments differentiably.

PyTorch passes zeros back to a tensor that parametrises a distribution (bernoulli, normal, poisson) and
nothing to one that only lends its shape. Samplers with a real derivative (`_standard_gamma`,
`_sample_dirichlet`) are left to PyTorch's formula. Batching, which must ask whether every row draws its own,
is left to vmap.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ops.op import declare


def _zeros_back(ct: Value, y: Value, *args: Arg, **kw: Arg) -> tuple:
    def back(a: Value) -> Value:
        return aten.zeros_like(a)

    return tuple((lambda a=a: back(a)) if isinstance(a, Value) else None for a in args)


def _zero_tangent(ts: Sequence[Value | None], y: Value, *args: Arg, **kw: Arg) -> Value:
    return aten.zeros_like(y)


# shaped like a tensor, or drawn from nothing but numbers
for _name in (
    "rand_like", "randn_like", "randint_like", "rand", "randn", "randint", "randperm", "multinomial",
):  # fmt: skip
    declare(f"aten.{_name}", "random", zero=True)

# parametrised by a tensor: PyTorch gives that tensor a zero gradient
for _name in (
    "bernoulli", "normal", "poisson", "binomial", "exponential", "uniform", "geometric", "cauchy",
    "log_normal",
):  # fmt: skip
    declare(f"aten.{_name}", "random", vjp=_zeros_back, jvp=_zero_tangent)
