"""Sums of bags: the kernel under Triton's interpreter, compiled for a GPU that is not there, and on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import bag_cases
import pytest
import torch
from interpreted import run_interpreted

import tessera  # noqa: F401  (registers the operators)
from tessera.ops import bags

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tessera.ops.bag_kernel import bag_kernel  # noqa: E402

CASES = len(bag_cases.FORMS) * len(bag_cases.WIDTHS) + 1 + 4


def test_the_kernel_computes_what_the_operator_means() -> None:
    assert int(run_interpreted(Path(__file__).with_name("bag_cases.py")).split()[-1]) == CASES + 1


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert bag_cases.check("cuda") == CASES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_an_embedding_bag(dtype: torch.dtype) -> None:
    """Also where sizes are all that is known."""
    for form in bag_cases.FORMS:
        rows, order, starts, last, weights, mean, padding = bag_cases.case(16, form, dtype, torch.int64, "cpu")
        want = torch.nn.functional.embedding_bag(
            order, rows, starts, mode="mean" if mean else "sum", per_sample_weights=weights,
            include_last_offset=last, padding_idx=padding if padding >= 0 else None,
        )  # fmt: skip
        given = (rows, order, starts, last, weights, mean, padding)
        got = torch.ops.tessera.bag_sum(*given)
        assert torch.equal(got, want) and (got.t() if form == "columns" else got).is_contiguous()
        empty = torch.ops.tessera.bag_sum(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given))
        assert (empty.shape, empty.stride(), empty.dtype) == (got.shape, got.stride(), got.dtype)


def ptx(width: int, stored: str, size: int, **changed: object) -> str:
    block, columns, step = bags.plan(width, size)
    constants = {"COLUMNS": False, "LAST": True, "WEIGHTED": False, "PADDED": False, "MEAN": False}
    constants |= {"ACC": triton.language.float32, "BAGS": block, "WIDTH": columns, "STEP": step}
    constants |= changed if "across" in changed else {"along": 1, **changed}
    types = {name: "constexpr" if name in constants else "i32" for name in bag_kernel.arg_names}
    types |= dict.fromkeys(("rows", "weights", "out"), stored) | dict.fromkeys(("order", "starts"), "*i64")
    aligned = [i for i, n in enumerate(bag_kernel.arg_names) if types[n][0] == "*" or n in ("width", "across")]
    source = ASTSource(
        bag_kernel,
        types,
        {(bag_kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": 1, "debug": True, "sanitize_overflow": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"].startswith(b"\x7fELF")
    return made.asm["ptx"]


@pytest.mark.parametrize("width, stored, size", [(256, "*bf16", 2), (64, "*fp32", 4), (16, "*bf16", 2)])
def test_rows_are_read_in_wide_pieces(width: int, stored: str, size: int) -> None:
    text = ptx(width, stored, size)
    assert len(re.findall(r"ld\.global\S*\.v4", text)) >= bags.STEP and re.search(r"st\.global\S*\.v4", text)


def test_every_form_compiles() -> None:
    block, part, step = bags.COLUMN
    assert "st.global" in ptx(64, "*bf16", 2, COLUMNS=True, BAGS=block, WIDTH=part, STEP=step, across=1)
    assert "assertfail" in ptx(300, "*fp16", 2, WEIGHTED=True, PADDED=True, MEAN=True, LAST=False)
    assert "add.f64" in ptx(64, "*fp64", 8, ACC=triton.language.float64)
