"""Sharding rules of operators that make values from nothing: each rank makes its part.

What is drawn at random is drawn whole by every rank, except `tessera::uniform`, whose elements depend on a seed and on
their place in the whole: a rank draws its part of them, so that bits do not depend on the mesh.
"""

from __future__ import annotations

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ops.factors.rule import Cut, Dims, Factors, decomposed, rule, tensors
from tessera.ops.uniform_part import uniform_part


def _made(eqn: Equation) -> tuple[Dims]:
    return (tuple((f"d{i}",) for i in range(eqn.out.ndim)),)


@rule("full zeros ones empty.memory_format")
def filled(eqn: Equation) -> Factors:
    return Factors((), _made(eqn), sized=(0,), cheap=True)


@rule("scalar_tensor")
def number(eqn: Equation) -> Factors:
    return Factors((), _made(eqn), cheap=True)


@rule("new_zeros new_ones new_full new_empty")
def like(eqn: Equation) -> Factors:
    """The operand lends its dtype and device alone."""
    (x, *_) = tensors(eqn)
    operand = tuple((f"x{i}",) for i in range(x.ndim))
    return Factors(
        (operand,), _made(eqn), {f"x{i}": "sum" for i in range(x.ndim)}, whole=_names(operand), sized=(1,), cheap=True
    )


@decomposed("new_zeros new_ones new_full")
def from_nothing(eqn: Equation) -> object:
    """As `like`, without the operand, which may lie anywhere."""
    x, size, *value = eqn.args
    assert isinstance(x, Value)
    if any(said not in (None, False) for name, said in eqn.kwargs.items() if name not in ("dtype", "device")):
        return None
    dtype, device = eqn.kwargs.get("dtype") or x.dtype, eqn.kwargs.get("device") or x.tensor.device
    make = {"new_zeros": aten.zeros, "new_ones": aten.ones, "new_full": aten.full}[eqn.opname]
    return make(size, *value, dtype=dtype, device=device)


def _names(dims: Dims) -> frozenset[str]:
    return frozenset(name for dim in dims for name in dim)


def _counted(eqn: Equation, cut: Cut) -> object:
    """A rank's part of a range begins where the rank does."""
    axes = cut.axes.get("d0", ())
    (whole,) = _shape(cut)
    (size,) = cut.sizes()
    positional, keyword = eqn.bound()
    first, step = _range(eqn)
    counted = aten.arange(size, **{k: v for k, v in keyword.items() if k in ("dtype", "device")})
    place = aten.add(counted, cut.start(whole, axes, eqn.out.tensor.device)) if axes else counted
    scaled = place if step == 1 else aten.mul(place, step)
    return scaled if first == 0 else aten.add(scaled, first)


def _shape(cut: Cut) -> tuple:
    placement = cut.results[0]
    assert placement is not None
    return placement.shape


def _range(eqn: Equation) -> tuple[object, object]:
    positional, _ = eqn.bound()
    if len(positional) == 1:
        return 0, 1
    return positional[0], positional[2] if len(positional) > 2 else 1


@rule("arange")
def arange(eqn: Equation) -> Factors | None:
    first, step = _range(eqn)
    whole_numbers = type(first) is int and type(step) is int and not eqn.out.tensor.is_float
    return Factors((), _made(eqn), local=_counted, cheap=True) if whole_numbers else None


def _drawn(eqn: Equation, cut: Cut) -> object:
    seed, placement = eqn.args[0], cut.results[0]
    assert isinstance(seed, Value) and placement is not None
    device = eqn.out.tensor.device
    starts = [
        cut.start(size, axes, device) if axes else None
        for size, axes in zip(placement.shape, placement.splits, strict=True)
    ]
    return emit(uniform_part, seed, cut.sizes(), list(placement.shape), starts, **eqn.kwargs)


@rule("tessera.uniform")
def uniform(eqn: Equation) -> Factors:
    return Factors(
        ((("seed",),) * tensors(eqn)[0].ndim,), _made(eqn), whole=frozenset(["seed"]), local=_drawn, cheap=True
    )
