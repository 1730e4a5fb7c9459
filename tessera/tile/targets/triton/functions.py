"""The elementwise functions of the tile dialect in Triton's words, and the small helpers that emitted modules use.

`FLOAT`, `INTEGER` and `TRUTH` map a function's name to a template over its arguments, by the kind of its operands;
`FAST` replaces a few of them in kernels whose floats are 16 bits wide (`all_narrow`), where an error of some 1e-6 is
far below rounding. Names are those that Triton has had since 3.6. Helpers stand in an emitted module only where it
uses them.
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

from tessera.tile.dialect.ops import KernelOp, LoadOp, StoreOp
from tessera.tile.dialect.types import element_of
from tessera.util.philox import ROUNDS

_COMMON = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "maximum": "_maximum({0}, {1})",
    "minimum": "_minimum({0}, {1})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) != ({1} != 0)",
    "logical_not": "{0} == 0",
    "select": "tl.where({0}, {1}, {2})",
}

FLOAT = {
    **_COMMON,
    "div": "tl.div_rn({0}, {1})",
    "floordiv": "_floor_divide({0}, {1})",
    "truncdiv": "libdevice.trunc(tl.div_rn({0}, {1}))",
    "mod": "_remainder({0}, {1})",
    "fmod": "_fmod({0}, {1})",
    "abs": "tl.abs({0})",
    "sign": "_sign({0})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "fma": "tl.fma({0}, {1}, {2})",
    "exp": "libdevice.exp({0})",
    "exp2": "libdevice.exp2({0})",
    "expm1": "libdevice.expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log10": "libdevice.log10({0})",
    "log1p": "libdevice.log1p({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "_rsqrt({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
    "tanh": "libdevice.tanh({0})",
    "erf": "tl.erf({0})",
    "erfc": "libdevice.erfc({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tan": "libdevice.tan({0})",
    "asin": "libdevice.asin({0})",
    "acos": "libdevice.acos({0})",
    "atan": "libdevice.atan({0})",
    "atan2": "_atan2({0}, {1})",
    "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})",
    "pow": "_pow({0}, {1})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "libdevice.trunc({0})",
    "round": "libdevice.rint({0})",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
}

# Division and square root of f64 are exact without being told so.
DOUBLE = {
    **FLOAT,
    "div": "{0} / {1}",
    "truncdiv": "libdevice.trunc({0} / {1})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "atan2": "libdevice.atan2({0}, {1})",
    "pow": "libdevice.pow({0}, {1})",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))",
}

FAST = {
    **FLOAT,
    "div": "{0} / {1}",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "sqrt": "tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "tanh": "_tanh({0})",
}

INTEGER = {
    **_COMMON,
    "floordiv": "_floor_divide_int({0}, {1})",
    "truncdiv": "{0} // {1}",  # Triton divides integers toward zero
    "mod": "_remainder_int({0}, {1})",
    "fmod": "{0} % {1}",
    "abs": "tl.abs({0})",
    "sign": "_sign({0})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "fma": "{0} * {1} + {2}",
    "pow": "_power_int({0}, {1})",
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
    **_COMMON,
    "add": "{0} | {1}",
    "mul": "{0} & {1}",
    "sub": "{0} ^ {1}",
    "maximum": "{0} | {1}",
    "minimum": "{0} & {1}",
    "fmax": "{0} | {1}",
    "fmin": "{0} & {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "logical_not": "{0} ^ True",
    "bit_and": "{0} & {1}",
    "bit_or": "{0} | {1}",
    "bit_xor": "{0} ^ {1}",
    "bit_not": "{0} ^ True",
    "abs": "{0}",
    "sign": "{0}",
    "isnan": "{0} != {0}",
    "isinf": "{0} != {0}",
}


def template(fn: str, element: Attribute, fast: bool) -> str:
    """The template of a function for operands of this element type."""
    match element:
        case Float64Type():
            table = DOUBLE
        case _ if isinstance(element, AnyFloat):
            table = FAST if fast else FLOAT
        case IntegerType() if element.width.data == 1:
            table = TRUTH
        case _:
            table = INTEGER
    if fn not in table:
        raise NotImplementedError(f"the Triton target has no {fn!r} for {element}")
    return table[fn]


def all_narrow(kernel: KernelOp) -> bool:
    """Whether floats have 16 bits or fewer where a kernel has most of its points; a row's statistics may be wider."""
    narrow: dict[int, set[bool]] = {}
    for op in kernel.block.ops:
        if isinstance(op, (LoadOp, StoreOp)) and isinstance(element_of(op.buffer), AnyFloat):
            axes = set(kernel.axis_names()) & op.at.expr.names()
            narrow.setdefault(len(axes), set()).add(element_of(op.buffer).bitwidth <= 16)  # type: ignore[attr-defined]
    return all(narrow[max(narrow)]) if narrow else True


def type_name(element: Attribute) -> str:
    """`tl.float32` and so on."""
    match element:
        case BFloat16Type():
            return "tl.bfloat16"
        case Float8E4M3FNType():
            return "tl.float8e4nv"
        case Float8E5M2Type():
            return "tl.float8e5"
        case Float16Type() | Float32Type() | Float64Type():
            return f"tl.float{element.bitwidth}"
        case IntegerType():
            unsigned = element.signedness.data == Signedness.UNSIGNED
            return f"tl.{'u' if unsigned else ''}int{element.width.data}"
    raise NotImplementedError(f"the Triton target has no element type {element}")


