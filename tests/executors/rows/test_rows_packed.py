"""Kernels with packed weights: as Python under Triton's interpreter, compiled for a GPU that is not there, on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from packed_cases import SIZES, check, product

from tessera.ops import quantized as meaning
from tessera.ops.rows.kernels import linear

triton = pytest.importorskip("triton")

from test_rows_kernels import PLAIN, compiled  # noqa: E402

from tessera.ops.rows.kernels.packed_gemm import packed_gemm  # noqa: E402

OUTPUTS = 2 * sum(rows * n for rows, _, n in SIZES) + 32


def test_products_are_within_their_bound() -> None:
    assert int(run_interpreted(Path(__file__).with_name("packed_cases.py")).split()[-1]) == OUTPUTS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_within_their_bound_on_a_gpu(dtype: torch.dtype) -> None:
    assert check("cuda", dtype) == OUTPUTS


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_assembly_gives_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = meaning.quantized(torch.randn(32, 512, device="cuda"), kind)
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    found = product(x, weight, scale, kind)
    monkeypatch.setattr(linear, "interpreted", lambda: True)
    assert torch.equal(found, product(x, weight, scale, kind))


def constants(bits: int, **others: object) -> dict[str, object]:
    made = {**PLAIN, "BITS": bits, "GROUP": 128, "STEP": 16, "TILES": 2, "MORE": False, "EVEN": True, "ROWS": 1}
    return {**made, "ASM": True, **others}


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_go_straight_to_the_matrix_units(bits: int) -> None:
    text = compiled(packed_gemm, constants(bits), "*i8", 8)
    wide = [m.start() for m in re.finditer(r"ld\.global\S*evict_first\S*\.v4", text)]
    assert len(wide) == 2 * 2 * bits // 2  # two groups a warp, two tiles
    assert text.index("griddepcontrol.launch_dependents") < wide[0]
    assert wide[-1] < text.index("griddepcontrol.wait")
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k32\.\S*s8\.s8", text)) == 2 * 2 * 4 * 2


@pytest.mark.parametrize("rows", [1, 8])
def test_compiles_without_assembly_and_for_odd_sizes(rows: int) -> None:
    odd = constants(4, ASM=False, MORE=True, EVEN=False, ROWS=rows, TILES=2, BIAS=True)
    assert "m16n8k32" in compiled(packed_gemm, odd, "*i8", 16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_plans_fit(bits: int, rows: int, gated: bool) -> None:
    for k in (128, 384, 2048, 4096, 8192, 14336):
        for outputs in (16, 2048, 3072, 8192, 32000):
            step, warps, tiles, registers = linear.packed_plan(rows, k, outputs, gated, bits)
            assert step % warps == 0 and step & (step - 1) == 0 and warps <= 16
            assert not gated or tiles % 2 == 0
            assert step // warps * tiles * bits * 2 <= 128  # registers of a thread that hold weights
            assert registers is None or registers * warps * 32 <= 65536
