"""Reductions down columns on a GPU: what is proposed keeps many bytes on their way, by several blocks a step.

That a step of several blocks gives the right numbers is tried in `triton_cases.py`, under Triton's interpreter.
"""

from __future__ import annotations

import re

import pytest

from tessera.tile.dialect.build import KernelBuilder, bf16, f32
from tessera.tile.dialect.index import Index
from tessera.tile.dialect.ops import KernelOp, LoadOp, ReduceOp
from tessera.tile.schedules.schedule import Schedule, plan
from tessera.tile.targets import missing

pytestmark = pytest.mark.skipif(bool(missing("triton")), reason=missing("triton"))

from on_h200 import propose  # noqa: E402

from tessera.tile.targets.triton.halves import halves, schedules  # noqa: E402
from tessera.tile.targets.triton.layout import Dim  # noqa: E402
from tessera.tile.targets.triton.resources import compile_only  # noqa: E402
from tessera.tile.targets.triton.tiles import write  # noqa: E402
from tessera.tile.targets.triton.unroll import BLOCKS, blocks_of_a_step, loads_first  # noqa: E402

REGISTERS = 65536  # of a multiprocessor


def sums(n: int, m: int, loads: int, store: bool = False, element=bf16) -> KernelOp:
    """Sums over n rows of the product of several matrices, and of the first of them, as a batch norm's gradient has."""
    k = KernelBuilder("sums")
    i, r = k.axis("i", m), k.axis("r", n, reduce=True)
    at = r * m + i
    values = [k.cast(k.load(k.buffer(element), at), f32) for _ in range(loads)]
    product = values[0]
    for v in values[1:]:
        product = k.apply("mul", product, v)
    if store:
        k.store(k.cast(product, element), k.buffer(element), at)
    for v in dict.fromkeys((values[0], product)):
        k.store(k.reduce("sum", v, "r"), k.buffer(f32), i)
    return k.finish()


BATCH_NORMS = [(401408, 64), (401408, 256), (100352, 512), (25088, 1024), (6272, 2048)]


