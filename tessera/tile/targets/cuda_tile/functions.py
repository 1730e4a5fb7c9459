"""The elementwise functions of the tile dialect in cuTile's words, and the helpers that emitted modules use.

A template is chosen by the kind of the function's operands: floats, integers or truth values. What cuTile lacks is
written with what it has, in helpers that stand in an emitted module only where it uses them. Functions that cannot be
written so without losing accuracy (erfc, the remainders of floats) are absent: the target refuses such kernels.
"""

from __future__ import annotations

import re

from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    Signedness,
)
from xdsl.ir import Attribute

from tessera.util.errors import OptionError
from tessera.util.philox import ROUNDS

_COMMON = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "abs": "ct.abs({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)",
    "logical_not": "{0} == 0",
    "select": "ct.where({0}, {1}, {2})",
    "fma": "{0} * {1} + {2}",
}

FLOAT = {
    **_COMMON,
    "div": "{0} / {1}",
    "maximum": "ct.maximum({0}, {1}, propagate_nan=True)",
    "minimum": "ct.minimum({0}, {1}, propagate_nan=True)",
    "fmax": "ct.maximum({0}, {1})",
    "fmin": "ct.minimum({0}, {1})",
    "sign": "_sign({0})",
    "exp": "ct.exp({0})",
    "exp2": "ct.exp2({0})",
    "expm1": "_expm1({0})",
    "log": "ct.log({0})",
    "log2": "ct.log2({0})",
    "log10": "ct.log({0}) * 0.4342944819032518",
    "log1p": "_log1p({0})",
    "sqrt": "ct.sqrt({0})",
    "rsqrt": "ct.rsqrt({0})",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "1.0 / (1.0 + ct.exp(-{0}))",
    "tanh": "ct.tanh({0})",
    "erf": "_erf({0})",
    "sin": "ct.sin({0})",
    "cos": "ct.cos({0})",
    "tan": "ct.tan({0})",
    "asin": "ct.atan2({0}, ct.sqrt((1.0 - {0}) * (1.0 + {0})))",
    "acos": "ct.atan2(ct.sqrt((1.0 - {0}) * (1.0 + {0})), {0})",
    "atan": "_atan({0})",
    "atan2": "ct.atan2({0}, {1})",
    "sinh": "ct.sinh({0})",
    "cosh": "ct.cosh({0})",
    "pow": "ct.pow({0}, {1})",
    "floor": "ct.floor({0})",
    "ceil": "ct.ceil({0})",
    "trunc": "_trunc({0})",
    "round": "_round({0})",
    "isnan": "ct.isnan({0})",
    "isinf": 'ct.abs({0}) == float("inf")',
}

# Accurate to 1e-7, which f64 is not content with.
DOUBLE = {fn: text for fn, text in FLOAT.items() if fn != "erf"}

INTEGER = {
    **_COMMON,
    "floordiv": "{0} // {1}",
    "truncdiv": "_truncate_divide({0}, {1})",
    "mod": "{0} % {1}",
    "fmod": "{0} - _truncate_divide({0}, {1}) * {1}",
    "maximum": "ct.maximum({0}, {1})",
    "minimum": "ct.minimum({0}, {1})",
    "fmax": "ct.maximum({0}, {1})",
    "fmin": "ct.minimum({0}, {1})",
    "sign": "_sign({0})",
    "floor": "{0}",
    "ceil": "{0}",
    "trunc": "{0}",
    "round": "{0}",
    "isnan": "{0} != {0}",
    "isinf": "{0} != {0}",
    "bit_and": "{0} & {1}",
    "bit_or": "{0} | {1}",
    "bit_xor": "{0} ^ {1}",
    "bit_not": "~{0}",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
}

TRUTH = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "select": "ct.where({0}, {1}, {2})",
    "add": "{0} | {1}",
    "mul": "{0} & {1}",
    "maximum": "{0} | {1}",
    "minimum": "{0} & {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "logical_not": "{0} ^ True",
    "bit_and": "{0} & {1}",
    "bit_or": "{0} | {1}",
    "bit_xor": "{0} ^ {1}",
    "bit_not": "{0} ^ True",
}


