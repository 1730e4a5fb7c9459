"""Matrix products with what is computed from them: lowered from traces, interpreted, and compiled for GPUs.

The interpreter of the tile dialect is held against eager PyTorch. Regions and kernels of CUDA programs are made from
fake tensors, so that no GPU is needed; `compile_only` says what a kernel would need on one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from programs import on_cuda
from test_from_trace import axes, check, loads, rand

from tessera.executors import products, tile
from tessera.executors.regions import body_of
from tessera.ir.trace import Trace
from tessera.tile.from_trace.region import Unlowerable, lower
from tessera.tile.schedules.schedule import Schedule

BF16 = torch.bfloat16


def cuda_trace(fn: Callable, *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> Trace:
    """`fn` on tensors of a GPU that need not be there, ready for regions."""
    return tile.decompose(on_cuda(fn, *shapes, dtype=dtype))


def regions(trace: Trace) -> list[list[str]]:
    return [[trace.equations[i].op._opname for i in region] for region in tile.regions(trace)]  # type: ignore[union-attr]


# --- what is computed -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def kernels_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fused does not hang on the rate that was measured last."""
    for name in ("LOSS", "BESIDE_LOSS", "ACROSS_LOSS"):
        monkeypatch.setattr(products, name, 0.04)
    monkeypatch.setattr(products, "STORING", 0.0)
    monkeypatch.setattr(products, "MOST_MOVED", 9)


def test_linear_with_bias_activation_and_residual() -> None:
    made = check(
        lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, rand(6, 5, 24), rand(10, 24), rand(10), rand(6, 5, 10)
    )
    assert axes(made) == {"i0": "30", "i1": "10", "r": "24"}
    assert loads(made) == ["i0 * 24 + r", "i1 * 24 + r", "i1", "i0 * 10 + i1"]


def test_half_precision_is_rounded_once() -> None:
    x, w, b = rand(6, 24, dtype=BF16), rand(10, 24, dtype=BF16), rand(10, dtype=BF16)
    made = check(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b, tol=3e-2)
    assert "bf16" in str(made.kernel).split("tile.contract")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "want"),
    [
        (lambda x, w: F.silu(x.t() @ w), [(24, 6), (24, 10)], ["i0 + r * 6", "i1 + r * 10"]),
        (lambda x, w: F.silu(x @ w.t()) * 2, [(6, 24), (10, 24)], ["i0 * 24 + r", "i1 * 24 + r"]),
        (
            lambda x, w: torch.matmul(x, w.mT).relu(),
            [(3, 4, 7, 6), (4, 5, 6)],
            ["i0 * 168 + i1 * 42 + i2 * 6 + r", "i1 * 30 + i3 * 6 + r"],
        ),
        (lambda x, w: torch.bmm(x, w) * 3, [(3, 7, 6), (3, 6, 9)], ["i0 * 42 + i1 * 6 + r", "i0 * 54 + i2 + r * 9"]),
        (
            lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2).relu(),
            [(9,), (7, 6), (6, 9)],
            ["i0 * 6 + r", "i1 + r * 9", "i1"],
        ),
        (
            lambda c, x, w: torch.baddbmm(c, x, w, beta=0, alpha=2).relu(),
            [(3, 7, 9), (3, 7, 6), (3, 6, 9)],
            ["i0 * 42 + i1 * 6 + r", "i0 * 54 + i2 + r * 9"],
        ),
        (
            lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
            [(2, 7, 6), (9, 6), (9, 6)],
            ["i0 * 6 + r", "i1 * 6 + r", "i1 * 6 + r"],
        ),
        (lambda x, w: F.linear(x * 2, w).relu(), [(7, 6), (9, 6)], ["i0 * 6 + r", "i1 * 6 + r"]),
        (
            lambda x, w: F.linear(x, w).view(2, 7, 3, 3).transpose(1, 2).contiguous(),
            [(2, 7, 6), (9, 6)],
            ["i0 * 42 + i2 * 6 + r", "i1 * 18 + i3 * 6 + r"],
        ),
    ],
    ids=["transposed", "flipped", "matmul", "bmm", "addmm", "baddbmm", "swiglu", "prologue", "heads"],
)
def test_forms(fn: Callable, shapes: list[tuple[int, ...]], want: list[str]) -> None:
    assert loads(check(fn, *(rand(*shape) for shape in shapes))) == want


