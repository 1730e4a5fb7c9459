"""Reductions in parts: which kernels can be split, that the parts give the whole, and where few long rows are."""

from __future__ import annotations

import itertools

import kernels
import pytest
import torch
from kernels import Case

from tessera.tile.dialect.build import KernelBuilder, f32
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.interp import run
from tessera.tile.dialect.ops import PARALLEL, KernelOp
from tessera.tile.dialect.overwrite import overwrites
from tessera.tile.rewrites.split_kernel import Split
from tessera.tile.rewrites.split_reduction import can_split, ends_all, split_reduction
from tessera.tile.schedules.schedule import reduced_axis
from tessera.tile.targets import named
from tessera.util.names import names

EDGES = [
    kernels.softmax_sums(9, 43, torch.float32, fn, infinite)
    for fn, infinite in itertools.product(("exp", "exp2"), ("itself", "zero"))
]
CASES = [case for case in (*kernels.cases(), *EDGES, kernels.softmax(3, 64)) if can_split(case.kernel)]


def by_interpreter(made: Split, case: Case) -> list[torch.Tensor]:
    values = dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))
    results = [t.clone() for t in case.tensors]
    for s in made.scratch:
        size, dtype = s.size.evaluate(values.__getitem__, int), torch_dtype(s.element)
        results.append(torch.full((size,), float("nan") if dtype.is_floating_point else 1, dtype=dtype))
    run(made.first, results, case.symbols)
    run(made.second, results, case.symbols)
    return results[: len(case.tensors)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name + ("-dynamic" if c.symbols else ""))
def test_parts_give_the_whole(case: Case) -> None:
    for parts in (2, 3, 8, 50):  # of the last, some parts are empty
        case.check(by_interpreter(split_reduction(case.kernel, parts), case))


def test_which_can_be_split() -> None:
    found = {case.name.split("-")[0] for case in CASES}
    rows = "softmax layer_norm rms_norm cross_entropy softmax_sums"
    others = "flags column_sum middle_max full_sum matmul matvec"
    assert found >= names(f"{rows} {others}")
    for make in (kernels.argmax, kernels.cumsum, kernels.norm_backward, kernels.pointwise):
        assert not can_split(make().kernel)  # a place, a scan, a sequential axis, no reduction


def test_a_softmax_is_two_kernels_and_one_read_more() -> None:
    made = split_reduction(kernels.softmax(8, 4096).kernel, 16)
    assert reduced_axis(made.first) == "r" and len(made.scratch) == 2
    assert made.second.axis_names(PARALLEL) == ("i", "r")
    assert not ends_all(kernels.softmax().kernel) and ends_all(kernels.cross_entropy().kernel)
    lone = split_reduction(kernels.cross_entropy(8, 4096).kernel, 16)
    assert lone.second.axis_names(PARALLEL) == ("i",)


def row_kernel(again: bool, one_buffer: bool) -> KernelOp:
    """z[i] = y[i] + the sum of row i; with `again`, the row over that sum as well."""
    k = KernelBuilder("rows")
    i, r = k.axis("i", 3), k.axis("r", 64, reduce=True)
    x, y = k.buffer(f32), k.buffer(f32)
    z = k.buffer(f32)
    value = k.load(x, i * 64 + r)
    total = k.apply("add", k.load(y, i), k.reduce("sum", value, "r"))
    k.store(total, z, i)
    if again:
        k.store(k.apply("div", value, total), x if one_buffer else k.buffer(f32), i * 64 + r)
    return k.finish()


def test_no_program_reads_what_another_has_written() -> None:
    """z may lie where y is, unless every block of the row reads y; and a row may not be written where it is read."""
    assert can_split(row_kernel(False, False)) and overwrites(row_kernel(False, False)) == {2: (1,)}
    assert can_split(row_kernel(True, False)) and not any(overwrites(row_kernel(True, False)).values())
    assert not can_split(row_kernel(True, True))


@pytest.mark.parametrize("which", ["cpu", "triton", "cuda_tile"])
def test_few_long_rows_are_shared_out(which: str) -> None:
    target = named(which)
    if target is None:
        pytest.skip("not installed")
    for make, shape in itertools.product((kernels.softmax, kernels.softmax_sums), ((1, 1_000_000), (8, 128256))):
        kernel = make(2, 2, dynamic=True).kernel
        found = target.propose(kernel, {"n": shape[0], "m": shape[1]})[0]
        assert (found.split > 1) == (which != "cpu" or shape[0] == 1), (which, shape, found)
        assert target.propose(kernel, {"n": 100_000, "m": 1000})[0].split == 1