@pytest.mark.parametrize("loads", [1, 3, 5])
@pytest.mark.parametrize(("n", "m"), BATCH_NORMS, ids=lambda size: str(size))
def test_parts_have_whole_steps(n: int, m: int, loads: int) -> None:
    """A mask at every access costs registers, and the compiler then loads one block after the other."""
    kernel = sums(n, m, loads)
    schedule = propose(kernel, {})[0]
    steps = schedule.block("r") * schedule.split
    assert n % steps == 0
    assert 132 <= schedule.split * max(m // schedule.block("i"), 1) <= 132 * 32 // schedule.warps
    made = halves(kernel, schedule)
    assert "mask" not in write(made.first, schedules(kernel, schedule, made)[0])


@pytest.mark.parametrize(
    ("loads", "store", "element", "warps"),
    [(1, False, bf16, 32), (1, False, f32, 32), (3, False, bf16, 32), (4, True, bf16, 16), (5, False, bf16, 16)],
    ids=["one", "one-f32", "three", "four-stored", "five"],
)
def test_as_many_warps_fit_as_were_meant(loads: int, store: bool, element, warps: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    kernel = sums(100352, 512, loads, store, element)
    schedule = propose(kernel, {})[0]
    made = halves(kernel, schedule)
    first, second = (
        compile_only(half, how, 90)
        for half, how in zip((made.first, made.second), schedules(kernel, schedule, made), strict=True)
    )
    assert first.spills == 0 and second.spills == 0
    assert first.registers * 32 * warps <= REGISTERS, first
    assert first.shared * (warps // schedule.warps) <= 227 * 1024, first
    assert re.search(r"ld\.global\.v4|cp\.async\.cg\.shared\.global [^;]*0x10", first.ptx), "16 bytes an access"


def test_loads_of_a_step_come_before_its_arithmetic() -> None:
    kernel = sums(4096, 256, 2)
    text = write(kernel, Schedule((("i", 64), ("r", 8)), loop=True, extra=((BLOCKS, 4),)))
    loop = [line.strip() for line in text.split("for r0 in range(0, 4096, 32):")[1].splitlines()]
    loads = [n for n, line in enumerate(loop) if "tl.load" in line]
    adds = [n for n, line in enumerate(loop) if line.startswith("sum_")]
    assert len(loads) == 8 and max(loads) < min(adds)
    assert text.count("tl.full(") == 2 and text.count("_pairs(sum_") == 2  # one block is carried for each sum
    assert "4 a step" in text


def test_blocks_of_a_step_leave_no_rest() -> None:
    kernel = sums(96, 64, 1)
    (loop,) = (step for step in plan(kernel) if step.axis is not None)
    schedule = Schedule(loop=True, extra=((BLOCKS, 8),))
    found = {n: blocks_of_a_step(schedule, loop.ops, Dim(("r",), (Index.of(n),), 8, True)) for n in (128, 96, 72, 100)}
    assert found == {128: 8, 96: 4, 72: 1, 100: 8}  # the last is masked anyway
    assert blocks_of_a_step(Schedule(loop=True), loop.ops, Dim(("r",), (Index.of(128),), 8, True)) == 1


def test_what_waits_for_a_load_is_not_loaded_first() -> None:
    k = KernelBuilder("masked")
    i, r = k.axis("i", 64), k.axis("r", 32, reduce=True)
    plain = k.load(k.buffer(f32), r * 64 + i)
    known = k.load(k.buffer(f32), r * 64 + i, mask=k.apply("lt", k.iota(r), k.iota(i)), other=k.constant(0.0, f32))
    found = k.apply("lt", plain, k.constant(1.0, f32))
    late = k.load(k.buffer(f32), r * 64 + i, mask=found, other=k.constant(0.0, f32))
    k.store(k.reduce("sum", k.apply("mul", known, late), "r"), k.buffer(f32), i)
    (loop,) = (step for step in plan(k.finish()) if step.axis is not None)
    first, rest = loads_first(loop.ops)
    assert [op.results[0] for op in first if isinstance(op, LoadOp)] == [plain, known]
    assert late.owner in rest and found.owner in rest and any(isinstance(op, ReduceOp) for op in rest)
    assert first == [op for op in loop.ops if op in first] and known.owner is first[-1]  # after what its mask needs


def test_a_kernel_that_joins_parts_loads_before_it_waits() -> None:
    kernel = sums(100352, 512, 3)
    schedule = propose(kernel, {})[0]
    made = halves(kernel, schedule)
    lines = write(made.second, schedules(kernel, schedule, made)[1]).splitlines()
    loads = [n for n, line in enumerate(lines) if "tl.load" in line]
    assert len(loads) == 2 and max(loads) < min(n for n, line in enumerate(lines) if "tl.sum" in line)


def test_nothing_is_loaded_before_a_store_to_the_same_buffer() -> None:
    k = KernelBuilder("both")
    i, r = k.axis("i", 64), k.axis("r", 32, reduce=True)
    x, y = k.buffer(f32), k.buffer(f32)
    a = k.load(x, r * 64 + i)
    k.store(a, y, r * 64 + i)
    k.store(k.reduce("sum", k.apply("mul", a, k.load(y, r * 64 + i)), "r"), k.buffer(f32), i)
    (loop,) = (step for step in plan(k.finish()) if step.axis is not None)
    assert loads_first(loop.ops) == ([], list(loop.ops))
    dim = Dim(("r",), (Index.of(32),), 8, True)
    assert blocks_of_a_step(Schedule(loop=True, extra=((BLOCKS, 4),)), loop.ops, dim) == 1


def test_a_handful_of_short_rows_is_summed_side_by_side() -> None:
    """Heads that share keys: four rows of 64 are no work for a program."""
    k = KernelBuilder("heads")
    i, j, r = k.axis("i", 65536), k.axis("j", 64), k.axis("r", 4, reduce=True)
    x = k.cast(k.load(k.buffer(bf16), i * 256 + r * 64 + j), f32)
    k.store(k.reduce("sum", x, "r"), k.buffer(f32), i * 64 + j)
    assert propose(k.finish(), {})[0].blocks == (("i j", 512), ("r", 4))