def test_symbolic_sizes() -> None:
    check(
        lambda x, w: F.linear(x, w).relu(), rand(7, 6), rand(9, 6), dynamic=(0, 1), others=((rand(3, 6), rand(5, 6)),)
    )


@pytest.mark.parametrize(
    ("fn", "shapes", "why"),
    [
        (lambda x, w: F.linear(F.linear(x, w), w), [(6, 6), (6, 6)], "elsewhere"),
        (lambda x, w: F.linear(x, w).sum(-1), [(6, 6), (6, 6)], "a matrix product and a reduction"),
        (lambda x, w: torch.cat([F.linear(x, w), x]), [(6, 6), (6, 6)], "has another shape"),
        (lambda x, w: F.linear(x, w).roll(1, 0) * 2, [(6, 6), (6, 6)], "elsewhere"),
        (lambda x, w: x @ w, [(6, 6), (6,)], "with a vector"),
        (lambda x, w, v: F.linear(x, w) * F.linear(v, w[:, :4]), [(6, 6), (6, 6), (6, 4)], "the rest of the region"),
    ],
    ids=["chain", "sum", "cat", "roll", "vector", "depths"],
)
def test_no_kernel(fn: Callable, shapes: list[tuple[int, ...]], why: str) -> None:
    from programs import trace_of

    with pytest.raises(Unlowerable, match=why):
        lower(trace_of(fn, *(rand(*shape) for shape in shapes)))


# --- what is fused ----------------------------------------------------------------------------------------

N = (4096, 4096)


def block(x, n, w1, b1, w2, b2):  # noqa: ANN001, ANN201
    h = F.layer_norm(x, (2048,), n)
    return F.layer_norm(x + F.linear(F.gelu(F.linear(h, w1, b1)), w2, b2), (2048,), n)


def test_the_epilogue_joins_the_product() -> None:
    assert regions(cuda_trace(lambda x, w, b: F.gelu(F.linear(x, w, b)), N, N, N[:1])) == [["linear", "gelu"]]
    swiglu = cuda_trace(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), N, N, N)
    assert regions(swiglu) == [["linear", "silu", "linear", "mul"]]
    backward = cuda_trace(lambda g, w, h: torch.mm(g, w) * F.silu(h), N, N, N)
    assert regions(backward) == [["silu", "mm", "mul"]] or regions(backward) == [["mm", "silu", "mul"]]


def test_a_reduction_keeps_the_arithmetic_before_it() -> None:
    shapes = [(2, 4096, 2048), (2048,), (8192, 2048), (8192,), (2048, 8192), (2048,)]
    found = regions(cuda_trace(block, *shapes))
    assert ["linear", "gelu"] in found and not any("linear" in region and "var_mean" in region for region in found)
    assert any(region[0] == "add" and "var_mean" in region for region in found)


def test_products_alone_stay_with_the_library() -> None:
    trace = cuda_trace(lambda x, w, b: F.linear(x, w, b), N, N, N[:1])
    assert regions(trace) == [] and tile.reasons(trace)["linear"] == "nothing to fuse it with"


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype", "why"),
    [
        (lambda x, w: F.gelu(F.linear(x, w)), [(64, 4096), N], BF16, "too few rows"),
        (lambda x, w: F.gelu(F.linear(x, w)), [N, N], torch.float32, "float32 stay with the library"),
        (lambda x, w: F.gelu(F.linear(x, w)), [(4096, 32768), (4096, 32768)], BF16, "the bytes saved are worth"),
        (lambda x, w: F.gelu(F.linear(x, w)), [(4096, 4099), (4096, 4099)], BF16, "the bytes saved are worth"),
    ],
    ids=["thin", "f32", "deep", "unaligned"],
)
def test_where_the_library_wins(fn: Callable, shapes: list, dtype: torch.dtype, why: str) -> None:
    trace = cuda_trace(fn, *shapes, dtype=dtype)
    assert not any("linear" in region for region in regions(trace)) and why in tile.reasons(trace)["linear"]


