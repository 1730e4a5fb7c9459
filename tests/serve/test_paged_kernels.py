"""Kernels of paged attention: under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted

triton = pytest.importorskip("triton")

from paged_cases import check, check_parts, rows_stand_alone  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.serve import paged_kernels  # noqa: E402

CASES = 2 * 5  # of a shape
PARTS = 3


@pytest.mark.parametrize("shapes", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_kernels_compute_what_the_reference_computes(shapes: int) -> None:
    printed = run_interpreted(Path(__file__).with_name("paged_cases.py"), shapes)
    assert int(printed.split()[-1]) == CASES * shapes + PARTS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    shapes = 1 if dtype is torch.float32 else 3  # wide heads in float32 take minutes to compile
    assert check("cuda", dtype, shapes) == CASES * shapes
    assert check_parts("cuda", dtype) == PARTS
    assert rows_stand_alone("cuda", dtype)


@pytest.mark.parametrize("stored", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("name", ["attend_one", "attend_many", "combine", "combine_many"])
def test_kernels_compile_for_hopper(name: str, stored: str) -> None:
    kernel = getattr(paged_kernels, name)
    every = {
        "GROUP": 4, "SHARE": 4, "ROWS": 16 if name == "attend_one" else 64, "SIZE": 16, "TILE": 64, "HEAD": 128,
        "D": 128, "VALUE": 128, "DV": 128, "WINDOW": True, "SOFTCAP": True, "SPLIT": 256, "MOST": 32, "ONE": False,
        "ALL": False, "QUERIES": 16,
    }  # fmt: skip
    constants = {key: value for key, value in every.items() if key in kernel.arg_names}
    types = {key: "constexpr" if key in constants else "i32" for key in kernel.arg_names}
    given = {"q": "*bf16", "out": "*bf16", "keys": stored, "values": stored, "sums": "*fp32", "tops": "*fp32"}
    given |= dict.fromkeys(("tables", "starts", "positions"), "*i64") | {"scale": "fp32", "softcap": "fp32"}
    types |= {key: value for key, value in given.items() if key in types}
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    assert made.asm["cubin"].startswith(b"\x7fELF")
