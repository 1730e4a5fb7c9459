"""Kernels that choose tokens: under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from sampling_cases import ROWS, check  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.serve import sampling_kernels  # noqa: E402


def test_kernels_choose_what_operators_choose() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("sampling_cases.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == 4 * ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    assert check("cuda", dtype) == 4 * ROWS


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", ["measure", "pick"])
def test_kernels_compile_for_hopper(name: str, draws: bool) -> None:
    kernel = getattr(sampling_kernels, name)
    constants = {"PART": 4096, "PARTS": 64, "DRAWS": draws}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    if not draws:
        constants |= dict.fromkeys({"temperature", "seeds", "counters"} & set(kernel.arg_names))
    given = {"logits": "*bf16", "temperature": "*fp32", "tops": "*fp32", "sums": "*fp32", "places": "*i32"}
    given |= dict.fromkeys(("seeds", "counters", "out"), "*i64")
    types = {key: "constexpr" if key in constants else given.get(key, "i32") for key in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.asm["cubin"].startswith(b"\x7fELF")
