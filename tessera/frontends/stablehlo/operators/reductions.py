"""Reductions. Bodies that torch has become its reductions; any other is folded over the reduced dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tessera.frontends.stablehlo import unsigned64
from tessera.frontends.stablehlo.elements import Element
from tessera.frontends.stablehlo.module import Block
from tessera.frontends.stablehlo.operators import arithmetic, bodies
from tessera.frontends.stablehlo.registry import Site, meaning
from tessera.frontends.stablehlo.values import Splat, Value, tensor_of


@meaning("reduce", raw=True, storage=True)
def reduce(site: Site, *operands: Value) -> list[Value]:
    count = len(operands) // 2
    tensors = [tensor_of(x, site.device) for x in operands[:count]]
    return reduced(site, tensors, operands[count:], site["dimensions"])


def reduced(site: Site, xs: Sequence[torch.Tensor], inits: Sequence[Value], dims: Sequence[int]) -> list[Value]:
    """Of one tensor by a body that torch has, or by folding."""
    if not dims:
        return _folded(site, xs, inits, dims)
    block = site.region()
    name = bodies.kind(block) if len(xs) == 1 else None
    if name is not None:
        out = known(name, xs[0], dims, site.operand(0).element)
        if out is not None:
            return [_with_initial(site, name, out, inits[0])]
    if len(xs) == 2 and (name := _with_place(block)) is not None and all(isinstance(i, Splat) for i in inits):
        return _extreme_and_place(name, xs, inits, dims)  # type: ignore[arg-type]
    return _folded(site, xs, inits, dims)


def _with_place(block: Block) -> str | None:
    """`maximum` or `minimum`, if the body is JAX's argmax or argmin: the larger of two numbers with what stands beside
    it, of equal ones the smaller place; not-a-number is above all."""
    written = bodies.fingerprint(block)
    for name, than in (("maximum", "GT"), ("minimum", "LT")):
        for order in ("FLOAT", "SIGNED"):
            better = f"or(compare(%0, %0, {order}, NE), compare(%0, %2, {order}, {than}))"
            before = f"and(compare(%0, %2, {order}, EQ), compare(%1, %3, SIGNED, LT))"
            if written == (f"select({better}, %0, %2)", f"select(or({before}, {better}), %1, %3)"):
                return name
    return None


def _extreme_and_place(
    name: str, xs: Sequence[torch.Tensor], inits: Sequence[Splat], dims: Sequence[int]
) -> list[Value]:
    """Two reductions: the extreme number, then the least place of those that are it."""
    (x, places), dims = xs, list(dims)
    start = torch.full((), inits[0].number, dtype=x.dtype, device=x.device)
    pick, either = (torch.amax, torch.maximum) if name == "maximum" else (torch.amin, torch.minimum)
    best = either(pick(x, dims, keepdim=True), start)
    missed = torch.iinfo(places.dtype).max
    least = torch.where((x == best) | ((x != x) & (best != best)), places, missed).amin(dims)
    best = best.squeeze(dims)
    return [best, torch.where(best == start, least.clamp(max=int(inits[1].number)), least)]  # type: ignore[arg-type]


def known(name: str, x: torch.Tensor, dims: Sequence[int], element: Element) -> torch.Tensor | None:
    """torch's own reduction, where it has one for these numbers."""
    dims = list(dims)
    if element.kind == "bool":
        if name in ("add", "or", "maximum"):
            return torch.any(x, dims)
        return torch.all(x, dims) if name in ("multiply", "and", "minimum") else None
    if name == "add":
        return element.wrap(torch.sum(x, dims, dtype=x.dtype))
    if name == "multiply":
        for dim in sorted(dims, reverse=True):
            x = element.wrap(torch.prod(x, dim, dtype=x.dtype))
        return x
    if name in ("maximum", "minimum") and element.kind != "complex":
        if any(type(x.shape[d]) is int and x.shape[d] == 0 for d in dims):
            return None
        pick = torch.amax if name == "maximum" else torch.amin
        if element.unsigned64:
            return unsigned64.ordered(pick(unsigned64.ordered(x), dims))
        return pick(x, dims)
    return None


