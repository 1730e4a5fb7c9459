"""Constant folding.

In: a functional trace. Out: the same trace where literals, and small tensors that depend on nothing else (an
`arange`, a literal times a number), are constants, computed once. A result keeps its name. Not folded:
tensors closed over, which may change between calls; random operators and others with effects; what is
returned to the caller, who gets fresh memory each call; results of more than `LIMIT` elements; uninitialised
memory; and plain fills, which cost nothing.
"""

from __future__ import annotations

import torch

from tessera.ir.equation import Equation, Special, Value, map_values, symbols_in
from tessera.ir.schema import has_effect
from tessera.ir.signature import signature
from tessera.ir.strides import copied
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.views import REPEATS, RESHAPES
from tessera.ops.copies import FILLS
from tessera.passes.memory.alias import escaping, roots
from tessera.torch_internals.autograd import is_tensor_view
from tessera.torch_internals.fake import FakeTensor, unset_fake_temporarily
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.names import names

LIMIT = 1024
UNINITIALISED = names("empty empty_like new_empty empty_strided new_empty_strided empty_permuted")
_SHOWS = RESHAPES | REPEATS | {"alias", "detach"}


def fold(trace: Trace) -> Trace:
    """Compute once what no argument can change."""
    known: dict[Value, torch.Tensor | None] = {}  # None: not computed yet
    maker: dict[Value, Equation] = {}
    for eqn in trace.equations:
        if _is_literal(eqn, trace):
            known[eqn.out] = trace.constants[eqn.args[0]]  # type: ignore[index]
            maker[eqn.out] = eqn
        elif _foldable(eqn, known):
            known[eqn.out] = None
            maker[eqn.out] = eqn
    if not maker:
        return trace
    of = roots(trace)
    outside = escaping(trace, of)
    rest = [eqn for eqn in trace.equations if not (eqn.outputs and eqn.outputs[0] in maker)]
    wanted = dict.fromkeys(v for eqn in rest for v in eqn.inputs() if v in maker)
    wanted.update(dict.fromkeys(v for v in trace.results() if v in maker))
    kept: set[Value] = set()
    constants = dict(trace.constants)
    numbers, results = _numbers(maker), set(trace.results())
    computed: dict[int, Value] = {}
    names: dict[Value, Value] = {}  # what layers compute alike is one constant
    for v in wanted:
        if _is_fill(v, maker) or not of[v].isdisjoint(outside):
            _keep(v, maker, kept)
            continue
        if numbers[v] in computed and v not in results:
            names[v] = computed[numbers[v]]
            continue
        tensor = _compute(v, known, maker)
        if tensor is None:
            _keep(v, maker, kept)
        else:
            constants[v] = tensor
            computed.setdefault(numbers[v], v)
    names = {v: same for v, same in names.items() if v not in kept}
    equations = tuple(
        e.substitute(names) if names and any(v in names for v in e.inputs()) else e
        for e in trace.equations
        if not e.outputs or e.outputs[0] not in maker or e.outputs[0] in kept
    )
    for v in kept:  # an equation that stays needs its arguments, as constants or as equations
        constants.pop(v, None)
    used = {v for eqn in equations for v in eqn.inputs()} | set(trace.results())
    return trace.with_(equations=equations, constants={v: t for v, t in constants.items() if v in used})


def _numbers(maker: dict[Value, Equation]) -> dict[Value, int]:
    """A number for each value, equal where the same operators compute it of the same."""
    seen: dict[tuple, int] = {}
    numbers: dict[Value, int] = {}
    for v, eqn in maker.items():
        key = (signature(eqn), *(numbers.get(x, x) for x in eqn.inputs()))
        numbers[v] = seen.setdefault(key, len(seen))
    return numbers


def _is_literal(eqn: Equation, trace: Trace) -> bool:
    """A tensor written in the program itself. One that the program closes over may change between calls."""
    if eqn.opname != "lift_fresh_copy" or eqn.args[0] not in trace.constants:
        return False
    return type(trace.constants[eqn.args[0]]) is torch.Tensor  # type: ignore[index]


def _small(v: Value) -> bool:
    return isinstance(v.type, TensorType) and not v.type.is_symbolic and v.type.numel() <= LIMIT


def _foldable(eqn: Equation, known: dict[Value, torch.Tensor | None]) -> bool:
    op = eqn.op
    if isinstance(op, Special) or not isinstance(op, OpOverload) or eqn.many or len(eqn.outputs) != 1:
        return False
    if op.namespace != "aten" or op_name(op) in UNINITIALISED or eqn.outputs[0] is None or not _small(eqn.out):
        return False
    if any(v not in known for v in eqn.inputs()) or has_effect(eqn) or symbols_in((eqn.args, eqn.kwargs)):
        return False
    return all(_plain(a) for a in (*eqn.args, *eqn.kwargs.values()))


def _plain(a: object) -> bool:
    if isinstance(a, (list, tuple)):
        return all(map(_plain, a))
    plain = (Value, int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return a is None or isinstance(a, plain)


def _is_fill(v: Value, maker: dict[Value, Equation]) -> bool:
    """One number everywhere, or a view of that."""
    while v in maker and maker[v].opname in _SHOWS:
        v = maker[v].inputs()[0]
    return v in maker and maker[v].opname in FILLS


def _keep(v: Value, maker: dict[Value, Equation], kept: set[Value]) -> None:
    """This value's equation stays, and so do those it reads."""
    stack = [v]
    while stack:
        v = stack.pop()
        if v in maker and v not in kept:
            kept.add(v)
            stack += maker[v].inputs()


def _compute(v: Value, known: dict[Value, torch.Tensor | None], maker: dict[Value, Equation]) -> torch.Tensor | None:
    """The tensor itself; None where it cannot be computed now."""
    stack = [v]
    while stack:
        top = stack[-1]
        if known.get(top) is not None:
            stack.pop()
            continue
        eqn = maker[top]
        missing = [u for u in eqn.inputs() if known.get(u) is None]
        if missing:
            stack += missing
            continue
        try:
            with unset_fake_temporarily(), torch.no_grad():
                args, kwargs = map_values((eqn.args, eqn.kwargs), known.__getitem__)  # type: ignore[misc]
                result = eqn.op(*args, **kwargs)  # type: ignore[operator]
                # a view of a constant would keep all of it alive and let one be written through the other
                known[top] = copied(result, result.stride()) if is_tensor_view(result) else result
        except (RuntimeError, NotImplementedError):
            return None
        if isinstance(known[top], FakeTensor):
            known[top] = None
            return None
        stack.pop()
    return known[v]
