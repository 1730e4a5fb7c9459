"""The elementwise functions of `tile.apply`: their names, how many arguments they take, and what they mean.

Meaning is given by the reference in PyTorch's words; each target has its own table from the same names. Integer
division and remainder round toward minus infinity (`floordiv`, `mod`) or toward zero (`truncdiv`, `fmod`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.util.cost import flops_per_element


@dataclass(frozen=True)
class Function:
    name: str
    arity: int
    reference: Callable[..., torch.Tensor]
    predicate: bool = False  # gives i1

    @property
    def cost(self) -> int:
        """Rough instructions an element."""
        return flops_per_element(self.name)


def _logical(fn: Callable) -> Callable:
    return lambda *xs: fn(*(x.bool() for x in xs))


_TABLE = [
    # arithmetic
    Function("add", 2, torch.add),
    Function("sub", 2, torch.sub),
    Function("mul", 2, torch.mul),
    Function("div", 2, torch.true_divide),  # floats only
    Function("floordiv", 2, lambda a, b: torch.div(a, b, rounding_mode="floor")),
    Function("truncdiv", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    Function("mod", 2, torch.remainder),
    Function("fmod", 2, torch.fmod),
    Function("neg", 1, torch.neg),
    Function("abs", 1, torch.abs),
    Function("sign", 1, torch.sign),
    Function("maximum", 2, torch.maximum),  # NaN wins
    Function("minimum", 2, torch.minimum),
    Function("fmax", 2, torch.fmax),  # NaN loses
    Function("fmin", 2, torch.fmin),
    Function("fma", 3, lambda a, b, c: a * b + c),
    # functions of a float
    Function("exp", 1, torch.exp),
    Function("exp2", 1, torch.exp2),
    Function("expm1", 1, torch.expm1),
    Function("log", 1, torch.log),
    Function("log2", 1, torch.log2),
    Function("log10", 1, torch.log10),
    Function("log1p", 1, torch.log1p),
    Function("sqrt", 1, torch.sqrt),
    Function("rsqrt", 1, torch.rsqrt),
    Function("reciprocal", 1, torch.reciprocal),
    Function("sigmoid", 1, torch.sigmoid),
    Function("tanh", 1, torch.tanh),
    Function("erf", 1, torch.erf),
    Function("erfc", 1, torch.erfc),
    Function("sin", 1, torch.sin),
    Function("cos", 1, torch.cos),
    Function("tan", 1, torch.tan),
    Function("asin", 1, torch.asin),
    Function("acos", 1, torch.acos),
    Function("atan", 1, torch.atan),
    Function("atan2", 2, torch.atan2),
    Function("sinh", 1, torch.sinh),
    Function("cosh", 1, torch.cosh),
    Function("pow", 2, torch.pow),
    Function("floor", 1, torch.floor),
    Function("ceil", 1, torch.ceil),
    Function("trunc", 1, torch.trunc),
    Function("round", 1, torch.round),  # half to even
    # comparisons and choice
    Function("eq", 2, torch.eq, True),
    Function("ne", 2, torch.ne, True),
    Function("lt", 2, torch.lt, True),
    Function("le", 2, torch.le, True),
    Function("gt", 2, torch.gt, True),
    Function("ge", 2, torch.ge, True),
    Function("isnan", 1, torch.isnan, True),
    Function("isinf", 1, torch.isinf, True),
    Function("logical_and", 2, _logical(torch.logical_and), True),
    Function("logical_or", 2, _logical(torch.logical_or), True),
    Function("logical_xor", 2, _logical(torch.logical_xor), True),
    Function("logical_not", 1, _logical(torch.logical_not), True),
    Function("select", 3, lambda c, a, b: torch.where(c.bool(), a, b)),
    # bits of an integer
    Function("bit_and", 2, torch.bitwise_and),
    Function("bit_or", 2, torch.bitwise_or),
    Function("bit_xor", 2, torch.bitwise_xor),
    Function("bit_not", 1, torch.bitwise_not),
    Function("shl", 2, torch.bitwise_left_shift),
    Function("shr", 2, torch.bitwise_right_shift),
]

FUNCTIONS: dict[str, Function] = {f.name: f for f in _TABLE}