def template(fn: str, element: Attribute) -> str:
    """The template of a function for operands of this element type."""
    if isinstance(element, Float64Type):
        table = DOUBLE
    elif isinstance(element, AnyFloat):
        table = FLOAT
    else:
        table = TRUTH if element == IntegerType(1) else INTEGER
    if fn not in table:
        raise OptionError(f"the CUDA Tile target has no function {fn!r} of {element}; another target may")
    return table[fn]


def type_name(element: Attribute) -> str:
    """`ct.float32` and so on."""
    match element:
        case BFloat16Type():
            return "ct.bfloat16"
        case Float8E4M3FNType():
            return "ct.float8_e4m3fn"
        case Float8E5M2Type():
            return "ct.float8_e5m2"
        case Float16Type() | Float32Type() | Float64Type():
            return f"ct.float{element.bitwidth}"
        case IntegerType() if element.width.data == 1:
            return "ct.bool_"
        case IntegerType():
            unsigned = element.signedness.data == Signedness.UNSIGNED
            return f"ct.{'u' if unsigned else ''}int{element.width.data}"
    raise OptionError(f"the CUDA Tile target has no element type {element}")


HELPERS = {
    "_sign": """
def _sign(x):
    return ct.astype(x > 0, x.dtype) - ct.astype(x < 0, x.dtype)
""",
    "_trunc": """
def _trunc(x):
    return ct.where(x < 0, ct.ceil(x), ct.floor(x))
""",
    "_round": '''
def _round(x):
    """To the nearest whole number; halves go to the even one."""
    low = ct.floor(x)
    rest = x - low
    half = low * 0.5
    up = (rest > 0.5) | ((rest == 0.5) & (half != ct.floor(half)))
    return ct.where(up, low + 1.0, low)
''',
    "_atan": """
def _atan(x):
    return ct.atan2(x, ct.full(x.shape, 1.0, x.dtype))
""",
    "_log1p": '''
def _log1p(x):
    """log(1 + x) without losing a small x: the rounding error of 1 + x is divided out again."""
    u = 1.0 + x
    return ct.where((u == 1.0) | (u == float("inf")), x, ct.log(u) * (x / (u - 1.0)))
''',
    "_expm1": '''
def _expm1(x):
    """exp(x) - 1 without losing a small x: the rounding error of exp(x) is divided out again."""
    u = ct.exp(x)
    near = (u - 1.0) * (x / ct.log(u))
    return ct.where(u == 1.0, x, ct.where(ct.abs(x) < 0.5, near, u - 1.0))
''',
    "_erf": '''
def _erf(x):
    """The error function of f32, as a quotient of polynomials in x * x; 1 from 4 on."""
    t = ct.minimum(ct.maximum(x, -4.0, propagate_nan=True), 4.0, propagate_nan=True)
    s = t * t
    p = s * -2.72614225801306e-10 + 2.77068142495902e-08
    p = p * s + -2.10102402082508e-06
    p = p * s + -5.69250639462346e-05
    p = p * s + -7.34990630326855e-04
    p = p * s + -2.95459980854025e-03
    p = p * s + -1.60960333262415e-02
    q = s * -1.45660718464996e-05 + -2.13374055278905e-04
    q = q * s + -1.68282697438203e-03
    q = q * s + -7.37332916720468e-03
    q = q * s + -1.42647390514189e-02
    return t * p / q
''',
    "_truncate_divide": '''
def _truncate_divide(a, b):
    """a / b without its fraction."""
    q = a // b
    return q + ct.astype((q * b != a) & ((a < 0) != (b < 0)), q.dtype)
''',
    "_philox": f'''
def _philox(seed, offset):
    """Word offset % 4 of block offset // 4 of Philox 4x32-{ROUNDS}; 32-bit words are held in int64."""
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    c0, c1 = (offset >> 2) & 0xFFFFFFFF, (offset >> 34) & 0xFFFFFFFF
    c2, c3 = c0 * 0, c0 * 0
    for _ in range({ROUNDS}):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & 0xFFFFFFFF) ^ c1 ^ k0, b & 0xFFFFFFFF
        c2, c3 = ((a >> 32) & 0xFFFFFFFF) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word = offset & 3
    return ct.where(word < 2, ct.where(word == 0, c0, c1), ct.where(word == 2, c2, c3))
''',
}


def helpers(body: str) -> str:
    """The helpers that a kernel's text calls, one after another."""
    used = [name for name in HELPERS if re.search(rf"\b{name}\(", body)]
    return "".join(f"\n{HELPERS[name]}\n" for name in used)
