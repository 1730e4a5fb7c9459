"""How far two results are apart, and how far they may be.

The measure is the largest difference from a reference of more precision. What a dtype explains: several times the
error that eager PyTorch makes on the same numbers, and some units in the last place of the largest number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EAGER_TIMES = 16  # errors of two orders of summation differ by this much, not by more
LAST_PLACES = {torch.float16: 4, torch.bfloat16: 4}  # units in the last place; 32 where a dtype has many
FLIPPED = 0.001  # of whole numbers computed from floats, such as a sort's indices, this part may differ


@dataclass(frozen=True)
class Comparison:
    """One result: its error, eager's error, and the error its dtype explains."""

    what: str
    dtype: str
    error: float
    eager_error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        errors = f"error {self.error:.3g}, eager's {self.eager_error:.3g}, limit {self.limit:.3g}"
        return f"{self.what} ({self.dtype}): {errors}"


def compare(what: str, ours: object, eager: object, reference: object) -> Comparison | None:
    """None where there is nothing to compare: not tensors."""
    if not isinstance(eager, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return None if type(ours) is type(eager) else _wrong(what, type(ours).__name__, "is not what eager gives")
    if not isinstance(ours, torch.Tensor):
        return _wrong(what, "nothing", "is missing")
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return _wrong(what, f"{ours.dtype}{list(ours.shape)}", f"expected {eager.dtype}{list(eager.shape)}")
    name = str(ours.dtype).removeprefix("torch.")
    ours, eager, reference = (x.detach() for x in (ours, eager, reference))
    if ours.layout is not torch.strided:
        ours, eager, reference = ours.to_dense(), eager.to_dense(), reference.to_dense()
    if not (ours.is_floating_point() or ours.is_complex()):
        mismatches = [float((x != reference).double().mean()) if x.numel() else 0.0 for x in (ours, eager)]
        return Comparison(what, name, mismatches[0], mismatches[1], EAGER_TIMES * mismatches[1] + FLIPPED)
    eps, dtype = torch.finfo(ours.dtype).eps, ours.dtype
    error, eager_error = _difference(ours, reference, eager), _difference(eager, reference, eager)
    limit = EAGER_TIMES * eager_error + LAST_PLACES.get(dtype, 32) * eps * _largest(reference)
    return Comparison(what, name, error, eager_error, limit)


def _wrong(what: str, got: str, why: str) -> Comparison:
    return Comparison(f"{what} {why}", got, float("inf"), 0.0, 0.0)


def _difference(x: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor) -> float:
    """The largest difference of finite numbers; infinite where a number is finite in eager alone, or here alone."""
    if x.numel() == 0:
        return 0.0
    finite = torch.isfinite(eager)
    if not torch.equal(torch.isfinite(x), finite):
        return float("inf")
    both = finite & torch.isfinite(reference)
    return float((x[both].to(reference.dtype) - reference[both]).abs().max()) if bool(both.any()) else 0.0


def _largest(x: torch.Tensor) -> float:
    finite = x[torch.isfinite(x)] if x.numel() else x
    return float(finite.abs().max()) if finite.numel() else 0.0