def _with_initial(site: Site, name: str, x: torch.Tensor, init: Value) -> torch.Tensor:
    if isinstance(init, Splat) and neutral(name, init):
        return x
    rule = {
        "add": arithmetic.add, "multiply": arithmetic.multiply, "maximum": arithmetic.maximum,
        "minimum": arithmetic.minimum, "or": arithmetic.add, "and": arithmetic.multiply,
    }[name]  # fmt: skip
    return rule(site, x, init.number if isinstance(init, Splat) else tensor_of(init, site.device))


def neutral(name: str, init: Splat) -> bool:
    """Whether starting from this number changes nothing."""
    element, number = init.element, init.number
    if name == "add":
        return number == 0
    if name == "multiply":
        return number == 1
    if name in ("or", "and"):
        return number == (name == "and")
    if element.kind == "bool":
        return number == (name == "minimum")
    if element.kind == "complex" or element.unsigned64:
        return False
    if element.integer:
        return number == (element.low if name == "maximum" else element.high)
    return number == (-math.inf if name == "maximum" else math.inf)


def _folded(site: Site, xs: Sequence[torch.Tensor], inits: Sequence[Value], dims: Sequence[int]) -> list[Value]:
    kept = [d for d in range(xs[0].ndim) if d not in dims]
    rows = [x.permute(*dims, *kept).reshape(-1, *(x.shape[d] for d in kept)) for x in xs]
    starts = [tensor_of(i, site.device) for i in inits]
    return list(bodies.fold(bodies.over_elements(site), starts, rows))


# --- batch norms: reductions that StableHLO has whole ---


def _columns(x: torch.Tensor, feature: int, values: torch.Tensor) -> torch.Tensor:
    shape = [1] * x.ndim
    shape[feature] = -1
    return values.reshape(shape)


@meaning("batch_norm_inference")
def batch_norm_inference(site: Site, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor,
                         mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:  # fmt: skip
    feature, epsilon = site["feature_index"], site["epsilon"]
    moved = x.movedim(feature, 1) if x.ndim > 1 else x.unsqueeze(0)
    out = torch.nn.functional.batch_norm(moved, mean, variance, scale, offset, False, 0.0, epsilon)
    return out.movedim(1, feature) if x.ndim > 1 else out.squeeze(0)


@meaning("batch_norm_training")
def batch_norm_training(site: Site, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> list[torch.Tensor]:
    feature, epsilon = site["feature_index"], site["epsilon"]
    dims = [d for d in range(x.ndim) if d != feature]
    mean, variance = x.mean(dims), x.var(dims, unbiased=False)
    scaled = (x - _columns(x, feature, mean)) * torch.rsqrt(_columns(x, feature, variance) + epsilon)
    return [scaled * _columns(x, feature, scale) + _columns(x, feature, offset), mean, variance]


@meaning("batch_norm_grad")
def batch_norm_grad(site: Site, x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor,
                    variance: torch.Tensor, ct: torch.Tensor) -> list[torch.Tensor]:  # fmt: skip
    feature, epsilon = site["feature_index"], site["epsilon"]
    dims = [d for d in range(x.ndim) if d != feature]
    inverse = torch.rsqrt(_columns(x, feature, variance) + epsilon)
    centred = (x - _columns(x, feature, mean)) * inverse
    grad_scale, grad_offset = (ct * centred).sum(dims), ct.sum(dims)
    count = x.numel() // x.shape[feature]
    inner = ct - _columns(x, feature, grad_offset) / count - centred * _columns(x, feature, grad_scale) / count
    return [_columns(x, feature, scale) * inverse * inner, grad_scale, grad_offset]


@meaning("map", raw=True)
def map_(site: Site, *xs: Value) -> list[Value]:
    return list(bodies.over_elements(site)(*(tensor_of(x, site.device) for x in xs)))
