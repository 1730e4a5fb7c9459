"""Results of two programs side by side: the worst element, and whether it is within what the dtype allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# How far results may lie apart: relative, and of the largest element.
TOLERANCES = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-4),
    torch.float64: (1e-6, 1e-7),
    torch.complex64: (1e-3, 1e-4),
    torch.complex128: (1e-6, 1e-7),
}


@dataclass(frozen=True)
class Difference:
    """Two results of one name."""

    name: str
    problem: str  # empty where they agree
    worst: float = 0.0  # the largest distance of two elements
    at: tuple[int, ...] = ()
    got: object = None
    expected: object = None

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        return f"{self.name}: agrees, the worst element is off by {self.worst:.3g}"


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, precision: torch.dtype | None = None) -> Difference:
    """Within what their dtype allows, or `precision`, where they are computed in a narrower one."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        here, there = (f"{x.dtype} of {tuple(x.shape)}" for x in (got, expected))
        return Difference(name, f"expected {there}, got {here}")
    if not got.numel():
        return Difference(name, "")
    relative, absolute = TOLERANCES.get(precision if precision and got.is_floating_point() else got.dtype, (0.0, 0.0))
    kind = torch.complex128 if got.dtype.is_complex else torch.float64
    got, expected = got.detach(), expected.detach()
    a, b = got.to(kind), expected.to(kind)
    equal = (a == b) | (a.isnan() & b.isnan())
    distance = torch.where(equal, 0.0, (a - b).abs().nan_to_num(float("inf"), float("inf")))
    finite = b.abs()[b.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    allowed = relative * b.abs().nan_to_num(0.0, 0.0, 0.0) + absolute * min(max(largest, 1e-30), 1e30)
    place = int(distance.reshape(-1).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)) if got.ndim else ()
    worst, wrong = float(distance.reshape(-1)[place]), int((distance > allowed).sum())
    mine, theirs = got[at].item(), expected[at].item()
    problem = ""
    if wrong:
        where = f"[{', '.join(map(str, at))}]" if at else "its only element"
        problem = (
            f"{wrong} of {got.numel()} elements differ; the worst is {where}: expected {theirs:.8g}, got {mine:.8g}"
        )
    return Difference(name, problem, worst, at, mine, theirs)


def rounding_alone(got: torch.Tensor, expected: torch.Tensor, exact: object) -> bool:
    """Whether a result lies about as close to that of double precision as the expected one does.

    Of sums that cancel nothing but rounding is left, and no digit of it is the same in another order."""
    if not isinstance(exact, torch.Tensor) or exact.shape != got.shape or not exact.dtype.is_floating_point:
        return False
    if got.dtype != expected.dtype or not got.dtype.is_floating_point:
        return False
    here, there = ((x.double() - exact.cpu()).abs().max() for x in (got, expected))
    return bool(here <= 8 * there)
