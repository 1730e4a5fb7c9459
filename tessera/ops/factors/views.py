"""Sharding rules of operators that only move elements: views, reshapes, joins and cuts.

A reshape splits dimensions into factors and merges them: `[b, s, (h d)] -> [b, s, h, d]`. What it does is found from
the sizes, from the first dimension on; where sizes have no common factor the dimensions involved must be whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size, size_key
from tessera.ops.factors.packed import packed, slice_backward_here, slice_here, split_here, unpacked
from tessera.ops.factors.rule import Cut, Dims, Factors, arguments, rule, tensors

ALONE = (frozenset([0]),)


def _plain(rank: int) -> list[tuple[str, ...]]:
    return [(f"d{i}",) for i in range(rank)]


def _view(x: Value, results: Sequence[Dims], whole: Sequence[str] = (), **more: object) -> Factors:
    """Of an operator with one operand, whose dimensions are d0, d1, …"""
    return Factors((tuple(_plain(x.ndim)),), tuple(results), whole=frozenset(whole), linear=ALONE, **more)  # type: ignore[arg-type]


# --- reshapes -------------------------------------------------------------------------------------


def divided(a: Size, b: Size) -> Size | None:
    """a / b, where that is a whole number."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(_expression(a) / _expression(b))
    if sympy.denom(quotient) != 1:
        return None
    return int(quotient) if quotient.is_Integer else a // b


def _expression(size: Size) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def matched(before: Sequence[Size], after: Sequence[Size]) -> tuple[Dims, Dims, dict[str, Size], set[str]]:
    """The factors of a reshape: of the dimensions before it, of those after it, their sizes, and which are whole."""
    sizes: dict[str, Size] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = 0
    a: Size = 1  # what is left of dimension i - 1 before, and of dimension j - 1 after
    b: Size = 1
    while True:
        while _one(a) and i < len(before):
            a, i = before[i], i + 1
        while _one(b) and j < len(after):
            b, j = after[j], j + 1
        if _one(a) and _one(b):
            break
        name = f"f{len(sizes)}"
        if not _one(b) and (rest := divided(a, b)) is not None:
            sizes[name], a, b = b, rest, 1
        elif not _one(a) and (rest := divided(b, a)) is not None:
            sizes[name], a, b = a, 1, rest
        else:  # no common factor: all that is left is one piece
            for dim in (*left[max(i - 1, 0) :], *right[max(j - 1, 0) :]):
                extra = f"f{len(sizes)}"
                sizes[extra] = 1
                whole.add(extra)
                dim.append(extra)
            break
        left[i - 1].append(name)
        right[j - 1].append(name)
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, whole


def _one(size: Size) -> bool:
    return size_key(size) == 1


def _reshape_here(eqn: Equation, cut: Cut) -> object:
    """A chunk may lie so that it has no view of that shape, or have size one where the whole has not."""
    return aten.reshape(eqn.args[0], cut.sizes())


@rule("view.default reshape _unsafe_view flatten unflatten view_copy")
def reshape(eqn: Equation) -> Factors | None:
    (x,) = tensors(eqn)
    if x.numel() == 0:
        return None
    left, right, sizes, whole = matched(x.shape, eqn.out.shape)
    return Factors(
        (left,), (right,), whole=frozenset(whole), linear=ALONE, sizes=sizes, local=_reshape_here, merges=True
    )


# --- views that name dimensions -------------------------------------------------------------------


@rule("permute transpose.int t movedim unsqueeze squeeze unsqueeze_copy mT numpy_T matrix_H adjoint")
def moved(eqn: Equation) -> Factors | None:
    """Where each dimension goes is read off a tensor whose sizes are all different."""
    (x,) = tensors(eqn)
    sizes = [1 if size_key(n) == 1 else 2 + i for i, n in enumerate(x.shape)]
    args, kwargs = _with(eqn, torch.empty(sizes, device="meta"))
    out = eqn.op(*args, **kwargs)  # type: ignore[operator]
    dims = tuple(() if n == 1 else (f"d{n - 2}",) for n in out.shape)
    return Factors(
        (tuple(() if n == 1 else (f"d{n - 2}",) for n in sizes),),
        (dims,),
        linear=ALONE,
        local=_reshape_here if eqn.opname == "squeeze" else None,
    )


def _with(eqn: Equation, x: torch.Tensor) -> tuple[list, dict]:
    positional, keyword = eqn.bound()
    return [x, *positional[1:]], keyword


@rule("expand broadcast_to expand_copy")
def expand(eqn: Equation) -> Factors | None:
    (x,) = tensors(eqn)
    out, lead = eqn.out, eqn.out.ndim - x.ndim
    same = [size_key(a) == size_key(b) for a, b in zip(x.shape, out.shape[lead:], strict=True)]
    operand = tuple((f"d{lead + i}",) if equal else () for i, equal in enumerate(same))
    return Factors((operand,), (tuple(_plain(out.ndim)),), linear=ALONE, sized=(1,), cheap=True)


def _dim(eqn: Equation, default: int = 0) -> int:
    dim = arguments(eqn).get("dim")
    return (default if dim is None else dim) % max(tensors(eqn)[0].ndim, 1)


@rule("select.int select_copy.int unbind.int")
def taken(eqn: Equation) -> Factors | None:
    """One dimension goes."""
    (x,) = tensors(eqn)
    dim = _dim(eqn)
    rest = tuple(d for i, d in enumerate(_plain(x.ndim)) if i != dim)
    return _view(x, [rest] * len(eqn.outputs), [f"d{dim}"])


