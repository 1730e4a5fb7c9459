"""The printed trace is Python that runs and gives what the trace gives."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from programs import copies, random_program, same_bits, trace_of

import tessera
from tessera.ir.interp import run
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace, print_module, print_trace
from tessera.passes.memory.reinplace import separate


def check(trace, fn, args):
    left, right = copies(args), copies(args)
    torch.manual_seed(1)
    expected = run(trace, *left)
    torch.manual_seed(1)
    got = fn(*right)
    assert all(same_bits(e, g) for e, g in zip(expected, got, strict=True))
    assert all(same_bits(e, g) for e, g in zip(left, right, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_compiled_program(seed):
    program, args = random_program(seed)
    trace = separate(trace_of(program, *args))
    check(trace, compile_trace(trace), args)
    check(trace, compile_trace(trace, dead=lifetimes(trace)), args)


@pytest.mark.parametrize("seed", range(5))
def test_saved_program_runs_by_itself(seed, tmp_path):
    program, args = random_program(seed)
    trace = separate(trace_of(program, *args))
    path = tmp_path / "program.py"
    trace.save(str(path))
    spec = importlib.util.spec_from_file_location("saved_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check(trace, module.program, args)


def test_sizes_that_are_rounded(tmp_path):
    """A size times a fraction is `math.trunc(…)` in the program, whoever runs it."""
    grown = trace_of(
        lambda x: x.new_ones(torch.sym_int(x.shape[0] * 1.5), 2) * x.sum(), x := torch.randn(5, 2), dynamic=(0,)
    )
    assert "math.trunc" in print_trace(grown)
    grown.save(str(path := tmp_path / "program.py"))
    spec = importlib.util.spec_from_file_location("saved_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for n in (5, 9):
        x = torch.randn(n, 2)
        for fn in (compile_trace(grown), module.program):
            torch.testing.assert_close(fn(x)[0], x.new_ones(n * 3 // 2, 2) * x.sum())


def test_one_line_an_equation():
    trace = trace_of(lambda x: (x * 2).relu(), torch.randn(3))
    lines = print_trace(trace).splitlines()
    assert [line.strip().split(" ")[0] for line in lines if " = " in line] == ["mul", "relu"]
    assert "f32[3]" in lines[2] and "test_printer.py" in lines[2]
    assert "aten.mul(x0, 2)" in print_module(trace)


def test_special_numbers():
    trace = trace_of(lambda x: x.clamp(float("-inf"), float("inf")) * float("nan"), torch.randn(3))
    assert compile_trace(trace)(torch.ones(3))[0].isnan().all()


@pytest.mark.parametrize("real", [0.0, -0.0, 1.5, -math.inf, math.nan])
@pytest.mark.parametrize("imag", [0.0, -0.0, -2.0, math.inf, math.nan])
def test_complex_numbers(real: float, imag: float):
    """Python has no literal of one: `(-0-2j)` is a difference, and `infj` is a name."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, complex(real, imag))

    x = torch.zeros(1, dtype=torch.complex128)
    for got in (compile_trace(trace_of(fn, x))(x)[0], tessera.jit(fn)(x)):
        assert repr(got.item()) == repr(complex(real, imag))


def test_deleted_values_are_gone():
    trace = trace_of(lambda x: ((x + 1) * 2).relu(), torch.randn(3))
    source = compile_trace(trace, dead=lifetimes(trace)).source
    assert "del add" in source and "del mul" in source and "del relu" not in source
