"""The CUDA Tile target: emitted programs give the right numbers (by a model of cuTile) and compile (by NVIDIA's own).

Only the last part needs a GPU; binaries are made without one.
"""

from __future__ import annotations

import ctypes
import math

import cutile_model
import pytest
import torch
from kernels import Case, cases, matmul, norm_backward, sequential_cases, softmax
from on_h200 import CUDA_TILE as TARGET
from tile_kernels import matmul as row_major_matmul

from tessera.tile.dialect import interp
from tessera.tile.dialect.build import KernelBuilder, bf16, f32, f64, i1, i64
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.ops import KernelOp, Tile
from tessera.tile.rewrites.split_reduction import can_split
from tessera.tile.schedules.schedule import Schedule, reduced_axis
from tessera.tile.targets.cuda_tile import driver, toolchain
from tessera.tile.targets.cuda_tile.arrays import Variant, arrays, place, variant
from tessera.tile.targets.cuda_tile.emit import Emitter
from tessera.tile.targets.cuda_tile.functions import template
from tessera.tile.targets.cuda_tile.target import kernels_of
from tessera.tile.targets.cuda_tile.write import write
from tessera.util import disk as cache
from tessera.util.errors import OptionError

CASES = {f"{case.name}{'-dynamic' if case.symbols else ''}": case for case in (*cases(), *sequential_cases())}
needs_compiler = pytest.mark.skipif(not toolchain.available(), reason="needs cuda-tile[tileiras]")


def schedules(case: Case) -> list[Schedule]:
    sizes = dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))
    found = TARGET.propose(case.kernel, sizes)
    axis = reduced_axis(case.kernel)
    if case.kernel.sequential_axis is not None:
        found += [Schedule((("i", 4), ("r", 2048)), split=parts) for parts in (1, 3)]
    elif axis is not None:  # small blocks, so that loops go round more than once
        sides = [(a, 16) for a in case.kernel.axis_names() if a in ("i", "j") and case.name.startswith("mat")]
        found.append(Schedule(blocks=(*sides, (axis, 16)), loop=True))
        if can_split(case.kernel):
            found.append(Schedule(blocks=(*sides, (axis, 16)), loop=True, split=3))
    else:
        found.append(Schedule(blocks=((case.kernel.axis_names()[-1], 4),)))
    return found


# --- the numbers, by the model ---


@pytest.mark.parametrize("name", CASES)
def test_emitted_programs_give_the_right_numbers(name: str) -> None:
    case = CASES[name]
    for schedule in schedules(case):
        tensors = [t.clone() for t in case.tensors]
        cutile_model.run(case.kernel, schedule, tensors, case.symbols)
        case.check(tensors)


def along(kind: str, scan: bool, element=f32) -> KernelOp:
    """A reduction or a scan of the rows of a (3, 21) matrix."""
    k = KernelBuilder("along")
    i, r = k.axis("i", 3), k.axis("r", 21, reduce=True)
    value = k.load(k.buffer(element), i * 21 + r)
    if kind in ("any", "all"):
        value = k.cast(value, i1)
    result = k.scan(kind, value, "r") if scan else k.reduce(kind, value, "r")
    k.store(result, k.buffer(result.type.element), i * 21 + r if scan else i)
    return k.finish()


@pytest.mark.parametrize("scan, kind", [
    *((False, kind) for kind in ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")),
    *((True, kind) for kind in ("sum", "prod", "max", "min")),
])  # fmt: skip
@pytest.mark.parametrize("shift", [-5.0, 5.0, math.nan])
def test_lanes_past_the_end_change_nothing(kind: str, scan: bool, shift: float) -> None:
    """All numbers of one sign, so that a lane of zero would win; and one NaN."""
    whole = torch.arange(63).reshape(3, 21) * 7 % 11
    for element, x in ((f32, whole / 8 + (shift if shift == shift else 1)), (i64, whole % 3 + 3 * int(shift > 0) - 2)):
        if shift != shift and element == f32:
            x[1, 17] = math.nan
        kernel = along(kind, scan, element)
        dtype = torch_dtype(kernel.buffers[1].type.element)
        shape = (3, 21) if scan else (3,)
        want, *got = (torch.zeros(shape, dtype=dtype) for _ in range(4))
        interp.run(kernel, [x, want])
        plans = (
            Schedule((("r", 32),)),
            Schedule((("i", 2), ("r", 8)), loop=True),
            Schedule((("i", 4), ("r", 2)), loop=True),
        )
        for schedule, out in zip(plans, got, strict=True):
            cutile_model.run(kernel, schedule, [x, out], [])
            torch.testing.assert_close(out, want, equal_nan=True)


def test_rows_and_columns_are_grouped_over_every_block_once() -> None:
    a, b, bias = torch.randn(70, 40).bfloat16(), torch.randn(40, 90).bfloat16(), torch.randn(90).bfloat16()
    want = torch.relu(a.float() @ b.float() + bias.float()).bfloat16()
    for group in (1, 3, 8):
        out = torch.zeros(70, 90, dtype=torch.bfloat16)
        schedule = Schedule(blocks=(("i", 16), ("j", 16), ("r", 16)), loop=True, group=group)
        cutile_model.run(row_major_matmul(), schedule, [a, b, bias, out], [70, 90, 40])
        torch.testing.assert_close(out, want, rtol=1.6e-2, atol=1e-2)


UNARY = [
    f.name
    for f in FUNCTIONS.values()
    if f.arity == 1 and not f.name.startswith(("bit", "logical")) and f.name != "erfc"
]


@pytest.mark.parametrize("fn", UNARY)
def test_functions_of_one_float(fn: str) -> None:
    x = torch.cat([torch.linspace(-6, 6, 97), torch.tensor([0.0, 1e-6, -1e-6, 1e-3, 0.5, 1.5, 2.5, -0.5])])
    if fn in ("asin", "acos"):
        x = x / 6
    if fn in ("log", "log2", "log10", "sqrt", "rsqrt"):
        x = x.abs() + 0.01
    if fn == "log1p":
        x = x.clamp(min=-0.99)
    k = KernelBuilder("one")
    i = k.axis("i", len(x))
    source = k.buffer(f32)
    y = k.apply(fn, k.load(source, i))
    k.store(y, k.buffer(y.type.element), i)
    want = FUNCTIONS[fn].reference(x)
    got = torch.empty_like(want)
    cutile_model.run(k.finish(), Schedule(blocks=(("i", 32),)), [x, got], [])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-7)


