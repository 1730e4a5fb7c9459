"""What elementwise functions cost: rough instructions an element.

Two ask: `ops/families.py` for the price of an operator (what backward may run again, what a profile counts), the tile
dialect for the price of a function in a kernel (what is fused, how it is scheduled). It stands below both, since a
stored kernel runs without the operators. Kernels were scheduled and measured with these numbers.
"""

from __future__ import annotations

_INSTRUCTIONS = {
    "div": 4, "floordiv": 8, "truncdiv": 8, "mod": 8, "fmod": 8,
    "exp": 8, "exp2": 8, "expm1": 12, "log": 10, "log2": 10, "log10": 10, "log1p": 12, "pow": 24,
    "sqrt": 4, "rsqrt": 4, "reciprocal": 4, "sigmoid": 10, "erf": 14, "erfc": 16,
    "sin": 16, "cos": 16, "tan": 20, "asin": 20, "acos": 20, "atan": 20, "atan2": 24,
    "sinh": 16, "cosh": 16, "tanh": 12, "asinh": 20, "acosh": 20, "atanh": 20,
}  # fmt: skip


def flops_per_element(function: str) -> int:
    """Of the function with this name; one where nothing is listed."""
    return _INSTRUCTIONS.get(function, 1)
