"""Views: of inputs, of parameters, of results, of other views."""

from __future__ import annotations

import torch

from .maker import Maker, Refused

ANY = (
    "{0}[...]|{0}.detach()|{0}.view_as({0})|{0}.unsqueeze(0)|{0}.flatten()|{0}.reshape(-1)|{0}.squeeze()|{0}.alias()"
    "|{0}[None]|{0}.expand(2, *{0}.shape)|{0}.detach()|{0}.expand_as({0})"
)
RANKED = (
    "{0}[0]|{0}[-1]|{0}[1:]|{0}[:-1]|{0}[::2]|{0}.select({d}, 0)|{0}.narrow({d}, 0, 1)|{0}.transpose(0, -1)|{0}[..., 0]"
    "|{0}[..., 1:]|{0}[..., None]|{0}.unfold({d}, 2, 1)|{0}.unbind({d})[-1]|{0}.split(1, {d})[0]|{0}.chunk(2, {d})[-1]"
    "|{0}.movedim(0, -1)|{0}.unflatten({d}, (-1, 1))|{0}.tensor_split(2, {d})[0]|{0}.swapaxes(0, -1)|{0}.view(-1)"
    "|{0}.as_strided((2,), (1,))|{0}.as_strided((2,), (1,), 1)|{0}[:, None]|{0}.view(*{0}.shape, 1)|{0}[0:2]"
    "|{0}.permute({p})|{0}.permute({p})|{0}.slice_inverse"
)
MATRIX = (
    "{0}.t()|{0}.diagonal()|{0}.mT|{0}[:, 0]|{0}[0, 1:]|{0}[1:, :1]|{0}.diagonal(1)|{0}.T|{0}[:, ::2]"
    "|{0}.as_strided((2, 2), (1, 2))|{0}[:1]"
)


def one(m: Maker, a: str) -> str:
    """The text of a view of this tensor."""
    x = m.value(a)
    forms = ANY.split("|")
    if x.ndim:
        forms += RANKED.split("|")[:-1] * 2
    if x.ndim == 2:
        forms += MATRIX.split("|") * 2
    if x.is_complex():
        forms += ["{0}.real", "{0}.imag", "torch.view_as_real({0})"] * 4
    order = list(range(x.ndim))
    m.rng.shuffle(order)
    if not _whole(x):
        forms = [form for form in forms if "as_strided" not in form]
    return m.rng.choice(forms).format(a, d=m.dim(a) if x.ndim else 0, p=", ".join(map(str, order)))


def _whole(x: torch.Tensor) -> bool:
    """Whether what `as_strided` shows lies within the tensor. Eager drops gradients of what lies beside a view in the
    memory of its base, and says that they are undefined."""
    floats = x.is_floating_point() or x.is_complex()
    # Sizes and strides alone tell: eager may refuse any further view of this tensor.
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    dense = reach == x.numel() - 1 and 0 not in x.stride()
    return not floats or (x.storage_offset() == 0 and x.numel() >= 4 and dense)


def _based(m: Maker, rank: int = 0) -> str:
    """A tensor to view. A view that no_grad makes of a tensor with a history is a leaf to eager, which is left out."""
    return m.any(lambda x: x.ndim >= rank and (torch.is_grad_enabled() or not x.requires_grad))


def view(m: Maker) -> None:
    m.assign(one(m, _based(m)))


def view_of_view(m: Maker) -> None:
    name = m.assign(one(m, _based(m)))
    m.assign(one(m, name))


def parts(m: Maker) -> None:
    """Several views at once."""
    a = _based(m, 1)
    d = m.dim(a, 2)
    first, second = m.new(), m.new()
    form = m.rng.choice(
        ["{0}.chunk(2, {1})[:2]", "{0}.tensor_split(2, {1})", "{0}.unbind({1})[:2]", "{0}.split(1, {1})[:2]"]
    )
    m.take(f"{first}, {second} = {form.format(a, d)}", first, second)


def data(m: Maker) -> None:
    if not m.chance(0.3):
        raise Refused
    m.assign(f"{m.any()}.data")


STEPS = {view: 7, view_of_view: 3, parts: 1.5, data: 0.3}
