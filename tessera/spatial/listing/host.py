"""What the host may be asked to compute: a fixed list of operators, and calls of them as text.

In: `q r = aten.linalg_qr.default(a, "reduced")`. Out: a `Hosted`, or an `Unread` that says what was expected. An
operator stands here if it is pure, the sizes of its results follow from those of its operands, and no argument makes
it take longer: so a listing is data, whoever wrote it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping

import torch

from tessera.spatial.listing.expression import NAME, Unread
from tessera.spatial.listing.types import Argument, Hosted, Ref

_LINEAR = (
    "linalg_inv_ex _linalg_det _linalg_slogdet linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh linalg_lu "
    "linalg_lu_factor_ex linalg_lu_solve _linalg_solve_ex linalg_solve_triangular linalg_matrix_exp "
    "linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product cholesky_inverse cholesky_solve geqrf ormqr "
    "triangular_solve"
)
_SPECIAL = (
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_airy_ai "
    "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta "
    "polygamma igamma igammac nextafter"
)
_OTHERS = "mode nanmedian logcumsumexp cummax cummin _pdist_forward"
OPERATORS = frozenset(
    [f"aten.{name}.default" for name in f"{_LINEAR} {_SPECIAL} {_OTHERS}".split()]
    + ["aten.linalg_pinv.atol_rtol_tensor", "aten.nanmedian.dim", "aten.frexp.Tensor"]
)

_CALL = re.compile(rf"({NAME}(?: {NAME})*) = ([\w.]+)\((.*)\)")
_VALUE = r'"[a-z_]{0,40}"|-?(?:inf|nan|[0-9][0-9.e+-]{0,40})|' + NAME
_ITEM = re.compile(rf"(?:({NAME})=)?(\[[^\[\]]*\]|{_VALUE})(?:, |$)")
_WORDS: dict[str, Argument] = {"true": True, "false": False, "none": None}


def read_call(text: str) -> Hosted:
    if (match := _CALL.fullmatch(text)) is None:
        raise Unread(f"expected `y = aten.name.overload(x, …)`; got {text[:100]!r}")
    results, op, inside = match.groups()
    if op not in OPERATORS:
        near = difflib.get_close_matches(op, OPERATORS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Unread(f"expected an operator that a host computes ({len(OPERATORS)} are known){hint}; got {op[:100]!r}")
    return Hosted(tuple(results.split(" ")), op, tuple(_arguments(inside)))


def _arguments(text: str) -> Iterator[tuple[str, Argument]]:
    at = 0
    while at < len(text):
        if (match := _ITEM.match(text, at)) is None:
            raise Unread(f"expected a tensor, a number, a word or a list of these; got {text[at : at + 50]!r}")
        of = match[2]
        inner = [part.strip() for part in of[1:-1].split(",") if part.strip()] if of.startswith("[") else None
        yield match[1] or "", _value(of) if inner is None else tuple(map(_value, inner))
        at = match.end()


def _value(text: str) -> Argument:
    if re.fullmatch(_VALUE, text) is None:
        raise Unread(f"expected a tensor, a number or a word; got {text[:50]!r}")
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith('"'):
        return text[1:-1]
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(NAME, text) and text not in ("inf", "nan"):
        return Ref(text)
    try:
        return float(text)
    except ValueError:
        raise Unread(f"expected a number; got {text!r}") from None


def call_text(call: Hosted) -> str:
    inside = ", ".join(f"{key}={_text(of)}" if key else _text(of) for key, of in call.arguments)
    return f"{' '.join(call.results)} = {call.op}({inside})"


def _text(of: Argument) -> str:
    match of:
        case Ref(name):
            return name
        case tuple():
            return f"[{', '.join(map(_text, of))}]"
        case str():
            return f'"{of}"'
        case None | bool():
            return next(word for word, value in _WORDS.items() if value is of)
    return repr(of)


def operands(call: Hosted) -> list[str]:
    """The tensors that a call reads, each once."""
    every = [of for _, one in call.arguments for of in (one if isinstance(one, tuple) else (one,))]
    return list(dict.fromkeys(of.name for of in every if isinstance(of, Ref)))


def computed(call: Hosted, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What PyTorch's operator of that name gives. Whatever it raises is the caller's."""
    assert call.op in OPERATORS
    _, name, overload = call.op.split(".")
    op: Callable = getattr(getattr(torch.ops.aten, name), overload)

    def value(of: Argument) -> object:
        if isinstance(of, Ref):
            return tensors[of.name]
        return [value(one) for one in of] if isinstance(of, tuple) else of

    positional = [value(of) for key, of in call.arguments if not key]
    out = op(*positional, **{key: value(of) for key, of in call.arguments if key})
    return tuple(out) if isinstance(out, tuple | list) else (out,)