def test_a_weight_is_contiguous_along_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rates as measured: the weight of a linear layer is (n, k), the right side of a product (k, n)."""
    monkeypatch.undo()
    up = [(16384, 1024), (4096, 1024), (4096,)]
    assert regions(cuda_trace(lambda x, w, b: F.gelu(F.linear(x, w, b)), *up)) == [["linear", "gelu"]]
    across = cuda_trace(lambda x, w: F.gelu(x @ w), (16384, 1024), (1024, 4096))
    assert regions(across) == [["gelu"]] and "the bytes saved are worth" in tile.reasons(across)["matmul"]


def test_a_product_reads_nothing_large_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gated = cuda_trace(lambda x, w, up: F.silu(F.linear(x, w)) * up, (8192, 2048), (8192, 2048), (8192, 8192))
    assert regions(gated) == [["silu", "mul"]] and "more than the product" in tile.reasons(gated)["linear"]


def test_what_comes_before_a_product() -> None:
    """It is computed for every column of tiles: only where there are one or two."""
    narrow = cuda_trace(lambda x, w: F.linear(x * 2, w).relu(), (8192, 4096), (256, 4096))
    assert regions(narrow) == [["mul", "linear", "relu"]]
    wide = cuda_trace(lambda x, w: F.linear(x * 2, w).relu(), (8192, 4096), (4096, 4096))
    assert regions(wide) == [["linear", "relu"]]
    dear = cuda_trace(lambda x, w: F.linear(F.gelu(x), w), (12544, 1536), (384, 1536))
    assert regions(dear) == [["gelu"]] and "compute it again" in tile.reasons(dear)["linear"]


# --- kernels ----------------------------------------------------------------------------------------------


def kernel_of(trace: Trace):  # noqa: ANN201
    (region,) = tile.regions(trace)
    return tile.compile_region(body_of(trace, region, "product"))


CASES = {
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), N, N, N[:1]),
    "swiglu": (lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), N, N, N),
    "residual": (lambda x, w, r: F.linear(x, w) + r, N, N, N),
    "transposed": (lambda g, x: torch.mm(g.t(), x) * 2, N, N),
    "batched": (lambda a, b: torch.bmm(a, b).relu(), (8, 1024, 1024), (8, 1024, 1024)),
    "prologue": (lambda x, w: F.linear(x * 2, w).relu(), (32768, 2048), (256, 2048)),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.resources import compile_only

    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    launch = kernel_of(cuda_trace(CASES[name][0], *CASES[name][1:]))
    assert launch is not None and launch.schedule.persistent
    found = compile_only(launch.tile, launch.schedule, 90)
    assert found.spills == 0 and found.shared <= 227 * 1024, found
    assert "wgmma" in found.ptx and "cp.async.bulk.tensor" in found.ptx


def test_compiles_for_blackwell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tessera.tile.targets.triton.resources import compile_only

    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    launch = kernel_of(cuda_trace(*CASES["residual"]))
    found = compile_only(launch.tile, launch.schedule, 100)
    assert found.spills == 0 and "tcgen05.mma" in found.ptx and "cp.async.bulk.tensor" in found.ptx


def test_accesses_that_no_descriptor_describes() -> None:
    """Rows of 50 elements are no multiple of 16 bytes, a bias is no tile: those go element by element."""
    pytest.importorskip("triton")
    import kernels

    from tessera.tile.dialect.ops import LoadOp, StoreOp
    from tessera.tile.targets.triton.tiles import bulks, walks_tiles

    schedule = Schedule((("i", 16), ("j", 64), ("r", 16)), loop=True, persistent=True, extra=(("bulk", True),))
    case = kernels.matmul(35, 50, 40)
    found = bulks(case.kernel, schedule)
    assert [type(op) for op in found] == [LoadOp, LoadOp]
    aligned = bulks(kernels.matmul(35, 48, 40).kernel, schedule)
    assert [type(op) for op in aligned] == [LoadOp, LoadOp, StoreOp]
    dynamic = list(bulks(kernels.matmul(dynamic=True).kernel, schedule).values())
    sizes = {"m": 35, "n": 50, "p": 40}
    assert [b.fits(sizes) for b in dynamic] == [True, True, False]
    assert not walks_tiles(kernels.softmax().kernel, Schedule((("r", 16),), loop=True))


def test_only_products_are_persistent() -> None:
    """As many programs as multiprocessors would leave most rows of a softmax undone."""
    pytest.importorskip("triton")
    import kernels

    from tessera.tile.targets.triton.launch import Launcher

    assert not Launcher(kernels.softmax().kernel, Schedule((("r", 64),), persistent=True)).schedule.persistent


SMALL = {
    "gelu": (CASES["gelu"][0], (40, 24), (48, 24), (48,)),
    "swiglu": (CASES["swiglu"][0], (33, 24), (20, 24), (20, 24)),
    "residual": (CASES["residual"][0], (2, 17, 24), (48, 24), (2, 17, 48)),
    "transposed": (CASES["transposed"][0], (24, 40), (24, 48)),
    "batched": (CASES["batched"][0], (3, 20, 24), (3, 24, 40)),
    "prologue": (CASES["prologue"][0], (40, 24), (48, 24)),
}


@pytest.mark.parametrize("name", SMALL)
def test_cuda_tile_gives_the_right_numbers(name: str) -> None:
    pytest.importorskip("cuda.tile")
    import cutile_model
    from programs import trace_of

    from tessera.ir.interp import run
    from tessera.tile.from_trace.launch import launcher

    fn, *shapes = SMALL[name]
    given = [rand(*shape, dtype=BF16) for shape in shapes]
    trace = trace_of(fn, *given)
    lowered = lower(trace)
    sides = [(a, 16) for a in lowered.kernel.axis_names() if a in ("r", *lowered.kernel.axis_names("parallel")[-2:])]
    schedule = Schedule(tuple(sides), loop=True)

    def by_model(tensors: list[torch.Tensor], symbols: list[int]) -> None:
        cutile_model.run(lowered.kernel, schedule, tensors, symbols)

    (got,), (want,) = launcher(trace, lowered, by_model)(*given), run(trace, *given)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_cuda_tile_keeps_two_accumulators_in_registers() -> None:
    pytest.importorskip("cuda.tile")
    from on_h200 import CUDA_TILE as TARGET

    from tessera.tile.targets.cuda_tile import toolchain

    if not toolchain.available():
        pytest.skip("needs cuda-tile[tileiras]")
    kernel = lower(cuda_trace(*CASES["swiglu"]), "swiglu").kernel
    assert TARGET.compile(kernel, TARGET.propose(kernel, {})[0]).resources("sm_90").spills == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name: str) -> None:
    fn, *shapes = CASES[name]
    sizes = [tuple(n // 4 if n > 512 else n for n in shape) for shape in shapes]
    trace = cuda_trace(fn, *sizes)
    launch = tile.build(body_of(trace, list(range(len(trace.equations))), "product"), tile.target_for("cuda"))
    assert launch is not None
    given = [torch.randn(s, dtype=BF16, device="cuda") / s[-1] ** 0.25 for s in sizes]
    (got,) = launch(*given)
    want = fn(*(x.double() for x in given))
    assert (got.double() - want).abs().max() <= 1.6e-2 * want.abs().max()


@pytest.mark.gpu
def test_pointers_that_are_not_aligned() -> None:
    fn, *shapes = CASES["gelu"]
    sizes = [tuple(n // 8 for n in shape) for shape in shapes]
    trace = cuda_trace(fn, *sizes)
    launch = tile.build(body_of(trace, list(range(len(trace.equations))), "product"), tile.target_for("cuda"))
    assert launch is not None
    given = [torch.randn(s, dtype=BF16, device="cuda") / s[-1] ** 0.25 for s in sizes]
    given[0] = torch.cat([given[0].flatten(), given[0].new_zeros(1)])[1:].view(sizes[0])
    (got,) = launch(*given)
    want = fn(*(x.double() for x in given))
    assert (got.double() - want).abs().max() <= 1.6e-2 * want.abs().max()