def test_what_the_target_lacks_is_refused_with_a_reason() -> None:
    with pytest.raises(OptionError, match="no function 'erfc' of f32; another target may"):
        template("erfc", f32)
    with pytest.raises(OptionError, match="'erf' of f64"):
        template("erf", f64)
    case = softmax()
    for wrong, why in (
        (Schedule(blocks=(("i", 3),)), "powers of two"),
        (Schedule(blocks=(("q", 4),)), "got \\['q'\\]"),
        (Schedule(blocks=(("r", 16),)), "cannot hold the 37 of 'r'; try loop=True"),
        (Schedule(blocks=(("r", 64),), persistent=True), "persistent=False"),
    ):
        with pytest.raises(OptionError, match=why):
            TARGET.compile(case.kernel, wrong)
    with pytest.raises(OptionError, match="sums along 'i': expected 'r' in one block"):
        TARGET.compile(norm_backward().kernel, Schedule((("r", 16),), loop=True))


# --- arrays ---


def test_strided_accesses_are_arrays_with_the_contiguous_axis_last() -> None:
    found = arrays(row_major_matmul())
    assert [a.axes for a in found.all] == [("i", "r"), ("r", "j"), ("j",), ("i", "j")]
    assert not any(a.flat for a in found.all)


def test_other_accesses_reach_flat_memory() -> None:
    found = arrays(CASES["gather"].kernel)
    assert any(a.flat for a in found.all)


def test_variants_follow_addresses_and_strides() -> None:
    kernel = row_major_matmul()
    parameters = arrays(kernel).all
    sizes, symbols = {"i": 64, "j": 64, "r": 64}, {"m": 64, "n": 64, "k": 64}
    placed = [place(a, 4096, sizes, symbols) for a in parameters]
    assert variant(parameters, placed) == Variant(aligned=True)
    odd = [place(a, 4096, sizes, {**symbols, "n": 63}) for a in parameters]
    assert variant(parameters, odd) == Variant(aligned=False)
    shifted = [place(a, 4098, sizes, symbols) for a in parameters]
    assert variant(parameters, shifted) == Variant(aligned=False)
    huge = [place(a, 4096, {**sizes, "i": 2**20}, {**symbols, "n": 2**12}) for a in parameters]
    assert variant(parameters, huge) == Variant(aligned=True, wide=True)


def test_arguments_follow_the_calling_convention() -> None:
    kernel = CASES["softmax-5x37-dynamic"].kernel
    parameters = arrays(kernel).all
    placed = [place(a, 256, {"i": 5, "r": 37}, {"n": 5, "m": 37}) for a in parameters]
    packed = driver.pack(placed, [5, 37], wide=False)
    assert [a.value for a in packed] == [256, 5, 37, 37, 1, 256, 5, 37, 37, 1, 5, 37]
    assert isinstance(packed[1], ctypes.c_int32) and isinstance(packed[0], ctypes.c_uint64)
    assert isinstance(driver.pack(placed, [5, 37], wide=True)[1], ctypes.c_int64)


# --- schedules ---


def test_proposals_are_the_same_every_time_and_hold_no_spilling_tile() -> None:
    for case in CASES.values():
        sizes = dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))
        assert TARGET.propose(case.kernel, sizes) == TARGET.propose(case.kernel, sizes)
    big = matmul(256, 256, 256).kernel
    for schedule in TARGET.propose(big, {}):
        assert schedule.block("i") * schedule.block("j") <= 128 * 128
    assert TARGET.propose(big, {})[0].blocks == (("r", 64), ("i", 128), ("j", 128))


