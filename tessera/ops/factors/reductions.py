"""Sharding rules of reductions: what is summed away may be cut, and gives summands."""

from __future__ import annotations

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.types import Size
from tessera.ops.factors.rule import Cut, Factors, arguments, decomposed, rule, tensors
from tessera.ops.families import cast, dims_of, product, wrap

COMBINED = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min", "count_nonzero": "sum"}


def _reduced(eqn: Equation, how: str | None, dims: list[int], keep: bool, **more: object) -> Factors:
    x = tensors(eqn)[0]
    names = [(f"d{i}",) for i in range(x.ndim)]
    result = tuple(() if i in dims else names[i] for i in range(x.ndim) if keep or i not in dims)
    gone = [f"d{i}" for i in dims]
    if how is None:
        return Factors((tuple(names),), (result,) * len(eqn.outputs), whole=frozenset(gone), **more)  # type: ignore[arg-type]
    linear = (frozenset([0]),) if how == "sum" and eqn.opname != "count_nonzero" else ()
    return Factors((tuple(names),), (result,), dict.fromkeys(gone, how), linear=linear, **more)  # type: ignore[arg-type]


def _arguments(eqn: Equation) -> tuple[list[int], bool]:
    """The dimensions that go, and whether they stay with size one."""
    given = arguments(eqn)
    return dims_of(given.get("dim"), tensors(eqn)[0].ndim), bool(given.get("keepdim", False))


def _mean_here(eqn: Equation, cut: Cut) -> object:
    """A rank's sum over the size of the whole."""
    x, (_, keyword) = eqn.args[0], eqn.bound()
    dims, keep = _arguments(eqn)
    assert isinstance(x, Value)
    options = {k: v for k, v in keyword.items() if k == "dtype" and v is not None}
    count = product([_whole_size(eqn, cut, d) for d in dims])
    return aten.div(aten.sum(x, dims, keep, **options), count)


def _whole_size(eqn: Equation, cut: Cut, dim: int) -> Size:
    return cut.whole[0][dim]


@rule("sum mean amax amin count_nonzero")
def reduction(eqn: Equation) -> Factors | None:
    dims, keep = _arguments(eqn)
    name = eqn.opname
    local = _mean_here if name == "mean" and eqn.out.tensor.is_float else None
    if not eqn.out.tensor.is_float and name == "sum" and eqn.out.dtype.is_complex:
        return None
    return _reduced(eqn, COMBINED[name], dims, keep, local=local)


@rule(
    """
    prod any all argmax argmin logsumexp var std var_mean std_mean median.dim mode max.dim min.dim max.default
    min.default linalg_vector_norm norm cummax cummin _softmax _log_softmax softmax.int log_softmax.int
    _softmax_backward_data _log_softmax_backward_data logcumsumexp
    """
)
def other(eqn: Equation) -> Factors | None:
    """The dimension it works along must be whole, the others may be cut."""
    operands, name = tensors(eqn), eqn.opname
    x = operands[0]
    if "softmax" in name or name in ("cummax", "cummin", "logcumsumexp"):
        dim = wrap(arguments(eqn)["dim"], x.ndim)
        names = tuple((f"d{i}",) for i in range(x.ndim))
        linear = (frozenset([0]),) if name.endswith("_backward_data") else ()
        results = (names,) * len(eqn.outputs)
        return Factors((names,) * len(operands), results, whole=frozenset([f"d{dim}"]), linear=linear)
    return _reduced(eqn, None, *_arguments(eqn))


# --- in parts that may be cut ---------------------------------------------------------------------


@decomposed("_softmax softmax.int")
def softmax(eqn: Equation) -> object:
    x, dim = eqn.args[0], eqn.args[1]
    raised = aten.exp(aten.sub(x, aten.amax(x, [dim], True)))
    return cast(aten.div(raised, aten.sum(raised, [dim], True)), eqn.out.dtype)


@decomposed("_log_softmax log_softmax.int")
def log_softmax(eqn: Equation) -> object:
    x, dim = eqn.args[0], eqn.args[1]
    lowered = aten.sub(x, aten.amax(x, [dim], True))
    return cast(aten.sub(lowered, aten.log(aten.sum(aten.exp(lowered), [dim], True))), eqn.out.dtype)


@decomposed("_softmax_backward_data")
def softmax_backward(eqn: Equation) -> object:
    ct, y, dim, dtype = eqn.args
    moved = aten.mul(ct, y)
    return cast(aten.sub(moved, aten.mul(y, aten.sum(moved, [dim], True))), dtype)  # type: ignore[arg-type]


@decomposed("_log_softmax_backward_data")
def log_softmax_backward(eqn: Equation) -> object:
    ct, y, dim, dtype = eqn.args
    return cast(aten.sub(ct, aten.mul(aten.exp(y), aten.sum(ct, [dim], True))), dtype)  # type: ignore[arg-type]


@decomposed("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim")
def vector_norm(eqn: Equation) -> object:
    given = arguments(eqn)
    x, order = tensors(eqn)[0], given.get("ord", given.get("p"))
    if order not in (2, None) or not x.tensor.is_float:
        return None
    x = cast(x, given.get("dtype") or x.dtype)
    return aten.sqrt(aten.sum(aten.mul(x, x), *_arguments(eqn)))


@decomposed("_foreach_norm.Scalar")
def norms(eqn: Equation) -> object:
    positional, keyword = eqn.bound()
    xs, order, dtype = positional[0], positional[1], (positional[2:] or [keyword.get("dtype")])[0]
    if order != 2 or not all(x.tensor.is_float for x in xs):
        return None
    wide = [cast(x, dtype or x.dtype) for x in xs]
    return [aten.sqrt(aten.sum(aten.mul(x, x))) for x in wide]


@decomposed("var.correction var_mean.correction std.correction")
def variance(eqn: Equation) -> object:
    positional, keyword = eqn.bound()
    x, dims = positional[0], dims_of(positional[1], positional[0].ndim)
    keep = bool(keyword.get("keepdim"))
    correction = keyword.get("correction")
    if not x.tensor.is_float:
        return None
    mean = aten.mean(x, dims, True)
    off = aten.sub(x, mean)
    left = product([x.shape[d] for d in dims]) - (1 if correction is None else correction)
    if isinstance(left, (int, float)) and left <= 0:
        return None
    variance = aten.div(aten.sum(aten.mul(off, off), dims, keep), left)
    if eqn.opname == "std":
        return aten.sqrt(variance)
    if eqn.opname == "var":
        return variance
    return [variance, mean if keep else aten.squeeze(mean, dims)]
