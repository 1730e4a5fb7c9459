"""Is the derivative of each operator of a program right?

In: a trace and the values it computed, in float64. Out: the equations whose vjp rule is wrong. Rules of PyTorch's own
operators are compared with PyTorch's autograd; rules that users registered, which eager autograd uses too, with
finite differences of the operator itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.inspection.precise import differentiably, gradients, precisely
from tessera.inspection.step import step
from tessera.ir import fake
from tessera.ir.equation import NO_GRAD, Equation, Value
from tessera.ir.mode import mode_of
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.op import differentiates, registry, rules
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.transforms.vjp import vjp
from tessera.util.errors import TesseraError

CLOSE = 1e-4  # relative: two formulas in float64 agree far better, differences of eps 1e-5 hardly worse


@dataclass(frozen=True)
class WrongRule:
    equation: Equation
    operator: str
    where: str  # of the rule
    error: float
    against: str


def wrong_rules(trace: Trace, values: dict[str, torch.Tensor], user: bool = False) -> list[WrongRule]:
    """Wrong vjp rules among the trace's equations, in the order in which backward meets them.

    With `user`, only rules that users registered are looked at.
    """
    mistakes: list[WrongRule] = []
    seen: set[object] = set()
    for eqn in reversed(trace.equations):
        mine = is_users(eqn)
        key = (eqn.op, fake.argument_key(eqn.args), fake.argument_key(eqn.kwargs))
        if key in seen or (user and not mine) or not _differentiates(eqn, values):
            continue
        seen.add(key)
        try:
            wrong = _check(eqn, trace, values, mine)
        except (TesseraError, NotImplementedError):  # sizes known to the whole program alone, or no rule at all
            continue
        if wrong is not None:
            mistakes.append(wrong)
    return mistakes


def is_users(eqn: Equation) -> bool:
    """Its derivative was registered by a user."""
    declared = rules(eqn.op)
    return declared is not None and declared.family == "user" and declared.vjp is not None


def _differentiates(eqn: Equation, values: dict[str, torch.Tensor]) -> bool:
    known = all(v.name in values for v in (*eqn.inputs(), *eqn.results()))
    flows = any(map(_float, eqn.inputs())) and any(map(_float, eqn.results()))
    return known and flows and NO_GRAD not in eqn.tags and not has_effect(eqn)


def _float(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype.is_floating_point


def _check(eqn: Equation, whole: Trace, values: dict[str, torch.Tensor], numerically: bool) -> WrongRule | None:
    inputs = tuple(dict.fromkeys(eqn.inputs()))
    held = {s: place for s, place in whole.symbols.items() if place[0] in inputs}
    single = Trace("rule", inputs, (eqn,), tuple(eqn.results()), {}, {}, held)
    wrt = [v for v in inputs if _float(v)]
    joint = vjp(single, wrt, mode_of(whole))
    if not joint.pulled:
        return None
    args = [values[v.name] for v in inputs]
    generator = torch.Generator().manual_seed(0)
    cts = {v: _normal(values[v.name], generator) for v in eqn.results() if _float(v)}
    count = len(single.outputs)
    pulled = [cts[eqn.results()[list(joint.trace.outputs[:count]).index(p)]] for p in joint.pulled]
    with torch.no_grad():
        got = step(joint.trace, [*args, *pulled], call=precisely)[count:]
    if numerically:
        error, against = _numeric_error(single, args, wrt, list(cts.values()), got, generator), "finite differences"
    else:
        error, against = _autograd_error(single, args, wrt, cts, got), "PyTorch's autograd"
    if error <= CLOSE:
        return None
    return WrongRule(eqn, _name(eqn), _where(eqn), error, against)


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _autograd_error(
    single: Trace, args: Sequence[object], wrt: list[Value], cts: dict[Value, torch.Tensor], got: list
) -> float:
    active = [x.detach().clone().requires_grad_() if v in wrt else x for v, x in zip(single.inputs, args, strict=True)]  # type: ignore[union-attr]
    with torch.enable_grad():
        outputs = step(single, active, call=differentiably(precisely))
        seeds = [cts.get(v) for v in single.outputs]  # type: ignore[call-overload]
        leaves = [x for v, x in zip(single.inputs, active, strict=True) if v in wrt]
        want = gradients(outputs, leaves, seeds)
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w is None and g is None:
            continue
        w = torch.zeros_like(g) if w is None else w
        g = torch.zeros_like(w) if g is None else g
        worst = max(worst, _relative(g.to(w.dtype), w))
    return worst


def _numeric_error(
    single: Trace, args: list, wrt: list[Value], cts: list[torch.Tensor], got: list, generator: torch.Generator
) -> float:
    """The derivative along one random direction, from the operator's own results on either side."""
    eps = _step_size(single, args)
    direction = [_normal(x, generator) if v in wrt else None for v, x in zip(single.inputs, args, strict=True)]

    def moved(sign: float) -> list[torch.Tensor]:
        shifted = [x if d is None else x + sign * eps * d for x, d in zip(args, direction, strict=True)]
        with torch.no_grad():
            return [o.double() for o in step(single, shifted, call=precisely) if o.is_floating_point()]

    ahead, behind = moved(+1), moved(-1)
    numeric = sum(float((ct * (a - b)).sum()) / (2 * eps) for ct, a, b in zip(cts, ahead, behind, strict=True))
    moves = [d for d in direction if d is not None]
    terms = [float((g.double() * d).sum()) for g, d in zip(got, moves, strict=True) if g is not None]
    scale = max(abs(numeric), *(abs(t) for t in terms), 1e-12) if terms else max(abs(numeric), 1e-12)
    error = abs(sum(terms) - numeric) / scale
    return 0.0 if error < _tolerance(eps) else error


def _step_size(single: Trace, args: list) -> float:
    """As small as the operator's precision allows: float32 alone leaves few digits."""
    try:
        with torch.no_grad():
            step(single, args)
        return 1e-5
    except Exception:  # no kernel for float64: whatever an operator raises then
        return 1e-2


def _tolerance(eps: float) -> float:
    return 1e-4 if eps < 1e-3 else 5e-2


def _relative(x: torch.Tensor, want: torch.Tensor) -> float:
    if x.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(x), finite):
        return float("inf")
    scale = float(want[finite].abs().max()) if bool(finite.any()) else 0.0
    error = float((x[finite] - want[finite]).abs().max()) if bool(finite.any()) else 0.0
    return 0.0 if error == 0.0 else error / max(scale, 1e-12)


def _name(eqn: Equation) -> str:
    op = eqn.op
    return f"{op.namespace}.{op_name(op)}" if isinstance(op, OpOverload) else repr(op)


def _where(eqn: Equation) -> str:
    """Where the rule stands; a rule that replaced the declared one says so by its own line."""
    declaration = differentiates(eqn) or registry().get(_name(eqn))
    if declaration is None:
        return "PyTorch's own formula, traced"
    rule = declaration.vjp or declaration.forward
    code = getattr(rule, "__code__", None)
    own = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
    helper = any(part in own for part in ("/ops/families.py", "/executors/register.py", "/ops/formula.py"))
    return declaration.where if helper or not own else own