def signature_name(element: Attribute) -> str:
    """The name of the element type in a signature handed to `triton.compile`."""
    name = type_name(element).removeprefix("tl.")
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    short |= {"float8e4nv": "fp8e4nv", "float8e5": "fp8e5"}
    return short.get(name) or name.replace("uint", "u").replace("int", "i")


HELPERS = {
    "_pairs": '''
def _pairs(x, rows: tl.constexpr, half: tl.constexpr):
    """Neighbours of every row added. Threads hold whole pairs then, and with them rows: what is left needs few
    exchanges between warps, where a column's sum over blocks as they were loaded needs many, on the same banks."""
    a, b = tl.split(tl.reshape(x, [rows, half, 2]))
    return a + b
''',
    "_e5m2": '''
def _e5m2(x):
    """float32 to 8 bits, to the nearest and then to the even one, by whole numbers alone: the hardware knows no
    infinity there, and kernels that asked it gave NaN for every other number on an H200 (Triton 3.6)."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - 448  # a bias of 127, then one of 15
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000  # steps of 2**-16
    code = tl.where(size < 0x38800000, small, tl.minimum(normal, 0x7C))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8).to(tl.float8e5, bitcast=True)
''',
    "_maximum": '''
def _maximum(a, b):
    """The larger one; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_minimum": '''
def _minimum(a, b):
    """The smaller one; NaN wins."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_product": """
def _product(a, b):
    return a * b
""",
    "_argmax": '''
def _argmax(a, i, b, j):
    """The larger value and its place; NaN is largest, and the first of equals wins."""
    same = (a == b) | ((a != a) & (b != b))
    keep = (a > b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(keep, a, b), tl.where(keep, i, j)
''',
    "_argmin": '''
def _argmin(a, i, b, j):
    """The smaller value and its place; NaN is smallest, and the first of equals wins."""
    same = (a == b) | ((a != a) & (b != b))
    keep = (a < b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(keep, a, b), tl.where(keep, i, j)
''',
    "_random": f'''
def _random(seed, offset):
    """Word offset % 4 of block offset // 4 of Philox 4x32-{ROUNDS}; neighbours that a thread holds share a block."""
    a, b, c, d = tl.randint4x(seed, offset >> 2, n_rounds={ROUNDS})
    word = offset & 3
    chosen = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return chosen.to(tl.uint32, bitcast=True).to(tl.int64)
''',
    "_tanh": '''
def _tanh(x):
    """By one exponential; near zero, where that would cancel, the first terms of the series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (square * 0.13333334 - 0.33333334))
    return tl.where(square < 0.01, near, tl.where(x < 0, -far, far))
''',
    "_sign": """
def _sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
""",
    # The library of f32 takes subnormal numbers for zeros. Where that changes a result by more than their size, they
    # are scaled first.
    "_rsqrt": """
def _rsqrt(x):
    small = x < 1.1754944e-38
    return tl.rsqrt(tl.where(small, x * 16777216.0, x)) * tl.where(small, 4096.0, 1.0)
""",
    "_atan2": """
def _atan2(y, x):
    scale = tl.where((tl.abs(x) < 1e-30) & (tl.abs(y) < 1e-30), 16777216.0, 1.0)
    return libdevice.atan2(y * scale, x * scale)
""",
    "_pow": """
def _pow(x, y):
    small = (tl.abs(x) < 1.1754944e-38) & (x != 0)
    power = libdevice.pow(tl.where(small, x * 16777216.0, x), y)
    return tl.where(small, power * libdevice.exp2(-24.0 * y), power)
""",
    "_fmod": """
def _fmod(a, b):
    scale = tl.where((tl.abs(b) < 1e-30) & (tl.abs(a) < 1e30), 16777216.0, 1.0)
    return libdevice.fmod(a * scale, b * scale) / scale
""",
    "_remainder": '''
def _remainder(a, b):
    """a mod b with the sign of b."""
    r = _fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
''',
    "_floor_divide": '''
def _floor_divide(a, b):
    """The floor of a / b, without the error that rounding a / b first would bring."""
    r = _fmod(a, b)
    q = (a - r) / b
    q = tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1, f)
    f = tl.where(q == 0, libdevice.copysign(q * 0, a / b), f)
    return tl.where(b == 0, a / b, f)
''',
    "_remainder_int": '''
def _remainder_int(a, b):
    """a mod b with the sign of b."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
''',
    "_floor_divide_int": '''
def _floor_divide_int(a, b):
    """The floor of a / b."""
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
''',
    "_power_int": '''
def _power_int(a, b):
    """a to the power b by squaring; a negative power is 0 but for a = 1 and a = -1."""
    e = tl.where(b < 0, b & 1, b)
    total = a * 0 + b * 0 + 1
    square = a + b * 0
    for _ in range(63):
        total = tl.where((e & 1) == 1, total * square, total)
        square = square * square
        e = e >> 1
    return tl.where((b < 0) & (a != 1) & (a != -1), 0, total)
''',
}


def helpers(body: str) -> str:
    """The helpers that a kernel's text calls, each compiled by Triton, one after another."""
    used: list[str] = []
    for name in reversed(HELPERS):  # a helper calls those before it alone
        if re.search(rf"\b{name}\b", "\n".join([body, *(HELPERS[caller] for caller in used)])):
            used.insert(0, name)
    return "".join(f"\n\n@triton.jit{HELPERS[name]}" for name in used)
