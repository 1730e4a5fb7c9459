"""Is a compiled result right? Structure, shape, dtype and device must be eager's; values nearly so.

Two answers of like precision differ in rounding. So a result counts as right where it agrees with eager within the
usual tolerance of its dtype, or where its distance from the same program in float64 is at most twice eager's own
distance and a little. `Wrong` is raised otherwise, with the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tessera.tools.battery.case import Wrong
from tessera.torch_internals import pytree

FACTOR = 2.0  # so much farther from float64 than eager may a result be
# What is added to that: rounding of the last place that another order of sums may move.
SMALL = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-5, torch.complex64: 2e-5}
TOLERANCE = {
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
    torch.float32: (2e-5, 2e-5),
    torch.complex64: (2e-5, 2e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}
Exact = Callable[[], Sequence[object]]


def leaves(tree: object) -> list[object]:
    """Tensors and numbers of a result, whatever holds them."""
    return pytree.tree_leaves(tree)


def tensors(tree: object) -> list[Tensor]:
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def check(
    what: str,
    got: object,
    want: object,
    exact: Exact | None = None,
    values: bool = True,
    unwritten: Callable[[Tensor], bool] = lambda _: False,
) -> None:
    """Raise `Wrong` where `got` is not `want`. `exact` computes the same in float64, if it must be known.

    Without `values` only the form is compared, as it is for a tensor of `want` that is `unwritten`.
    """
    mine, theirs = leaves(got), leaves(want)
    if len(mine) != len(theirs):
        raise Wrong(f"{what}: expected {len(theirs)} results, got {len(mine)}")
    finer: list[object] | None = None
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        name = f"{what}[{place}]" if len(mine) > 1 else what
        if not isinstance(b, Tensor):
            if values:
                number(name, a, b)
            continue
        same_form(name, a, b)
        assert isinstance(a, Tensor)
        if not values or unwritten(b) or close(a, b):
            continue
        if finer is None and exact is not None:
            try:
                finer = leaves(exact())
            except Exception:  # not every operator has a float64: eager alone decides then
                finer = []
        reference = finer[place] if finer and len(finer) == len(theirs) else None
        if not (near(a, b, reference) if isinstance(reference, Tensor) else rounds_alike(a, b)):
            raise Wrong(f"{name}: {difference(a, b, reference)}")


def number(name: str, a: object, b: object) -> None:
    if isinstance(b, (bool, int, float, complex)) and not isinstance(a, Tensor):
        if a != b and not (a != a and b != b) and abs(a - b) > 1e-5 * abs(b):  # type: ignore[operator]
            raise Wrong(f"{name}: expected {b}, got {a}")
    elif type(a) is not type(b):
        raise Wrong(f"{name}: expected {type(b).__name__}, got {type(a).__name__}")


def same_form(name: str, a: object, b: Tensor) -> None:
    if not isinstance(a, Tensor):
        raise Wrong(f"{name}: expected a tensor, got {type(a).__name__}")
    for fact in ("shape", "dtype", "device", "layout", "requires_grad"):
        mine, theirs = getattr(a, fact), getattr(b, fact)
        if mine != theirs:
            raise Wrong(f"{name}: expected {fact} {theirs}, got {mine}")


def same_strides(what: str, got: object, want: object) -> None:
    """Results laid out as eager's; strides count where they tell one element from another."""
    for place, (a, b) in enumerate(zip(tensors(got), tensors(want), strict=True)):
        if a.layout is not torch.strided or b.numel() == 0:
            continue
        if any(p != q and size > 1 for p, q, size in zip(a.stride(), b.stride(), b.shape, strict=True)):
            raise Wrong(f"{what}[{place}]: expected strides {b.stride()}, got {a.stride()} of {tuple(b.shape)}")


def plain(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_quantized:
        x = x.dequantize()
    elif x.layout is not torch.strided:
        x = x.to_dense()
    if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
        x = x.float()
    return x


def close(a: Tensor, b: Tensor) -> bool:
    rtol, atol = TOLERANCE.get(b.dtype, (0.0, 0.0))
    a, b = plain(a), plain(b)
    try:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        return False
    return True


def distance(x: Tensor, exact: Tensor) -> float:
    """The distance relative to the exact result, as a whole."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    x, exact = plain(x).to(wide), plain(exact).to(wide)
    known = exact.isfinite() & x.isfinite()
    x, exact = torch.where(known, x, 0), torch.where(known, exact, 0)
    scale = float(exact.norm())
    return float((x - exact).norm()) / (scale or 1.0)


def near(a: Tensor, b: Tensor, exact: Tensor) -> bool:
    """At most twice as far from the exact result as eager is; finite where eager is, or where the exact result is."""
    if not b.is_floating_point() and not b.is_complex():
        return False
    finite = plain(a).isfinite()
    if not any(torch.equal(finite, plain(x).isfinite()) for x in (b, exact.to(b.dtype))):
        return False
    return distance(a, exact) <= FACTOR * distance(b, exact) + SMALL.get(b.dtype, 1e-9)


def rounds_alike(a: Tensor, b: Tensor) -> bool:
    """Where float64 cannot decide: in half precision, two roundings of the largest element."""
    if b.dtype not in (torch.bfloat16, torch.float16):
        return False
    step = 2 * torch.finfo(b.dtype).eps
    a, b = plain(a).double(), plain(b).double()
    known = b.isfinite()
    if not torch.equal(a.isfinite(), known):
        return False
    a, b = a.where(known, 0), b.where(known, 0)
    return float((a - b).abs().max()) <= step * float(b.abs().max())


def difference(a: Tensor, b: Tensor, exact: object) -> str:
    if not (b.is_floating_point() or b.is_complex()):
        count = int((plain(a) != plain(b)).sum())
        return f"{count} of {b.numel()} elements differ"
    if isinstance(exact, Tensor):
        return f"{distance(a, exact):.2g} from float64, eager {distance(b, exact):.2g} ({b.dtype}, {tuple(b.shape)})"
    wide = torch.complex128 if b.is_complex() else torch.float64
    worst = float((plain(a).to(wide) - plain(b).to(wide)).abs().nan_to_num().max()) if b.numel() else 0.0
    return (
        f"off by {worst:.2g} where eager is up to {float(plain(b).to(wide).abs().nan_to_num().max()):.2g} ({b.dtype})"
    )
