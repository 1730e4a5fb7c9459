"""What Triton's interpreter lacks: the functions of libdevice, matrix products of bf16, comparisons of scalars, and
rounding to 8 bits.

With TRITON_INTERPRET=1 kernels run as Python on the CPU, where libdevice (device code) does not exist. `install` puts
an object with the same functions in its place in an emitted module. Only tests and debugging come here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType

import numpy
import torch

_TORCH = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log10": torch.log10, "log1p": torch.log1p,
    "tanh": torch.tanh, "erfc": torch.erfc, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos,
    "atan": torch.atan, "atan2": torch.atan2, "sinh": torch.sinh, "cosh": torch.cosh, "pow": torch.pow,
    "trunc": torch.trunc, "rint": torch.round, "fmod": torch.fmod, "copysign": torch.copysign,
}  # fmt: skip


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def install(module: ModuleType) -> None:
    """Give an emitted module functions that the interpreter can run."""
    if hasattr(module, "libdevice"):
        module.libdevice = _Library()
    _teach()


@functools.cache
def _teach() -> None:
    """Four things that interpreters get wrong, some only in older versions.

    They hold bf16 as bits, and their product of matrices would multiply those as integers. They forget that a
    comparison gives truth values, which then become integers when they are broadcast. In the maximum of numbers that
    ignores NaN, NaN wins. To floats of 8 bits they do not round, and NaN becomes a number; the hardware
    makes the largest number of what is too large.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    plain_dot, plain_binary = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op
    plain_convert = InterpreterBuilder.create_fp_to_fp
    eight_bits = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    def create_dot(self, a, b, d, *rest):
        return plain_dot(self, widened(a), widened(b), d, *rest)

    def binary_op(self, lhs, rhs, op):
        result = plain_binary(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == numpy.bool_ else result

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        before, after = src.dtype.scalar, dst_type.scalar
        if before == tl.float32 and after in eight_bits:
            wide = torch.from_numpy(numpy.ascontiguousarray(src.data))
            most = torch.finfo(eight_bits[after]).max
            data = wide.clamp(-most, most).to(eight_bits[after]).view(torch.uint8)
        elif before in eight_bits and after == tl.float32:
            data = torch.from_numpy(numpy.ascontiguousarray(src.data)).view(eight_bits[before]).float()
        else:
            return plain_convert(self, src, dst_type, rounding_mode)
        return TensorHandle(data.numpy(), after)

    InterpreterBuilder.create_dot, InterpreterBuilder.binary_op = create_dot, binary_op
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)


class _Library:
    def __getattr__(self, name: str) -> Callable:
        fn = _TORCH[name]

        def call(*args):
            import triton.language as tl  # a package of others, imported only where it is installed
            from triton.runtime.interpreter import TensorHandle

            like = next(a for a in args if isinstance(a, tl.tensor))
            dtype = like.handle.data.dtype
            arrays = [a.handle.data if isinstance(a, tl.tensor) else numpy.asarray(a, dtype) for a in args]
            result = fn(*(torch.from_numpy(numpy.ascontiguousarray(a)) for a in numpy.broadcast_arrays(*arrays)))
            shape = max((a for a in args if isinstance(a, tl.tensor)), key=lambda a: a.handle.data.size)
            return tl.tensor(TensorHandle(result.numpy().astype(dtype), like.handle.dtype), shape.type)

        return call
