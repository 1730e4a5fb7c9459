"""Triangular systems, Cholesky's factor, Fourier transforms; and jaxlib's own targets of `custom_call` for LAPACK."""

from __future__ import annotations

import math

import torch

from tessera.frontends.stablehlo.registry import Site, custom_call, meaning
from tessera.frontends.stablehlo.values import Value, tensor_of

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@meaning("triangular_solve")
def triangular_solve(site: Site, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    lower, how = site["lower"], site["transpose_a"]
    if how == "TRANSPOSE":
        a, lower = a.mT, not lower
    elif how == "ADJOINT":
        a, lower = a.mH, not lower
    wide = _WIDER.get(a.dtype, a.dtype)  # an ill-conditioned system loses many digits
    solved = torch.linalg.solve_triangular(
        a.resolve_conj().to(wide), b.to(wide),
        upper=not lower, left=site["left_side"], unitriangular=site["unit_diagonal"],
    )  # fmt: skip
    return solved.to(a.dtype)


@meaning("cholesky")
def cholesky(site: Site, a: torch.Tensor) -> torch.Tensor:
    """The factor; NaN where the matrix is not positive definite. Only the triangle that is named is read."""
    lower = site.get("lower", False)
    factor, info = _cholesky(a if lower else a.mH)
    factor = torch.where((info == 0)[..., None, None], factor, math.nan)
    return factor.tril() if lower else factor.mH.resolve_conj().triu()


def _cholesky(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.dtype in (torch.float16, torch.bfloat16):
        factor, info = torch.linalg.cholesky_ex(a.float())
        return factor.to(a.dtype), info
    return torch.linalg.cholesky_ex(a)


@meaning("fft")
def fft(site: Site, x: torch.Tensor) -> torch.Tensor:
    length = site["fft_length"]
    dims = list(range(x.ndim - len(length), x.ndim))
    if any(type(n) is int and n == 0 for n in (*length, *x.shape)) or not dims:  # a library refuses no elements
        return x.to(site.element.held) if not dims else x.new_zeros(site.result.shape, dtype=site.element.held)
    match site["fft_type"]:
        case "FFT":
            return torch.fft.fftn(x, dim=dims)
        case "IFFT":
            return torch.fft.ifftn(x, dim=dims)
        case "RFFT":
            return torch.fft.rfftn(x, s=length, dim=dims)
        case _:
            return torch.fft.irfftn(x, s=length, dim=dims)


# --- jaxlib's calls of LAPACK: the real and complex ones of both precisions ---


def _targets(name: str, letters: str = "sdcz") -> list[str]:
    return [f"lapack_{c}{name}_ffi" for c in letters]


def _letter(site: Site, name: str, default: str) -> str:
    """An option that is one letter, which jaxlib writes as its code."""
    config = site.get("mhlo.backend_config") or site.get("backend_config") or {}
    value = config.get(name, default) if isinstance(config, dict) else default
    return chr(value) if isinstance(value, int) else str(value)


def _info(x: torch.Tensor, batch: torch.Size | tuple) -> torch.Tensor:
    return torch.zeros(batch, dtype=torch.int32, device=x.device)


@custom_call(*_targets("potrf"))
def potrf(site: Site, a: Value) -> list[Value]:
    x = tensor_of(a, site.device)
    lower = _letter(site, "uplo", "L") == "L"
    factor, info = torch.linalg.cholesky_ex(x if lower else x.mH)
    return [factor if lower else factor.mH.resolve_conj(), info]


@custom_call(*_targets("getrf"))
def getrf(site: Site, a: Value) -> list[Value]:
    factors, pivots, info = torch.linalg.lu_factor_ex(tensor_of(a, site.device))
    return [factors, pivots, info]


@custom_call(*_targets("geqrf"))
def geqrf(site: Site, a: Value) -> list[Value]:
    return list(torch.geqrf(tensor_of(a, site.device)))


@custom_call(*_targets("orgqr", "sd"), *_targets("ungqr", "cz"))
def orgqr(site: Site, a: Value, tau: Value) -> list[Value]:
    return [torch.linalg.householder_product(tensor_of(a, site.device), tensor_of(tau, site.device))]


@custom_call(*_targets("syevd", "sd"), *_targets("heevd", "cz"))
def syevd(site: Site, a: Value) -> list[Value]:
    x = tensor_of(a, site.device)
    values, vectors = torch.linalg.eigh(x, UPLO=_letter(site, "uplo", "L"))
    return [vectors, values, _info(x, x.shape[:-2])]


@custom_call(*_targets("gesdd"))
def gesdd(site: Site, a: Value) -> list[Value]:
    x = tensor_of(a, site.device)
    mode = _letter(site, "mode", "S")
    if mode == "N":
        values = torch.linalg.svdvals(x)
        shapes = [r.shape for r in site.operation.result_types[2:4]]  # type: ignore[union-attr]
        return [x, values, *(x.new_zeros(s) for s in shapes), _info(x, x.shape[:-2])]
    u, values, vh = torch.linalg.svd(x, full_matrices=mode == "A")
    return [x, values, u, vh, _info(x, x.shape[:-2])]


@custom_call(*_targets("geev"))
def geev(site: Site, a: Value) -> list[Value]:
    x = tensor_of(a, site.device)
    values, right = torch.linalg.eig(x)
    left = torch.linalg.inv(right).mH.resolve_conj()
    left = left / torch.linalg.vector_norm(left, dim=-2, keepdim=True)
    parts = [values] if x.is_complex() else [values.real, values.imag]
    return [*parts, left, right, _info(x, x.shape[:-2])]


@custom_call(*_targets("trsm"))
def trsm(site: Site, a: Value, b: Value, *rest: Value) -> list[Value]:
    x, y = tensor_of(a, site.device), tensor_of(b, site.device)
    lower, how = _letter(site, "uplo", "L") == "L", _letter(site, "trans_x", "N")
    if how != "N":
        x, lower = (x.mT if how == "T" else x.mH.resolve_conj()), not lower
    unit, left = _letter(site, "diag", "N") == "U", _letter(site, "side", "L") == "L"
    return [torch.linalg.solve_triangular(x, y, upper=not lower, left=left, unitriangular=unit)]


@custom_call("LuPivotsToPermutation", "cu_lu_pivots_to_permutation")
def pivots_to_permutation(site: Site, pivots: Value) -> list[Value]:
    """The permutation of rows that exchanging row i with row pivots[i], one after another, makes."""
    x = tensor_of(pivots, site.device).long()
    size = site.result.shape[-1]
    assert size is not None
    order = torch.arange(size, device=x.device).expand(*x.shape[:-1], size)
    for i in range(x.shape[-1]):
        other = x[..., i : i + 1]
        mine, theirs = order[..., i : i + 1], torch.gather(order, -1, other)
        order = order.scatter(-1, other, mine)
        order = torch.cat([order[..., :i], theirs, order[..., i + 1 :]], -1)
    return [order.to(site.element.held)]
