"""The interpreter gives what eager PyTorch gives; every other test leans on it."""

from __future__ import annotations

import pytest
import torch
from programs import copies, random_program, same_bits, trace_of

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.interp import run
from tessera.ir.printer import compile_trace
from tessera.ir.trace import Trace
from tessera.ir.types import type_of
from tessera.util.errors import InputError


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    fn, args = random_program(seed)
    trace = trace_of(fn, *args)
    left, right = copies(args), copies(args)
    torch.manual_seed(seed)
    expected = fn(*left)
    torch.manual_seed(seed)
    got = run(trace, *right)
    assert all(same_bits(e, g) for e, g in zip(expected, got, strict=True))
    assert all(same_bits(e, g) for e, g in zip(left, right, strict=True))


@pytest.mark.parametrize("n", [1, 3, 8])
def test_symbolic_sizes(n):
    def fn(x):
        return x.reshape(x.shape[0] * 2, 2) + x.shape[0], x.new_zeros(x.shape[0] // 2 + 1)

    trace = trace_of(fn, torch.randn(6, 4), dynamic=(0,))
    x = torch.randn(n, 4)
    assert all(same_bits(e, g) for e, g in zip(fn(x), run(trace, x), strict=True))


def test_sizes_known_at_run_time():
    trace = trace_of(lambda x: torch.nonzero(x).float().sum() / torch.nonzero(x).shape[0], torch.ones(4), dynamic=(0,))
    assert run(trace, torch.tensor([0.0, 1.0, 1.0]))[0] == 1.5


def test_swap_of_two_inputs():
    """Mutations happen together: neither copy sees the other."""
    x, y = Value("x", type_of(torch.randn(2))), Value("y", type_of(torch.randn(2)))
    trace = Trace("swap", (x, y), (), (x,), {x: y, y: x})
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    (old,) = run(trace, a, b)
    assert a.tolist() == [3, 4] and b.tolist() == [1, 2] and old.tolist() == [1, 2]


def test_sub_traces_are_called():
    x = torch.randn(3)
    body = trace_of(lambda x: x * 2, x).with_(name="body")
    v = Value("v", type_of(x))
    twice = Special("twice", lambda f, x: f(*f(x)))
    eqn = Equation(twice, (body, v), {}, (Value("out", type_of(x)),), many=True)
    trace = Trace("outer", (v,), (eqn,), (eqn.outputs[0],))
    assert torch.equal(run(trace, x)[0], x * 4)
    assert torch.equal(compile_trace(trace)(x)[0], x * 4)


def test_wrong_number_of_arguments():
    with pytest.raises(InputError, match="expected 1 arguments, got 2"):
        run(trace_of(lambda x: x + 1, torch.ones(1)), torch.ones(1), torch.ones(1))