def test_a_whole_row_or_a_loop() -> None:
    kernel = CASES["softmax-5x37-dynamic"].kernel
    short, long = (TARGET.propose(kernel, {"n": 64, "m": m}) for m in (1000, 100_000))
    assert not short[0].loop and short[0].block("r") == 1024
    assert all(s.loop for s in long) and long[0].split > 1
    many = TARGET.propose(kernel, {"n": 4096, "m": 100_000})
    assert all(s.loop and s.split == 1 for s in many)


def test_every_operation_of_the_dialect_is_written() -> None:
    """By one kernel or another of the cases; what writes none of them says so."""
    used = {type(op) for case in CASES.values() for op in case.kernel.block.ops}
    assert used == set(Tile.operations) - {KernelOp}
    emitter = Emitter(softmax().kernel, Schedule((("r", 64),)))
    with pytest.raises(OptionError, match="no tile.kernel; target 'triton' has"):
        emitter._value(softmax().kernel)


# --- the binaries, by NVIDIA's compiler ---


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    return tmp_path


@needs_compiler
@pytest.mark.parametrize(
    "name", ["pointwise-1000-dynamic", "softmax-5x37-dynamic", "layer_norm-4x45", "gather", "dropout", "uniform"]
)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_emitted_programs_compile(name: str, arch: str, fresh_cache) -> None:
    case = CASES[name]
    found = TARGET.compile(case.kernel, schedules(case)[0])
    assert found.build(arch).startswith(b"\x7fELF")
    assert not found.resources(arch).spills
    assert found.resources(arch).registers > 0


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_a_matrix_product_compiles_without_spilling(arch: str, fresh_cache) -> None:
    kernel, sizes = row_major_matmul(bf16), {"m": 4096, "n": 4096, "k": 4096}
    best = next(s for s in TARGET.propose(kernel, sizes) if not TARGET.compile(kernel, s).resources(arch).spills)
    assert best.block("i") * best.block("j") >= 64 * 64
    if arch != "sm_80":  # the others hold the first choice
        assert best == TARGET.propose(kernel, sizes)[0]


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_shared_rows_and_walks_stay_in_registers(arch: str, fresh_cache) -> None:
    few, norm = softmax(8, 128256, torch.bfloat16).kernel, norm_backward(2, 4096, torch.bfloat16, dynamic=True).kernel
    for kernel, sizes in ((few, {}), (norm, {"n": 16384})):
        schedule = TARGET.propose(kernel, sizes)[0]
        assert schedule.split > 1
        assert not any(found.resources(arch).spills for found in kernels_of(TARGET.compile(kernel, schedule)))


@needs_compiler
def test_schedules_that_fit(fresh_cache) -> None:
    kernel, sizes = CASES["softmax-5x37-dynamic"].kernel, {"n": 512, "m": 1000}
    assert TARGET.fitting(kernel, sizes, "sm_90")[0] == TARGET.propose(kernel, sizes)[0]


@needs_compiler
@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_compiles_in_every_variant(name: str, fresh_cache) -> None:
    case = CASES[name]
    for schedule in schedules(case):
        for found in kernels_of(TARGET.compile(case.kernel, schedule)):
            for assume in (Variant(True), Variant(False), Variant(False, wide=True)):
                assert found.build("sm_90", assume).startswith(b"\x7fELF")


@needs_compiler
def test_spilling_shows_in_the_report(fresh_cache) -> None:
    kernel = row_major_matmul(bf16)
    found = TARGET.compile(kernel, Schedule(blocks=(("i", 128), ("j", 256), ("r", 64)), loop=True))
    assert found.resources("sm_90").spills


@needs_compiler
def test_a_machine_without_the_compiler_uses_the_cache(fresh_cache, monkeypatch) -> None:
    case = CASES["softmax-5x37-dynamic"]
    found = TARGET.compile(case.kernel, schedules(case)[0])
    made = found.build("sm_90")
    monkeypatch.setattr(toolchain, "available", lambda: False)
    again = TARGET.compile(case.kernel, schedules(case)[0])
    assert again.build("sm_90") == made
    with pytest.raises(toolchain.ToolchainError, match=r"pip install 'tessera\[cutile\]'"):
        again.build("sm_100")
    assert len(list(cache.entries(toolchain.KIND))) == 1


@needs_compiler
def test_a_refused_program_says_why(fresh_cache) -> None:
    case = CASES["softmax-5x37-dynamic"]
    source = write(case.kernel, schedules(case)[0]).replace("ct.exp(", "ct.nothing(")
    with pytest.raises(toolchain.ToolchainError, match="cuTile refused softmax for sm_90"):
        toolchain.binary(case.kernel, source, arrays(case.kernel), Variant(True), "sm_90")


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name: str) -> None:
    case = CASES[name]
    for ran, schedule in enumerate(schedules(case)):
        found = TARGET.compile(case.kernel, schedule)
        tensors = [t.cuda() for t in case.tensors]
        try:
            found(tensors, case.symbols)
        except toolchain.ToolchainError as error:
            if toolchain.available():
                raise
            pytest.skip(f"after {ran} schedules: {error}")
        case.check(tensors, slack=4)
