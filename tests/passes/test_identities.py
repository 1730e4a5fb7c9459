"""Arithmetic that looks as if it did nothing gives eager's bits: signed zeros, infinities, NaN, wrapped integers.

One program a dtype computes every expression below, on numbers where identities of the reals fail. `canonicalise`,
`fold` and the tile compiler may take out of it only what changes no bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from programs import trace_of
from torch import Tensor

import tessera
from tessera.ir.interp import run
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.fold import fold

NUMBERS = (0, 1, -1, 0.0, -0.0, 1.0, 2.0)

BINARY: dict[str, Callable] = {
    "add": lambda x, n: x + n,
    "sub": lambda x, n: x - n,
    "rsub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "floor_div": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "trunc_div": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "pow": lambda x, n: x**n,
    "sub_alpha": lambda x, n: torch.sub(x, n, alpha=2),
    "where": lambda x, n: torch.where(x == n, x, n),
    "sub_tensor": lambda x, n: x - torch.tensor(n),
    "mul_tensor": lambda x, n: x * torch.tensor(n),
    "fill": lambda x, n: torch.zeros_like(x).fill_(n) * x,
}
UNARY: dict[str, Callable] = {
    "neg_neg": lambda x: x.neg().neg(),
    "x_minus_x": lambda x: x - x,
    "x_over_x": lambda x: x / x,
    "plus_negative": lambda x: x + (-x),
    "minus_negative": lambda x: x - (-x),
    "relu_relu": lambda x: x.relu().relu(),
    "abs_neg": lambda x: (-x).abs(),
    "abs_abs": lambda x: x.abs().abs(),
    "maximum_same": lambda x: torch.maximum(x, x),
    "reciprocal_twice": lambda x: x.reciprocal().reciprocal(),
    "square": lambda x: x.square() - x * x,
    "wide_and_back": lambda x: x.double().to(x.dtype),
    "narrow_and_back": lambda x: x.to(torch.float16).to(x.dtype),
    "through_int": lambda x: x.to(torch.int32).to(x.dtype),
    "conj_conj": lambda x: x.conj().conj().resolve_conj() + 0,
    "not_not": lambda x: torch.logical_not(torch.logical_not(x)),
    "positive": lambda x: +x,
    "clone_add": lambda x: x.clone() + 0,
    "zero_dim": lambda x: (x[0] + 0.0) - (-0.0),
    "zero_dim_times": lambda x: x * x[2],
}
FLOATS = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan, 1e-40, 65504.0]
VALUES = {
    torch.float32: [*FLOATS, 3e38, 1e-45],
    torch.bfloat16: FLOATS,
    torch.int32: [0, 1, -1, 7, -8, 2**31 - 1, -(2**31)],
    torch.int8: [0, 1, -1, 7, -8, 127, -128],
    torch.uint8: [0, 1, 2, 7, 255],
    torch.bool: [True, False, True],
    torch.complex64: [
        0j,
        complex(-0.0, 0.0),
        complex(0.0, -0.0),
        1 + 2j,
        complex(math.inf, 1.0),
        complex(math.nan, 0.0),
    ],
}
# The smallest integer has no quotient by -1: an x86 processor ends the process, eager's too.
DIVISIONS, OVERFLOWS = {"floor_div", "trunc_div"}, {torch.int32, torch.int8}
UNDEFINED = {"through_int", "narrow_and_back"}  # what a float outside the range of integers becomes is the machine's


def expressions(x: Tensor) -> list[tuple[str, Callable]]:
    """Those that eager computes for this tensor."""
    listed = [(name, fn) for name, fn in UNARY.items() if name not in UNDEFINED or x.dtype is torch.int8]
    for name, fn in BINARY.items():
        for n in NUMBERS:
            if not (name in DIVISIONS and n == -1 and x.dtype in OVERFLOWS):
                listed.append((f"{name} {n!r}", lambda x, fn=fn, n=n: fn(x, n)))
    return [(name, fn) for name, fn in listed if _runs(fn, x)]


def _runs(fn: Callable, x: Tensor) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fn(x)
    except (RuntimeError, ZeroDivisionError, NotImplementedError):  # eager refuses it
        return False
    return True


def bits(x: Tensor) -> list[object]:
    """Numbers as they are told apart: every NaN is one, 0.0 and -0.0 are two."""
    if x.is_complex():
        return [(repr(z.real), repr(z.imag)) for z in x.resolve_conj().flatten().tolist()]
    return [repr(n) for n in x.flatten().tolist()]


def check_program(program: Callable, x: Tensor, got: object, listed: list[tuple[str, Callable]]) -> None:
    for (name, _), mine, theirs in zip(listed, got, program(x), strict=True):  # type: ignore[call-overload]
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        assert bits(mine) == bits(theirs), f"{name}: {mine}, not {theirs}"


def program_of(listed: list[tuple[str, Callable]]) -> Callable:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()  # a value of the program's own: nothing keeps a rewrite from giving it back
        return tuple(fn(y).clone() for _, fn in listed)  # nor from giving it back in place of a result

    return program


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_passes_keep_every_bit(dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES[dtype], dtype=dtype)
    listed = expressions(x)
    program = program_of(listed)
    trace = trace_of(program, x)
    for differentiable in (True, False):
        after = cse(fold(canonicalise(trace, differentiable=differentiable)))
        check_program(program, x, run(after, x), listed)
    assert len(after.equations) < len(trace.equations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_kernels_keep_every_bit(dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES[dtype], dtype=dtype)
    few = ("add ", "sub ", "mul ", "div ", "sub_tensor", "neg_neg", "minus_negative", "zero_dim")
    listed = [(name, fn) for name, fn in expressions(x) if name.startswith(few)]
    program = program_of(listed)
    check_program(program, x, tessera.jit(program, frontend="functional", strict=True)(x), listed)


def test_minus_zero_through_the_whole_compiler() -> None:
    def reciprocal(x: Tensor) -> Tensor:
        return 1.0 / (x * 2 - (-0.0))

    x = torch.tensor([0.0, -0.0, 1.0])
    assert bits(tessera.jit(reciprocal)(x)) == bits(reciprocal(x)) == ["inf", "inf", "0.5"]
