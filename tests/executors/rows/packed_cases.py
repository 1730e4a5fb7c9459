"""Products with packed weights against float64, by a bound; on `device`. Prints how many outputs were compared.

Run as a program with TRITON_INTERPRET=1 the kernel runs as Python on the CPU, as in `kernel_cases`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.ops import quantized as meaning
from tessera.ops.rows.kernels.linear import rows_linear

SIZES = ((1, 384, 40), (1, 1024, 32), (5, 384, 24), (2, 2176, 16))  # rows, columns, outputs


def bound(x: Tensor, full: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of the result; 2^-16 of the largest x of every group, times its weights."""
    top = x.double().unflatten(-1, (-1, meaning.GROUP)).abs().amax(-1)
    weight = full.double().unflatten(-1, (-1, meaning.GROUP)).abs().sum(-1)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return wanted.abs() * torch.finfo(dtype).eps * 0.51 + top @ weight.T * 2.0**-15.9 + smallest


def product(x: Tensor, weight: Tensor, scale: Tensor, kind: str) -> Tensor:
    return rows_linear(x, [weight], [scale], [], None, 0.0, 0.0, None, "", kind)[0]


def check_bound(device: str, dtype: torch.dtype) -> int:
    """Also where x is large, or one value far above the others."""
    count = 0
    for kind in ("int4", "int8"):
        for rows, k, n in SIZES:
            x = torch.randn(rows, k, device=device, dtype=torch.float32)
            x[:, 7] *= 1000.0
            x = (x * (1e30 if dtype == torch.bfloat16 else 1.0)).to(dtype)
            weight, scale = meaning.quantized(torch.randn(n, k, device=device) / k, kind)
            full = meaning.dequantized(weight, scale, kind)
            wanted = x.double() @ full.double().T
            found = product(x, weight, scale, kind).double()
            assert found.shape == wanted.shape
            assert ((found - wanted).abs() <= bound(x, full, wanted, dtype)).all(), (kind, rows, k, n)
            count += found.numel()
    return count


def check_no_numbers(device: str, dtype: torch.dtype) -> int:
    weight, scale = meaning.quantized(torch.randn(16, 256, device=device), "int4")
    for bad in (float("nan"), float("inf")):
        x = torch.zeros(1, 256, device=device, dtype=dtype)
        assert (product(x, weight, scale, "int4") == 0).all()
        x[0, 130] = bad
        assert not product(x, weight, scale, "int4").isfinite().any()
    return 32


def check(device: str, dtype: torch.dtype) -> int:
    torch.manual_seed(0)
    return check_bound(device, dtype) + check_no_numbers(device, dtype)


if __name__ == "__main__":
    print(check("cpu", torch.float16))
