"""Operators over lists of tensors, item by item, give what PyTorch's give."""

from __future__ import annotations

import pytest
import torch
from programs import trace_of

from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.passes.decompose.apply import decompose
from tessera.tile.from_trace.region import why_not

A = [torch.rand(s) + 0.5 for s in ((4,), (2, 3), (1, 5))]
B = [torch.rand_like(a) + 0.5 for a in A]
C = [torch.rand_like(a) + 0.5 for a in A]
SCALARS = [1.0, 2.0, 3.0]

CASES = {
    "add of lists": lambda a, b, c: torch._foreach_add(a, b, alpha=-0.5),
    "add of a number": lambda a, b, c: torch._foreach_add(a, 2.0),
    "mul by numbers": lambda a, b, c: torch._foreach_mul(a, SCALARS),
    "div of lists": lambda a, b, c: torch._foreach_div(a, b),
    "addcmul": lambda a, b, c: torch._foreach_addcmul(a, b, c, 0.5),
    "addcdiv by numbers": lambda a, b, c: torch._foreach_addcdiv(a, b, c, SCALARS),
    "lerp": lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    "lerp of lists": lambda a, b, c: torch._foreach_lerp(a, b, c),
    "pow": lambda a, b, c: torch._foreach_pow(a, 3.0),
    "maximum": lambda a, b, c: torch._foreach_maximum(a, b),
    "clamp_max": lambda a, b, c: torch._foreach_clamp_max(a, 1.0),
    "sqrt": lambda a, b, c: torch._foreach_sqrt(a),
}


@pytest.mark.parametrize("name", CASES)
def test_item_by_item(name):
    def program(*xs):
        return list(CASES[name](list(xs[:3]), list(xs[3:6]), list(xs[6:])))

    trace = trace_of(program, *A, *B, *C)
    made = decompose(trace, lambda eqn: not why_not(eqn))
    verify(made)
    assert not any("foreach" in eqn.op._opname for eqn in made.equations)
    torch.testing.assert_close(list(run(made, *A, *B, *C)), program(*A, *B, *C))


def test_the_norm_stays_whole():
    trace = trace_of(lambda *xs: list(torch._foreach_norm(list(xs))), *A)
    assert decompose(trace, lambda eqn: not why_not(eqn)) is trace
