"""The Triton target: what it writes, that it is right under Triton's interpreter, and that it compiles for GPUs.

The interpreter has to be chosen before Triton is imported, so one subprocess (`triton_cases.py`) runs every kernel and
reports by name. Compilation to cubins needs no GPU. Tests marked `gpu` run the same kernels on a device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kernels
import pytest
import torch
from interpreted import run_interpreted
from kernels import Case
from xdsl.dialects.builtin import IntegerType

from tessera.tile.dialect.build import KernelBuilder, f32, f64, i32, i64
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.index import parse
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.dialect.types import element_of
from tessera.tile.rewrites.split_reduction import can_split
from tessera.tile.rewrites.split_sequential import split_sequential
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import missing, named, target_for
from tessera.util.errors import InputError, OptionError

pytest.importorskip("triton")

from on_h200 import H200, propose  # noqa: E402
from on_h200 import TRITON as TARGET  # noqa: E402
from triton_cases import NO_LOOP, PARTS, TRIALS, function_cases, run, sizes_of  # noqa: E402

from tessera.tile.targets.triton import ahead  # noqa: E402
from tessera.tile.targets.triton.emit import Options, emit  # noqa: E402
from tessera.tile.targets.triton.functions import FLOAT, INTEGER, TRUTH  # noqa: E402
from tessera.tile.targets.triton.halves import halves, schedules  # noqa: E402
from tessera.tile.targets.triton.launch import Launcher  # noqa: E402
from tessera.tile.targets.triton.layout import needs_wide, unwrap  # noqa: E402
from tessera.tile.targets.triton.resources import compile_only  # noqa: E402


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.sweep) for i in range(1, PARTS))])
def test_under_the_interpreter(part: int, tmp_path: Path) -> None:
    """One process a part, and one test, so that runs side by side do it once."""
    printed = run_interpreted(Path(__file__).with_name("triton_cases.py"), part, TESSERA_CACHE=str(tmp_path))
    report: dict[str, str] = json.loads(printed.splitlines()[-1])
    assert len(report) > (40 if part else 150)
    failed = {name: text for name, text in report.items() if text and NO_LOOP not in text}
    assert not failed, "\n\n".join(f"{name}: {text}" for name, text in list(failed.items())[:5]) + f"\n{list(failed)}"
    for name, text in report.items():
        assert not text or "dynamic" in name or name in ("grows", "wide", "alone", "empty")


# --- compiled for GPUs that are not here ---


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "case", [*kernels.cases(), *kernels.sequential_cases()], ids=lambda c: c.name + ("-dynamic" if c.symbols else "")
)
def test_compiles(case: Case, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if arch == 100 and case.symbols:
        pytest.skip("symbols are the same on every architecture")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    schedule = replace(propose(case.kernel, sizes_of(case))[0], split=1)
    found = compile_only(case.kernel, schedule, arch)
    assert found.spills == 0 and 0 < found.registers <= 255, found


def all_functions(element, table: dict[str, str]) -> KernelOp:
    k = KernelBuilder("functions")
    i = k.axis("i", 128)
    buffers = [k.buffer(element) for _ in range(3)]
    x, y, z = (k.load(b, i) for b in buffers)
    for fn in table:
        args = [x, y, z][: FUNCTIONS[fn].arity]
        if fn == "select":
            args[0] = k.apply("ne", x, y)
        value = k.apply(fn, *args)
        k.store(value, k.buffer(value.type.element), i)  # type: ignore[attr-defined]
    return k.finish()


@pytest.mark.parametrize(
    ("element", "table"),
    [(f32, FLOAT), (f64, FLOAT), (i32, INTEGER), (i64, INTEGER), (IntegerType(1), TRUTH)],
    ids=["f32", "f64", "i32", "i64", "i1"],
)
def test_every_function_compiles(element, table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    assert compile_only(all_functions(element, table), Schedule((("i", 128),))).registers > 0


WIDE_ACCESS = [
    partial(kernels.pointwise, 1 << 16, torch.bfloat16), partial(kernels.silu_mul, 64, 4096),
    partial(kernels.softmax, 8, 4096, torch.bfloat16), partial(kernels.rms_norm, 8, 4096),
    partial(kernels.transpose, 1, 512, 512, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", WIDE_ACCESS, ids=lambda m: m.func.__name__)
def test_accesses_of_16_bytes(make, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    case = make(dynamic=dynamic)
    found = compile_only(case.kernel, propose(case.kernel, sizes_of(case))[0])
    assert "ld.global.v4.b32" in found.ptx and "st.global.v4.b32" in found.ptx
    assert "ld.global.b16" not in found.ptx and found.spills == 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("n", "m"), [(16384, 4096), (8192, 8192), (65536, 1024)])
def test_walks_keep_their_sums_in_registers(
    n: int, m: int, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    kernel = kernels.norm_backward(2, m, torch.bfloat16, dynamic=True).kernel
    schedule = propose(kernel, {"n": n})[0]
    made = split_sequential(kernel, schedule.split)
    first, second = (
        compile_only(half, s, arch)
        for half, s in zip((made.first, made.second), schedules(kernel, schedule, made), strict=True)
    )
    assert first.spills == 0 and second.spills == 0
    assert first.registers * 32 * schedule.warps * max(16 // schedule.warps, 1) <= 65536  # as many as were meant fit
    assert "st.global.v4" in first.ptx and "ld.global.b16" not in first.ptx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_rows_come_before_their_columns(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    kernel = kernels.norm_backward(2, 32768, dtype, dynamic=True).kernel
    schedule = propose(kernel, {"n": 2048})[0]
    made = halves(kernel, schedule)
    assert schedule.loop and made.second.axis_names("reduce") == (kernel.sequential_axis,)
    for half, own in zip((made.first, made.second), schedules(kernel, schedule, made), strict=True):
        found = compile_only(half, replace(own, split=1))
        assert found.spills == 0 and found.registers <= 128 and "ld.global.v4" in found.ptx


def test_long_rows_across_memory_have_a_schedule() -> None:
    k = KernelBuilder("across")
    i, r = k.axis("i", 3), k.axis("r", 9000, reduce=True)
    x = k.load(k.buffer(f32), r * 3 + i)
    k.store(k.apply("mul", x, k.reduce("sum", x, "r")), k.buffer(f32), r * 3 + i)
    k.store(k.reduce("sum", x, "i"), k.buffer(f32), r)
    kernel = k.finish()
    for schedule in propose(kernel, {}):
        assert schedule.loop and TARGET.compile(kernel, schedule)


def test_rotary_halves_are_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    case = kernels.rotary(2, 64, 8, 128)
    assert "ld.global.b16" not in compile_only(case.kernel, propose(case.kernel, {})[0]).ptx


@pytest.mark.parametrize(("arch", "unit"), [(90, "wgmma"), (100, "tcgen05.mma")])
def test_products_use_the_matrix_units(arch: int, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    case = kernels.matmul(128, 128, 128)
    schedule = Schedule((("i", 128), ("j", 128), ("r", 64)), warps=8, stages=3, loop=True, group=8)
    assert unit in compile_only(case.kernel, schedule, arch).ptx


# --- what is written ---

SOFTMAX = """
@triton.jit
def softmax(b0, b1):
    i = tl.program_id(0)
    r = tl.arange(0, 64)
    v0 = tl.load(b0 + i * 64 + r)
    v1 = tl.reduce(v0, 0, _maximum)
    v2 = v0 - v1
    v3 = libdevice.exp(v2)
    v4 = tl.sum(v3, axis=0)
    v5 = tl.div_rn(v3, v4)
    tl.store(b1 + i * 64 + r, v5)


