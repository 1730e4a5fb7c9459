"""Sums along a parallel axis: what is allowed, and that one in parts gives the same."""

from __future__ import annotations

import kernels
import pytest
import torch
from kernels import Case
from xdsl.utils.exceptions import VerifyException

from tessera.tile.dialect.build import KernelBuilder, bf16, f32
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import KernelOp, ReduceOp, StoreOp
from tessera.tile.rewrites.split_reduction import Split, can_split
from tessera.tile.rewrites.split_rows import can_split_rows, split_rows
from tessera.tile.rewrites.split_sequential import split_sequential
from tessera.tile.schedules.schedule import after_sums, plan

CASES = kernels.sequential_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_interpreter_is_right(case: Case) -> None:
    results = [t.clone() for t in case.tensors]
    run(case.kernel, results, case.symbols)
    case.check(results)


@pytest.mark.parametrize("parts", [1, 2, 7, 30])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_parts(case: Case, parts: int) -> None:
    check_halves(case, split_sequential(case.kernel, parts))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_then_columns(case: Case) -> None:
    assert can_split_rows(case.kernel)
    halves = split_rows(case.kernel)
    assert halves.first.sequential_axis is halves.second.sequential_axis is None
    assert halves.second.axis_names("reduce") == (case.kernel.sequential_axis,)
    check_halves(case, halves)


def check_halves(case: Case, halves: Split) -> None:
    values = dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))
    results = [t.clone() for t in case.tensors]
    for s in halves.scratch:
        size = s.size.evaluate(values.__getitem__, int)
        results.append(torch.full((size,), float("nan"), dtype=torch_dtype(s.element)))
    run(halves.first, results, case.symbols)
    run(halves.second, results, case.symbols)
    case.check(results[: len(case.tensors)])


def test_passes_of_one_step_and_what_comes_after() -> None:
    kernel = kernels.norm_backward().kernel
    assert kernel.sequential_axis == "i" and not can_split(kernel)
    later = after_sums(kernel)
    assert sum(isinstance(op, StoreOp) for op in later) == 2
    loops = [step for step in plan(kernel) if step.axis is not None]
    sums = [op for step in loops for op in step.ops if isinstance(op, ReduceOp) and op.axis.data == "i"]
    assert len(loops) == 2 and len(sums) == 2 and not {op for step in loops for op in step.ops} & set(later)


def built(body) -> KernelOp:  # noqa: ANN001
    k = KernelBuilder("wrong")
    i, r = k.axis("i", 4), k.axis("r", 8, reduce=True)
    body(k, i, r, k.load(k.buffer(f32), i * 8 + r))
    return k.finish()


@pytest.mark.parametrize(
    "body",
    [
        lambda k, i, r, x: k.store(k.reduce("max", x, "i"), k.buffer(f32), r),
        lambda k, i, r, x: k.store(k.reduce("sum", k.reduce("sum", x, "r"), "i"), k.buffer(f32), 0),
        lambda k, i, r, x: k.store(k.reduce("sum", k.reduce("sum", x, "i"), "r"), k.buffer(f32), 0),
        lambda k, i, r, x: k.store(k.reduce("sum", k.cast(x, bf16), "i"), k.buffer(bf16), r),
        lambda k, i, r, x: k.store(k.apply("mul", x, k.reduce("sum", x, "i")), k.buffer(f32), i * 8 + r),
    ],
    ids=["no sum", "of no row", "reduced again", "narrow", "used by the rows"],
)
def test_refused(body) -> None:  # noqa: ANN001
    with pytest.raises(VerifyException):
        built(body)
