"""Products of matrices."""

from __future__ import annotations

import torch

from tessera.frontends.onnx.operators.unsigned import wide
from tessera.frontends.onnx.registry import operator

Tensor = torch.Tensor


def sums_in_half(x: Tensor) -> bool:
    """Some CPUs add up half-precision products in half precision; those run in single precision instead."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.float(), b.float()).half() if sums_in_half(a) else torch.matmul(a, b)


@operator("MatMul")
@wide
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return multiplied(a, b)


@operator("Gemm", 7)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    # A linear layer stays whole: `x @ w.T + bias`.
    if (
        transB
        and not transA
        and alpha == 1.0
        and beta == 1.0
        and (c is None or (c.ndim == 1 and c.shape[0] == b.shape[0]))
    ):
        return torch.nn.functional.linear(a, b, c)
    product = multiplied(a.t() if transA else a, b.t() if transB else b)
    if alpha != 1.0:
        product = _scaled(product, alpha)
    return product if c is None or beta == 0 else product + (c if beta == 1.0 else _scaled(c, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor if x.is_floating_point() else x * int(factor)


@operator("Gemm", 1, 6)
def gemm_with_broadcast(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    broadcast: int = 0,
) -> Tensor:
    return gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@operator("Einsum", 12)
def einsum(*xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *xs)


@operator("Det", 11)
def det(x: Tensor) -> Tensor:
    return torch.linalg.det(x)


def shifted(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """Whole numbers less their zero point, which may be one for each row or column."""
    wide_x = x.to(torch.int32)
    if zero is None:
        return wide_x
    zero = zero.to(torch.int32)
    if zero.ndim == 1 and x.ndim > 1:
        sizes = [1] * x.ndim
        sizes[axis] = -1
        zero = zero.reshape(sizes)
    return wide_x - zero


@operator("MatMulInteger", 10)
def matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return torch.matmul(shifted(a, a_zero, -2), shifted(b, b_zero, -1))