@rule("split.Tensor split_with_sizes chunk slice.Tensor narrow flip roll sort topk cumsum cumprod")
def along(eqn: Equation) -> Factors | None:
    """One dimension, or those that are named, must be whole."""
    (x,) = tensors(eqn)
    name = eqn.opname
    if x.ndim == 0:
        return None
    dims = [_dim(eqn, x.ndim - 1 if name in ("sort", "topk") else 0)]
    if (blocks := _blocks(eqn, x, dims[0])) is not None:
        return blocks
    if name in ("flip", "roll"):
        named = arguments(eqn)["dims"]
        if not named and name == "roll":
            return None
        dims = [d % x.ndim for d in ([named] if isinstance(named, int) else named)]
    results = []
    for number, v in enumerate(eqn.outputs):
        assert v is not None
        cut = [(f"r{number}",) if i in dims else d for i, d in enumerate(_plain(x.ndim))]
        results.append(tuple(cut))
    linear = () if name in ("sort", "topk", "cumprod") else ALONE
    whole = {f"d{d}" for d in dims} | {f"r{i}" for i in range(len(results))}
    return Factors((tuple(_plain(x.ndim)),), tuple(results), whole=frozenset(whole), linear=linear)


def _blocks(eqn: Equation, x: Value, dim: int) -> Factors | None:
    """The rule of what takes equal blocks out of a dimension; None where it does something else."""
    parts = [v for v in eqn.outputs if v is not None]
    if eqn.opname == "slice":
        start = _block(arguments(eqn), x.shape[dim], parts[0].shape[dim])
        return None if start is None else unpacked(x, parts, dim, slice_here(dim, start))
    return unpacked(x, parts, dim, split_here(dim)) if eqn.opname in ("split", "split_with_sizes", "chunk") else None


def _block(given: dict, size: Size, width: Size) -> int | None:
    """Which of the blocks of a dimension a slice is."""
    start = given["start"] or 0
    if given["step"] != 1 or not (type(start) is int and type(size) is int and type(width) is int) or not width:
        return None
    start = max(start + size, 0) if start < 0 else start
    return start // width if start % width == 0 else None


@rule("cat stack")
def joined(eqn: Equation) -> Factors | None:
    operands, out = tensors(eqn), eqn.out
    positional, _ = eqn.bound()
    dim = positional[1] % out.ndim
    if eqn.opname == "cat" and (blocks := packed(operands, out, dim)) is not None:
        return blocks
    whole = {f"d{dim}"}
    dims = []
    for number, x in enumerate(operands):
        if eqn.opname == "stack":
            dims.append(tuple(d for i, d in enumerate(_plain(out.ndim)) if i != dim))
            continue
        if x.ndim != out.ndim:
            return None
        whole.add(f"x{number}")
        dims.append(tuple((f"x{number}",) if i == dim else d for i, d in enumerate(_plain(out.ndim))))
    everything = frozenset(range(len(operands)))
    return Factors(tuple(dims), (tuple(_plain(out.ndim)),), whole=frozenset(whole), linear=(everything,))


@rule("tril triu constant_pad_nd slice_scatter select_scatter repeat select_backward slice_backward")
def partly(eqn: Equation) -> Factors | None:
    """Dimensions that keep their size may be cut, where the operator is known not to look across them."""
    operands, out = tensors(eqn), eqn.out
    x, (positional, _) = operands[0], eqn.bound()
    match eqn.opname:
        case "tril" | "triu":
            touched = {x.ndim - 1, x.ndim - 2}
        case "constant_pad_nd":
            pads = positional[1]
            touched = {x.ndim - 1 - i // 2 for i, n in enumerate(pads) if n}
        case "repeat":
            lead = len(positional[1]) - x.ndim
            if lead:
                return None
            touched = {i for i, n in enumerate(positional[1]) if n != 1}
        case "slice_backward":
            dim = positional[2] % out.ndim
            block = _block(arguments(eqn), out.shape[dim], x.shape[dim])
            if block is not None and (blocks := packed([x], out, dim, slice_backward_here(dim, block))) is not None:
                return blocks
            dims = tuple(("s",) if i == dim else d for i, d in enumerate(_plain(out.ndim)))
            whole = frozenset(["s", f"d{dim}"])
            return Factors((dims,), (tuple(_plain(out.ndim)),), whole=whole, linear=ALONE, sized=(1,))
        case "select_backward":
            dim = positional[2] % out.ndim
            dims = tuple(d for i, d in enumerate(_plain(out.ndim)) if i != dim)
            return Factors((dims,), (tuple(_plain(out.ndim)),), whole=frozenset([f"d{dim}"]), linear=ALONE, sized=(1,))
        case "slice_scatter" | "select_scatter":
            dim = positional[2] % out.ndim
            source = [("s",) if i == dim else d for i, d in enumerate(_plain(out.ndim))]
            source = source if eqn.opname == "slice_scatter" else [d for i, d in enumerate(source) if i != dim]
            both = (tuple(_plain(out.ndim)), tuple(source))
            whole = frozenset(["s", f"d{dim}"])
            return Factors(both, (tuple(_plain(out.ndim)),), whole=whole, linear=(frozenset([0, 1]),))
        case _:
            return None
    result = tuple((f"r{i}",) if i in touched else d for i, d in enumerate(_plain(out.ndim)))
    whole = {f"d{i}" for i in touched} | {f"r{i}" for i in touched}
    linear = () if eqn.opname == "constant_pad_nd" and len(positional) > 2 and positional[2] else ALONE
    return Factors((tuple(_plain(x.ndim)),), (result,), whole=frozenset(whole), linear=linear)
