"""Kernels that choose tokens: under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from sampling_cases import CUT_ROWS, ROWS, SETTINGS, check, check_cuts  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.serve import sampling_kernels  # noqa: E402

CUT = CUT_ROWS * (len(SETTINGS) + 1)


def test_kernels_choose_what_operators_choose() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("sampling_cases.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(map(int, done.stdout.split())) == [4 * ROWS, CUT, CUT]


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
