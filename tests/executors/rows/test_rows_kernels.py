"""Kernels over few rows: as Python under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from kernel_cases import check

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.ops.rows.kernels import split_attention  # noqa: E402
from tessera.ops.rows.kernels.gemv import gemv  # noqa: E402
from tessera.ops.rows.kernels.skinny_gemm import skinny_gemm  # noqa: E402

LINEAR = 4 * 4 + 2 + 4 + 1
CASES = LINEAR + 2 * 6 + 3 * 5 + 2 * 2 * 3


@pytest.mark.parametrize(
    "which, count", [("some", LINEAR + 6 + 5 + 6), pytest.param("all", CASES, marks=pytest.mark.sweep)]
)
def test_kernels_compute_what_their_operators_mean(which: str, count: int) -> None:
    assert int(run_interpreted(Path(__file__).with_name("kernel_cases.py"), which).split()[-1]) == count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    assert check("cuda", dtype, every=True) == CASES


def compiled(kernel: triton.JITFunction, constants: dict[str, object], stored: str, warps: int, stages: int = 3) -> str:
    """The PTX of a kernel for Hopper, with no such GPU here."""
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(("x_ptr", "g_ptr", "r_ptr", "b0", "b1", "b2", "y0", "y1", "y2"), "*bf16")
    types |= dict.fromkeys(("w0", "w1", "w2"), stored) | dict.fromkeys(("s0", "s1", "s2"), "*fp32")
    types |= dict.fromkeys(("eps", "shift"), "fp32")
    return ptx(kernel, constants, types, warps, ("k", "width"), stages)


def ptx(
    kernel: triton.JITFunction,
    constants: dict,
    types: dict[str, str],
    warps: int,
    even: tuple[str, ...],
    stages: int = 3,
    capability: int = 90,
) -> str:
    """Pointers, and numbers among `even`, are multiples of sixteen. The cubin is made too."""
    aligned = [i for i, name in enumerate(kernel.arg_names) if types[name][0] == "*" or name in even]
    source = ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": capability >= 90}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"].startswith(b"\x7fELF")
    return made.asm["ptx"]


PLAIN = {"NORM": True, "RESIDUAL": False, "BIAS": False, "GATE": 1, "PDL": True}


def test_weights_are_read_in_wide_pieces_before_the_wait() -> None:
    constants = {**PLAIN, "SCALED": False, "BLOCK": 8, "DEPTH": 1024}
    text = compiled(gemv, constants, "*bf16", 4)
    assert re.search(r"ld\.global\S*\.v4", text)
    assert text.index("griddepcontrol.launch_dependents") < text.index("ld.global") < text.index("griddepcontrol.wait")


@pytest.mark.parametrize("gate", [0, 1])
def test_weights_go_to_the_matrix_units_without_a_stop(gate: int) -> None:
    """They are loaded in the layout in which they are multiplied: none passes through shared memory."""
    constants = {**PLAIN, "GATE": gate, "SCALED": False, "ROWS": 8, "BLOCK": 16, "DEPTH": 64, "SPLIT": 4, "EVEN": True}
    text = compiled(skinny_gemm, constants, "*bf16", 4, stages=1)
    assert "mma.sync.aligned.m16n8k16" in text and "ldmatrix" not in text
    assert len(re.findall(r"ld\.global\S*\.v4", text)) >= 4 + 4 * gate
    assert text.index("griddepcontrol.launch_dependents") < text.index("ld.global") < text.index("griddepcontrol.wait")


HEADS = {"HEAD": 128, "NORM": True, "TURN": True, "PDL": True}


def head_types(kernel: triton.JITFunction, constants: dict, **others: str) -> dict[str, str]:
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(("norm", "cosine", "sine"), "*bf16") | dict.fromkeys(("eps", "shift"), "fp32")
    return types | {"positions": "*i64", **others}


@pytest.mark.parametrize(
    ("mask", "write", "capability"), [*itertools.product((0, 1, 2), (False, True), (90,)), (0, True, 80)]
)
def test_keys_and_values_go_to_the_matrix_units_without_a_stop(mask: int, write: bool, capability: int) -> None:
    constants = {"HEAD": 64, "SHARE": 8, "STEP": 32, "SPLIT": 4, "LIMIT": mask == 0, "MASK": mask, "WRITE": write}
    constants |= {"NORM": True, "TURN": True, "KEY_NORM": True, "KEY_TURN": True, "ONE": False, "PDL": capability >= 90}
    names = ("q_ptr", "k_ptr", "v_ptr", "new_k", "new_v", "out", "key_norm", "key_cosine", "key_sine")
    given = dict.fromkeys(names, "*bf16") | {"mask": "*i1" if mask == 1 else "*bf16", "sums": "*fp32", "tops": "*fp32"}
    given |= dict.fromkeys(("scale", "key_eps", "key_shift"), "fp32")
    types = head_types(split_attention.attend, constants, **given)
    strides = ("qb", "qh", "kb", "kh", "kl", "vb", "vh", "vl", "nkb", "nkh", "nvb", "nvh")
    text = ptx(split_attention.attend, constants, types, 4, strides, 1, capability)
    assert "mma.sync" in text and "cp.async" not in text
    assert len(re.findall(r"ld\.global\S*\.v4", text)) >= 16  # keys and values


@pytest.mark.parametrize("capability", [80, 90])
def test_writing_a_cache_compiles(capability: int) -> None:
    constants = HEADS | {"PDL": capability >= 90}
    types = head_types(split_attention.write, constants, cache="*bf16", new="*bf16")
    assert "rsqrt" in ptx(split_attention.write, constants, types, 1, ("nh", "cl", "ch"), capability=capability)
