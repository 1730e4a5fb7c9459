"""Kernels that choose tokens: under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted

triton = pytest.importorskip("triton")

from sampling_cases import CUT_ROWS, ROWS, SETTINGS, check, check_cuts  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.serve import sampling_kernels  # noqa: E402

CUT = CUT_ROWS * (len(SETTINGS) + 1)


@pytest.mark.parametrize("settings", [4, pytest.param(len(SETTINGS), marks=pytest.mark.sweep)])
def test_kernels_choose_what_operators_choose(settings: int) -> None:
    """The first settings in one type, the last in another: four of each are all of them."""
    printed = run_interpreted(Path(__file__).with_name("sampling_cases.py"), settings)
    assert list(map(int, printed.split())) == [4 * ROWS, *2 * [CUT_ROWS * (settings + 1)]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    assert check("cuda", dtype) == 4 * ROWS and check_cuts("cuda", dtype) == CUT


@pytest.mark.parametrize("draws, cuts", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["measure", "pick", "bound"])
def test_kernels_compile_for_hopper(name: str, draws: bool, cuts: bool) -> None:
    if name == "bound" and not cuts:
        pytest.skip("called where tokens are left out")
    kernel = getattr(sampling_kernels, name)
    constants = {"PART": 4096, "PARTS": 64, "DRAWS": draws, "CUTS": cuts, "TILE": sampling_kernels.TILE, "BITS": 16}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    if not draws:
        constants |= dict.fromkeys({"temperature", "seeds", "counters"} & set(kernel.arg_names))
    if not cuts:
        constants |= dict.fromkeys({"leasts", "lasts"} & set(kernel.arg_names))
    given = {"logits": "*bf16", "places": "*i32", "lasts": "*i32"}
    given |= dict.fromkeys(("temperature", "tops", "sums", "leasts", "top_p", "min_p"), "*fp32")
    given |= dict.fromkeys(("seeds", "counters", "out", "top_k"), "*i64")
    types = {key: "constexpr" if key in constants else given.get(key, "i32") for key in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16 if name == "bound" else 8})
    assert made.asm["cubin"].startswith(b"\x7fELF")
