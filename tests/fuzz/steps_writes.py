"""Writes: through names, through views made on the spot, through indices, masks and `out=`."""

from __future__ import annotations

import torch

from .maker import Maker, Refused
from .steps_views import one

ALONE = (
    "{0}.zero_()|{0}.fill_({k})|{0}.mul_({k})|{0}.add_({k})|{0}.relu_()|{0}.sigmoid_()|{0}.exp_()|{0}.clamp_(-1, 1)"
    "|{0}.neg_()|{0}.abs_()|{0}.sub_(1)|{0}.div_(2)|{0} *= {k}|{0} += 1|{0}.tanh_()|{0}.square_()"
    "|F.relu({0}, inplace=True)"
    "|{0}.copy_({0} * 2)|{0}.copy_(torch.zeros_like({0}))|{0}.sin_()|{0}.pow_(2)"
)
WITH = (
    "{0}.copy_({1})|{0}.add_({1})|{0}.mul_({1})|{0}.sub_({1}, alpha=2)|{0} += {1}|{0} *= {1}|{0}.copy_({1}.exp())"
    "|{0}[...] = {1}"
    "|{0}.copy_({1})|{0}.addcmul_({1}, {1})|{0}.lerp_({1}, 0.5)|{0}.div_({1})|torch.add({1}, 1, out={0})|{0}.copy_({1})"
    "|torch.mul({1}, {0}, out={0})|{0}.masked_fill_({1} > 0, {k})|{0}[{1} > 0] = {k}|{0}.masked_fill_({1} != 0, 1)"
)
RANKED = (
    "{0}[0] = {k}|{0}[-1:] = {k}|{0}[0] += 1|{0}[1:] *= {k}|{0}[..., 0] = {0}[..., -1]|{0}.index_fill_({d}, {i}, {k})"
    "|{0}[{i}] = {k}|{0}[{i}] += {k}|{0}.index_put_(({i},), torch.tensor({k}, dtype={0}.dtype), accumulate=True)"
    "|{0}.index_add_({d}, {i}, {0}.index_select({d}, {i}))|{0}.index_copy_({d}, {i}, {0}.index_select({d}, {i}) * 2)"
    "|{0}.scatter_({d}, {0}.argsort({d}), {k})|{0}.scatter_add_({d}, {0}.argsort({d}), {0})"
    "|{0}[..., 1:] = {0}[..., :-1].clone()"
    "|{0}[{0} > 0] = {k}|{0}[{0} > 0] *= {k}|{0}.cumsum_({d})|{0}[torch.tensor(0)] = {k}|{0}[::2].add_(1)"
)
MATRIX = "{0}.fill_diagonal_({k})|{0}.t().mul_({k})|{0}.diagonal().add_(1)|{0}[:, 0] = {k}|{0}[0, 1:] = {k}|{0}.triu_()"


def _written(m: Maker, a: str) -> str:
    """A tensor itself, or a view of it."""
    return one(m, a) if m.chance(0.35) else a


def _target(m: Maker) -> str:
    return m.any(lambda x: x.dtype is not torch.bool)


def alone(m: Maker) -> None:
    a = _written(m, _target(m))
    form = m.rng.choice(ALONE.split("|"))
    if "=" in form and "(" in a:  # nothing is assigned to a call
        a = m.assign(a)
    m.take(form.format(a, k=m.number()))


def with_other(m: Maker) -> None:
    name = _target(m)
    if m.chance(0.3):
        name = m.assign(one(m, name))
    b = m.beside(name, lambda x: not x.is_complex())
    shared = {m.value(x).untyped_storage()._cdata for x in (name, b)}
    if m.kind == "transform" and len(shared) == 1:
        raise Refused  # torch.func's forward mode over forward mode gives a wrong tangent of `x *= x`
    if _laid(m.value(name)) != _laid(m.value(b)) and _addresses(m.value(name)) & _addresses(m.value(b)):
        raise Refused  # what eager reads there, before or after it was written, is chance
    m.take(m.rng.choice(WITH.split("|")).format(name, b, k=m.number()))


def _laid(x: torch.Tensor) -> tuple:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _addresses(x: torch.Tensor) -> set[tuple[int, int]]:
    """Where the elements of a tensor lie."""
    places = {x.storage_offset()}
    for size, step in zip(x.shape, x.stride(), strict=True):
        places = {p + i * step for p in places for i in range(size)}
    return {(x.untyped_storage()._cdata, p) for p in places}


def placed(m: Maker) -> None:
    a = m.any(lambda x: x.ndim > 0 and x.dtype is not torch.bool)
    if m.chance(0.3):
        a = m.assign(one(m, a))
        if not m.value(a).ndim:
            raise Refused
    forms = RANKED.split("|") + (MATRIX.split("|") * 2 if m.value(a).ndim == 2 else [])
    d = m.dim(a, 1) % m.value(a).ndim
    form = m.rng.choice(forms)
    places = m.places(m.value(a).shape[d if "{d}" in form else 0], 2)
    m.take(form.format(a, k=m.number(), d=d, i=places))


def detached(m: Maker) -> None:
    a = m.any(lambda x: x.is_floating_point())
    through = m.rng.choice(["detach()", "detach()", "data"]) if m.kind != "functional" else "detach()"
    m.take(m.rng.choice(["{0}.{1}.mul_({k})", "{0}.{1}.zero_()", "{0}.{1}.add_({k})"]).format(a, through, k=m.number()))


def shape_in_place(m: Maker) -> None:
    if not m.chance(0.2):
        raise Refused
    a = m.any(lambda x: x.ndim > 0)
    m.take(m.rng.choice(["{0}.unsqueeze_(0)", "{0}.transpose_(0, -1)", "{0}.squeeze_()"]).format(a))


STEPS = {alone: 5, with_other: 6, placed: 5, detached: 1, shape_in_place: 0.5}
