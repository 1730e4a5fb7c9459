"""Kernels over few rows: as Python under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_cases import check

triton = pytest.importorskip("triton")
CASES = 2 * 4 * 4 + 2 * 4


def test_kernels_compute_what_their_operators_mean() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("decode_cases.py"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == CASES


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    assert check("cuda", dtype) == CASES


@pytest.mark.parametrize(
    ("bits", "stored", "program"),
    [(0, "*bf16", "one_row"), (4, "*i32", "one_row"), (8, "*i32", "one_row"), (0, "*bf16", "few_rows")],
)
def test_weights_are_read_in_wide_pieces(bits: int, stored: str, program: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tessera.runtime import decode_kernels

    kernel = getattr(decode_kernels, program)
    one = program == "one_row"
    shape = {"BLOCK": 8 if one else 32, "DEPTH": 8192 // bits if bits and one else 1024 if one else 128}
    constants = {"NORM": True, "RESIDUAL": False, "BIAS": False, "GATE": 0, "BITS": bits, "SCALED": False}
    constants |= {"GROUP": 128, "PDL": True, **shape}
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(("x_ptr", "g_ptr", "r_ptr", "b0", "b1", "b2", "y0", "y1", "y2"), "*bf16")
    types |= dict.fromkeys(("w0", "w1", "w2"), stored) | dict.fromkeys(("s0", "s1", "s2"), "*fp32") | {"eps": "fp32"}
    aligned = [i for i, name in enumerate(kernel.arg_names) if types[name][0] == "*" or name in ("k", "width")]
    source = ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2, "launch_pdl": True})
    text = compiled.asm["ptx"]
    assert "griddepcontrol.wait" in text and "griddepcontrol.launch_dependents" in text
    assert re.search(r"ld\.global\S*\.v4|cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", text)
