"""What an operator means, in one place: its derivative rules, its batching rule and its cost.

An operator is PyTorch's own; `rules(overload)` finds what Tessera declares about it, by the overload's full
name or by its packet. Declarations stand in this folder, by family. What has no rule works through
`fallback`, which traces PyTorch's own formula for that one operator.

The forms of a rule, over Values, inside an active builder. Arguments come bound to the overload's schema:
`args` are all positional parameters with defaults filled in, keyword-only ones follow by name.

    vjp(ct, y, *args, **kw)     -> one entry per positional argument: a Value, None, or a function giving one
                                   (called only if that gradient is wanted; for a Tensor[] argument, a list)
    forward(need, *args, **kw)  -> a generator in place of vjp: emits a forward that keeps what backward wants,
                                   yields the result, receives its cotangent, returns as vjp does
    jvp(ts, y, *args, **kw)     -> the tangent of the result; ts[i] is the tangent of args[i] or None
    batch(size, on, *args, **kw)-> the result with the batch at dimension 0; args[i] carries it there iff on[i];
                                   NotImplemented where it has no answer
    cost(eqn)                   -> floating-point operations

For several results `ct`, `y` and what jvp and batch give are lists, with None where one is missing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.ir.equation import Equation, Operator, Special, values_in
from tessera.ir.types import TensorType
from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.errors import OptionError

Rule: TypeAlias = Callable[..., Any]


@dataclass
class Rules:
    """All that is declared about one operator."""

    name: str  # "aten.sin", or "aten.sum.dim_IntList" where overloads differ
    family: str
    vjp: Rule | None = None
    forward: Rule | None = None
    jvp: Rule | None = None
    batch: Rule | None = None
    cost: Callable[[Equation], float] | None = None
    whole: bool = True  # capture keeps it in one piece although PyTorch calls it composite
    real: bool = True  # the derivative rules hold for real dtypes only; complex ones fall back
    applies: Callable[[Equation], bool] | None = None  # the derivative rules hold for these equations only
    zero: bool = False  # its derivative is zero everywhere, so nothing flows back through it
    passive: tuple[int, ...] = ()  # results that carry no gradient, such as running statistics
    cotangent: Callable[[TensorType], TensorType] | None = None  # the layout in which PyTorch's formula is given it
    free: bool = False  # a view: moves no data
    where: str = ""  # file and line of the declaration


_REGISTRY: dict[str, Rules] = {}


def registry() -> dict[str, Rules]:
    """All that is declared."""
    _import_all()
    return _REGISTRY


@functools.cache
def _import_all() -> None:
    """The files that declare, when somebody first asks: a program of an artifact imports the operators that it calls,
    and has no use for the others."""
    importlib.import_module("tessera.ops.every")


def declare(name: str, family: str, **rules: object) -> Rules:
    """Register the rules of an operator. A second declaration of one name is an error."""
    if name in _REGISTRY:
        raise OptionError(f"operator {name} is declared twice, in families {_REGISTRY[name].family} and {family}")
    rules.setdefault("where", _declared_at())
    declared = Rules(name, family, **rules)  # type: ignore[arg-type]
    _REGISTRY[name] = declared
    return declared


def _declared_at() -> str:
    """The line of the declaration: the nearest one outside the files that only help to declare."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_HELPERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_HELPERS = ("ops/op.py", "ops/families.py", "ops/formula.py", "ops/pullback.py")


def amend(name: str, kind: str) -> Callable[[Rule], Rule]:
    """Decorator that gives a declared operator one more rule: `@amend("aten.conv2d", "vjp")`."""

    def add(rule: Rule) -> Rule:
        if name not in _REGISTRY:
            raise OptionError(f"operator {name} has no declaration to amend")
        setattr(_REGISTRY[name], kind, rule)
        return rule

    return add


_found: dict[Operator, Rules | None] = {}


def rules(op: Operator) -> Rules | None:
    """What is declared about an operator, if anything."""
    known = registry()
    if op not in _found or len(known) != _found_at[0]:
        if len(known) != _found_at[0]:
            _found.clear()
            _found_at[0] = len(known)
        if isinstance(op, Special):
            _found[op] = known.get(f"{op.namespace}.{op.name}")
        else:
            packet = f"{op.namespace}.{op_name(op)}"
            _found[op] = known.get(f"{packet}.{overload_name(op)}") or known.get(packet)
    return _found[op]


_found_at = [0]


def keep_whole(op: OpOverload) -> bool:
    """Capture keeps an operator in one piece if Tessera knows what it means."""
    declared = rules(op)
    return declared is not None and declared.whole


def differentiates(eqn: Equation) -> Rules | None:
    """The declared derivative rules, where they hold for this equation."""
    declared = rules(eqn.op)
    if declared is None or (declared.vjp is None and declared.forward is None and not declared.zero):
        return None
    if declared.real and not is_real(eqn) or declared.applies is not None and not declared.applies(eqn):
        return None
    return declared


def stops(eqn: Equation) -> bool:
    """No derivative flows through it: `detach`, and operators whose derivative is zero everywhere."""
    declared = rules(eqn.op)
    return eqn.opname in ("detach", "detach_copy") or (declared is not None and declared.zero)


def name_of(eqn: Equation) -> str:
    """The short name of its operator, as notes about an equation have it."""
    return (eqn.op.name if isinstance(eqn.op, Special) else eqn.opname).strip("_")


def is_real(eqn: Equation) -> bool:
    values = [*values_in((eqn.args, eqn.kwargs)), *eqn.results()]
    return not any(isinstance(v.type, TensorType) and v.type.dtype.is_complex for v in values)


def flops(eqn: Equation) -> float:
    """Floating-point operations of an equation; one an element where nothing is declared."""
    declared = rules(eqn.op)
    if declared is not None and declared.free:
        return 0.0
    if declared is not None and declared.cost is not None:
        return declared.cost(eqn)
    return float(sum(v.type.numel() for v in eqn.results() if isinstance(v.type, TensorType)))


def bytes_moved(eqn: Equation) -> float:
    """Bytes read and written if every argument is read once and every result written once."""
    declared = rules(eqn.op)
    if declared is not None and declared.free:
        return 0.0
    values = {*eqn.inputs(), *eqn.results()}
    return float(sum(v.type.nbytes() for v in values if isinstance(v.type, TensorType)))