def grid():
    return (4,)


def launch(b0, b1):
    softmax[grid()](b0, b1, num_warps=4, num_stages=2)
"""


def test_text_of_a_softmax() -> None:
    assert emit(kernels.softmax(4, 64).kernel, Schedule((("r", 64),))).endswith(SOFTMAX)


def test_masks_only_where_blocks_do_not_divide() -> None:
    schedule = Schedule((("i", 4), ("r", 16)), loop=True)
    assert "mask" not in emit(kernels.softmax(8, 64).kernel, schedule)
    odd = emit(kernels.softmax(8, 65).kernel, schedule)
    assert "r_in = r < 65" in odd and "i_in" not in odd
    assert "i_in = i < n" in emit(kernels.softmax(8, 64, dynamic=True).kernel, schedule)


def test_joined_axes_need_no_division() -> None:
    plain = emit(kernels.pointwise(100).kernel, Schedule((("i", 128),)))
    assert "//" not in plain and "%" not in plain
    halves = emit(kernels.silu_mul(4, 64).kernel, Schedule((("i j", 128),)))
    assert "tl.store(b1 + ij," in halves and "ij // 64" in halves


def test_narrow_floats_use_fast_functions() -> None:
    schedule = Schedule((("r", 64),))
    assert "tl.exp(" in emit(kernels.softmax(4, 64, torch.bfloat16).kernel, schedule)
    assert "libdevice.exp(" in emit(kernels.softmax(4, 64, torch.float32).kernel, schedule)


def test_rows_that_are_read_again_stay_in_the_cache() -> None:
    text = emit(kernels.softmax(4, 64).kernel, Schedule((("r", 16),), loop=True))
    assert text.count('"evict_last"') == 1 and text.count('"evict_first"') == 1  # maximum and sum are one loop


def test_precision_of_f32_products() -> None:
    kernel = kernels.matmul(32, 32, 32, torch.float32).kernel
    schedule = Schedule((("i", 16), ("j", 16), ("r", 16)), loop=True)
    assert 'input_precision="ieee"' in emit(kernel, schedule)
    assert 'input_precision="tf32"' in emit(kernel, schedule, Options(tf32=True))


@pytest.mark.parametrize(
    "blocks", [(("r", 48),), (("q", 16),), (("j i", 16),), (("i", 0),)], ids=["not-2^n", "unknown", "order", "zero"]
)
def test_blocks_that_do_not_fit_are_refused(blocks) -> None:
    with pytest.raises(OptionError, match="expected"):
        emit(kernels.gelu().kernel, Schedule(blocks))


def test_row_longer_than_its_block_is_refused() -> None:
    with pytest.raises(OptionError, match="loop=True"):
        emit(kernels.softmax(4, 65).kernel, Schedule((("r", 64),)))


def test_reading_again_what_was_written_is_refused() -> None:
    k = KernelBuilder("in_place", symbols=["n"])
    r = k.axis("r", "n", reduce=True)
    x = k.buffer(f32)
    a = k.load(x, r)
    k.store(k.apply("exp", a), x, r)
    k.store(k.apply("sub", a, k.reduce("max", a, "r")), x, r)
    kernel = k.finish()
    with pytest.raises(OptionError, match="one block"):
        emit(kernel, Schedule((("r", 64),), loop=True))
    assert not any(s.loop for s in propose(kernel, {"n": 100}))


# --- sizes and variants ---


def test_offsets_are_wide_only_where_they_must_be() -> None:
    kernel = kernels.softmax(dynamic=True).kernel
    assert not needs_wide(kernel, {"n": 16384, "m": 8192})
    assert needs_wide(kernel, {"n": 1 << 19, "m": 8192})
    assert needs_wide(kernels.dropout().kernel, {})  # its random offsets start at 2^33


def test_variant_follows_the_sizes() -> None:
    launcher = Launcher(kernels.softmax(dynamic=True).kernel, Schedule((("r", 1024),)))
    tensors = [torch.zeros(1)] * 2
    fits, programs = launcher._plan((7, 1000), tensors[0].device, len(tensors))
    longer, _ = launcher._plan((7, 2000), tensors[0].device, len(tensors))
    assert programs == 7 and fits is launcher.main and "for r0 in" in longer.source
    wide, _ = launcher._plan((1 << 22, 1000), tensors[0].device, len(tensors))
    assert ".to(tl.int64)" in wide.source
    with pytest.raises(InputError, match="expected 2 tensors"):
        launcher._plan((7,), tensors[0].device, len(tensors))


# --- proposals ---


@pytest.mark.parametrize(
    "case", [*kernels.cases(), *kernels.sequential_cases()], ids=lambda c: c.name + ("-dynamic" if c.symbols else "")
)
def test_proposals_are_valid_and_repeat(case: Case) -> None:
    found = propose(case.kernel, sizes_of(case))
    assert 1 <= len(found) <= 8 and found == propose(case.kernel, sizes_of(case))
    assert len(set(found)) == len(found)
    for schedule in found:
        assert emit(case.kernel, replace(schedule, split=1))
        assert schedule.split == 1 or can_split(case.kernel) or case.kernel.sequential_axis


LONG = ((32768, torch.bfloat16), (32768, torch.float32))


def test_proposals_know_the_measured_facts() -> None:
    rows = propose(kernels.softmax(2, 2, torch.bfloat16, dynamic=True).kernel, {"n": 16384, "m": 8192})[0]
    assert rows.block("r") == 8192 and rows.block("i") == 1 and 4 <= rows.warps <= 16 and not rows.loop
    flat = propose(kernels.pointwise(2, torch.bfloat16, dynamic=True).kernel, {"n": 1 << 24})[0]
    assert 1024 <= flat.block("i") <= 4096 and flat.block("i") // (32 * flat.warps) >= 8
    columns = propose(kernels.column_sum(2, 2, dynamic=True).kernel, {"n": 16384, "m": 8192})[0]
    assert columns.split > 1 and columns.block("j") >= 64
    one, two = (propose(kernels.softmax(2, m, dtype, dynamic=True).kernel, {"n": 2048, "m": m})[0] for m, dtype in LONG)
    assert one.loop and one.block("r") == 16384 and not two.loop  # the cache keeps rows of 64 KiB, registers the other
    total = propose(kernels.full_sum(2, dynamic=True).kernel, {"n": 1 << 24})[0]
    assert total.split > 1
    product = propose(kernels.matmul(2, 2, 2, dynamic=True).kernel, {"m": 8192, "n": 8192, "p": 8192})[0]
    assert product.blocks == (("i", 128), ("j", 256), ("r", 64)) and product.group == 16


# --- targets ---


def test_targets_by_device_and_name() -> None:
    assert missing("triton") == "" and named("triton", H200) is named("triton", H200)
    assert named("triton") is target_for("cuda") and target_for("cuda").machine.kind == "gpu"
    assert target_for("meta") is None


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in missing("triton") and named("triton") is None


# --- on a device ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("case", "schedule"), [t[1:] for t in TRIALS], ids=[t[0] for t in TRIALS])
def test_on_a_device(case: Case, schedule: Schedule) -> None:
    run(case, schedule, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", function_cases(), ids=lambda c: c.name)
def test_function_on_a_device(case: Case) -> None:
    run(case, Schedule((("i", 128),)), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_second_launch_goes_the_short_way() -> None:
    case = kernels.softmax(64, 1024, torch.bfloat16)
    compiled = TARGET.compile(case.kernel, propose(case.kernel, {})[0])
    for shift in (0, 1):  # the second storage is not aligned
        tensors = [
            torch.zeros(t.numel() + shift, dtype=t.dtype, device="cuda")[shift:].view(t.shape) for t in case.tensors
        ]
        tensors[0].copy_(case.tensors[0])
        for _ in range(3):
            tensors[1].zero_()
            compiled(tensors, case.symbols)
            case.check(tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("n", "m"), [(4096, 4096), (1000, 8192), (20000, 768), (333, 3000), (333, 12000)])
def test_every_proposed_walk_on_a_device(n: int, m: int, dynamic: bool) -> None:
    case = kernels.norm_backward(n, m, torch.bfloat16, dynamic=dynamic)
    for schedule in propose(case.kernel, sizes_of(case)):
        results = [t.clone().cuda() for t in case.tensors]
        compiled = TARGET.compile(case.kernel, schedule)
        compiled(results, case.symbols)
        again = [t.clone().cuda() for t in case.tensors]
        compiled(again, case.symbols)
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True)), schedule
        torch.testing.assert_close(results[5].cpu(), case.expected[5], rtol=1.6e-2, atol=1e-2)
        for k in (6, 7):  # sums of so many rows round where they are large
            scale = case.expected[k].abs().max().item()
            torch.testing.assert_close(results[k].cpu(), case.expected[k], rtol=1.6e-2, atol=1e-2 * scale)


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With known sizes, for the dtypes of the buffers and as many programs as a call would start."""
    begun: list[tuple[torch.device, Callable[[], object]]] = []
    monkeypatch.setattr(ahead, "begin", lambda device, compile_: begun.append((device, compile_)))
    launcher = Launcher(kernels.softmax().kernel, Schedule((("r", 64),), warps=2))
    launcher.ahead(torch.device("cpu"))
    Launcher(kernels.softmax(dynamic=True).kernel, Schedule((("r", 64),))).ahead(torch.device("cuda"))
    assert not begun
    given: list[object] = []
    fake = SimpleNamespace(warmup=lambda *args, **options: given.append((args, options)))
    launcher.main.__dict__["function"] = fake
    launcher.ahead(torch.device("cuda"))
    begun[0][1]()
    rows = launcher._plan((), torch.device("cuda"), launcher.buffers)[1]
    expected = [torch_dtype(element_of(b)) for b in launcher.kernel.buffers]
    assert given == [(tuple(expected), {"grid": (rows,), "num_warps": 2, "num_stages": launcher.main.stages})]


def test_remainders_of_what_runs_backwards_stay_inside() -> None:
    """`4 - i % 3` is never negative and `4 - i` is: a remainder of that would be, on a GPU."""
    wholes = {"i": ("whole", 6)}
    assert unwrap(parse("(i + 2) % 3"), wholes) == parse("(whole + 2) % 3")
    assert unwrap(parse("(8 - i) % 3"), wholes) == parse("(8 - i) % 3")
