"""Launches the products over few rows: `rows_linear` and `quantized_linear` on a GPU.

In: the operators' tensors. Out: their results, in memory of their own, on the current stream. A row block of weights
belongs to one program, which reads it along its rows in 16-byte pieces. One row of x is a GEMV, without matrix units;
two to sixteen are a skinny GEMM; packed weights have a GEMM of their own for any number of rows.
"""

from __future__ import annotations

import math

from torch import Tensor

from tessera.ops.quantized import BITS, GROUP, TALL
from tessera.ops.rows.kernels.gemv import gemv
from tessera.ops.rows.kernels.packed_gemm import packed_gemm
from tessera.ops.rows.kernels.skinny_gemm import skinny_gemm
from tessera.ops.rows.limits import early, interpreted

_GATE = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


def rows_linear(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor],
    norm: Tensor | None, eps: float, shift: float, residual: Tensor | None, gate: str, kind: str,
) -> list[Tensor]:  # fmt: skip
    k = x.shape[-1]
    rows = x.numel() // k
    x = x.contiguous()
    sizes = [t.shape[0] for t in scales or weights]
    own = sizes[:1] if gate else sizes
    results = [x.new_empty((*x.shape[:-1], n)) for n in own]

    def nth(tensors: list[Tensor], i: int) -> Tensor:
        return tensors[i] if i < len(tensors) else tensors[0] if tensors else x

    arguments = (
        x,
        x if norm is None else norm,
        x if residual is None else residual.contiguous(),
        *(nth(group, i) for group in (weights, scales, biases, results) for i in range(3)),
        *(sizes[i] if i < len(sizes) else 0 for i in range(3)),
    )
    common = {"NORM": norm is not None, "RESIDUAL": residual is not None, "BIAS": bool(biases), "GATE": _GATE[gate]}
    common |= early()
    if kind in BITS:
        _packed(arguments, own, rows, k, (eps, shift), BITS[kind], common)
    elif rows > 1:
        _skinny(arguments, own, rows, k, (eps, shift), common | {"SCALED": kind == "fp8"})
    else:
        block, depth = gemv_plan(k, sum(sizes), bool(gate))
        *ends, programs = _ends([math.ceil(n / block) for n in own])
        shape = {"BLOCK": block, "DEPTH": depth, "SCALED": kind == "fp8"}
        gemv[(programs,)](*arguments, *ends, k, eps, shift, **shape, **common, num_warps=4, num_stages=1)
    return results


def _packed(
    arguments: tuple, sizes: list[int], rows: int, k: int, norm: tuple, bits: int, common: dict[str, object]
) -> None:
    columns = 1 << (rows - 1).bit_length()
    step, warps, tiles, registers = packed_plan(columns, k, sum(sizes), bool(common["GATE"]), bits)
    tall = tiles * TALL // (2 if common["GATE"] else 1)
    *ends, programs = _ends([math.ceil(n / tall) for n in sizes])
    even = k % (step * GROUP) == 0 and all(n % tall == 0 for n in sizes)
    shape = {"BITS": bits, "GROUP": GROUP, "STEP": step, "TILES": tiles, "MORE": k > step * GROUP, "EVEN": even}
    shape |= {"ROWS": columns, "ASM": not interpreted()}
    how = {"num_warps": warps, "num_stages": 1, "maxnreg": registers}
    packed_gemm[(programs,)](*arguments, *ends, rows, k, *norm, **shape, **common, **how)


def _skinny(arguments: tuple, sizes: list[int], rows: int, k: int, norm: tuple, common: dict[str, object]) -> None:
    block, depth, split, registers = skinny_plan(k, sum(sizes), bool(common["GATE"]))
    *ends, programs = _ends([math.ceil(n / block) for n in sizes])
    shape = {"ROWS": 8 if rows <= 8 else 16, "BLOCK": block, "DEPTH": depth, "SPLIT": split}
    shape["EVEN"] = k % (depth * split) == 0
    skinny_gemm[(programs,)](
        *arguments, *ends, rows, k, *norm, **shape, **common, num_warps=split, num_stages=1, maxnreg=registers
    )


def skinny_plan(k: int, outputs: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows of weights a program, columns a warp and step, warps, registers a thread: what was fastest on an H200.

    Few outputs make few programs: each asks for much at once. Many make several a multiprocessor, and small ones are
    more. With a limit on registers ptxas puts loads together; left alone it makes each wait for the one before it.
    """
    if gated or outputs >= 8192:
        return 16 if gated else 32, 64, 4, 128
    split = 4 if k <= 2048 else 8
    return 16, next((depth for depth in (512, 256, 128) if k % (depth * split) == 0), 64), split, 255


def _ends(counts: list[int]) -> list[int]:
    """Where the programs of the first and the second weight end, and where all do."""
    total = sum(counts)
    return [counts[0] if len(counts) > 1 else total, sum(counts[:2]) if len(counts) > 2 else total, total]


def packed_plan(rows: int, k: int, outputs: int, gated: bool, bits: int) -> tuple[int, int, int, int | None]:
    """Groups of packed weights a program reads at once, its warps, tiles of sixteen rows, registers: what was fastest
    on an H200 for one row and int4. The more outputs, the more of them share what a program does to x."""
    step = min(1 << (k // GROUP - 1).bit_length(), 16 if rows > 1 else 32 if gated or k > 64 * GROUP else 64)
    if rows > 1 or (outputs < 3072 and not gated):
        return step, min(step, 16), 2 if gated else 1, None
    warps = min(max(step // 2, 1), 16)
    room = 64 // (step // warps * bits * 2)  # tiles whose weights are in 64 registers
    tiles = max(min(4 if gated or outputs >= 16384 else 2, room), 2 if gated else 1)
    return step, warps, tiles, 128 if tiles == 4 else None


def gemv_plan(k: int, outputs: int, gated: bool) -> tuple[int, int]:
    """Rows of weights a program and columns a step, for one row of x: what was fastest on an H200."""
    block = 8 if gated else 4 if outputs >= 3072 or k > 4096 else 2
    return block, min(1024 if k <= 4096 else 2048, 1 << (k - 1).bit_length())


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return rows_linear(x, [weight], [scale], [] if bias is None else [bias], None, 0.0, 0.0, None, "", kind)[0]
