"""Which values of a trace may share memory.

In: a Trace. Out: `roots`, which maps every value to the values whose memory it may show: an input, a constant,
or the result of an equation that allocates. Two values may share memory only if they have a root in common.
The answer errs on the side of sharing. Inputs are taken to be distinct memory: a caller whose arguments
overlap must say so before it runs a trace that writes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from tessera.ir import fake
from tessera.ir.equation import Equation, Special, Value, map_values, values_in
from tessera.ir.schema import Schema, schema_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType

Roots = dict[Value, frozenset[Value]]

NONE: frozenset[Value] = frozenset()

# Composite operators that always allocate what they give, whatever their arguments.
_FRESH = frozenset(
    "linear matmul layer_norm rms_norm group_norm batch_norm softmax log_softmax scaled_dot_product_attention"
    " cross_entropy_loss nll_loss embedding conv1d conv2d conv3d silu gelu relu max_pool2d log_sigmoid"
    " mse_loss bmm cumsum std var one_hot where outer tile repeat_interleave".split()
)
# Not annotated, and no composite either: their result is their argument's memory all the same.
_HIDDEN_VIEWS = frozenset("_unsafe_view _reshape_alias lift_fresh lift".split())


@functools.cache
def _kind(op: OpOverload) -> str:
    """'fresh', 'view' (the schema says what is shared) or 'ask' (running it on fake tensors tells)."""
    schema = schema_of(op)
    if op._opname in _HIDDEN_VIEWS:
        return "view"
    if any(p.alias for p in schema.params) and _returns_alias(op):
        return "view"
    if op._opname not in _FRESH and op._can_decompose():
        return "ask"
    return "fresh"


def _returns_alias(op: OpOverload) -> bool:
    return any(r.alias_info is not None for r in op._schema.returns)


def shared_by(eqn: Equation) -> list[Value]:
    """Arguments whose memory a result of this equation may show."""
    op = eqn.op
    if isinstance(op, Special):
        if op.of is not None:
            return shared_by(eqn.with_(op=op.of))
        if op.body is not None:
            return _shared_by_body(eqn, op.body)
        known = op.namespace == "tessera" and op.name in ("keep_grad", "functional")
        return [] if known else eqn.inputs()
    kind = _kind(op)
    if kind == "fresh":
        return []
    if kind == "ask":
        return _ask(eqn)
    return _annotated(eqn, schema_of(op))


def _annotated(eqn: Equation, schema: Schema) -> list[Value]:
    if eqn.op._opname in _HIDDEN_VIEWS:  # type: ignore[union-attr]
        return values_in(eqn.args[:1])
    found: list[Value] = []
    for index, param in enumerate(schema.params):
        if param.alias:
            if not param.keyword and index < len(eqn.args):
                found += values_in(eqn.args[index])
            elif param.name in eqn.kwargs:
                found += values_in(eqn.kwargs[param.name])
    return found


def _shared_by_body(eqn: Equation, body: Trace) -> list[Value]:
    inner = roots(body)
    shown = set().union(*(inner[v] for v in values_in(body.outputs)))
    return [a for a, v in zip(eqn.inputs(), body.inputs, strict=True) if v in shown]


_asked: dict[tuple, tuple[int, ...]] = {}


def _ask(eqn: Equation) -> list[Value]:
    """A composite operator may give its argument back (dropout in evaluation, einsum of one operand)."""
    inputs = eqn.inputs()
    if fake.mentions_symbols((eqn.args, eqn.kwargs)):
        return inputs
    key = (eqn.op, fake.argument_key(eqn.args), fake.argument_key(eqn.kwargs))
    if key not in _asked:
        try:
            _asked[key] = _run_fake(eqn)
        except Exception:  # what cannot be tried may share anything
            _asked[key] = tuple(range(len(inputs)))
    return [inputs[i] for i in _asked[key]]


def _run_fake(eqn: Equation) -> tuple[int, ...]:
    mode = fake.default_mode()
    made: list[torch.Tensor] = []

    def concrete(v: Value) -> torch.Tensor:
        made.append(fake.fake_of(v.tensor, mode))
        return made[-1]

    args, kwargs = map_values((eqn.args, eqn.kwargs), concrete)  # type: ignore[misc]
    with mode, fake.below_autograd():
        out = eqn.op(*args, **kwargs)  # type: ignore[operator]
    storages = {t.untyped_storage()._cdata for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)}
    return tuple(i for i, t in enumerate(made) if t.untyped_storage()._cdata in storages)


def roots(trace: Trace) -> Roots:
    """For every value of the trace, the values whose memory it may share; numbers have none."""
    found: Roots = {}
    for v in (*trace.inputs, *trace.constants):
        found[v] = frozenset((v,)) if isinstance(v.type, TensorType) else NONE
    for eqn in trace.equations:
        shared = shared_by(eqn)
        held = NONE
        if shared:
            held = found[shared[0]] if len(shared) == 1 else frozenset().union(*(found[v] for v in shared))
        for v in eqn.results():
            found[v] = held or (frozenset((v,)) if isinstance(v.type, TensorType) else NONE)
        if held and _maybe_fresh(eqn):
            for v in eqn.results():
                found[v] = held | {v}
    return found


_MAYBE = frozenset("reshape contiguous to flatten type_as expand_as ravel positive reshape_as".split())


def _maybe_fresh(eqn: Equation) -> bool:
    """Shares memory or allocates, as the strides have it: its result is a root too."""
    if isinstance(eqn.op, Special):
        return True
    return eqn.op._opname in _MAYBE or _kind(eqn.op) == "ask"


def shown(values: Iterable[Value], of: Roots) -> set[Value]:
    """All roots of these values."""
    found: set[Value] = set()
    for v in values:
        found |= of[v]
    return found


def escaping(trace: Trace, of: Roots | None = None) -> set[Value]:
    """Roots that the caller sees after the call: those of the outputs."""
    return shown(values_in(trace.outputs), of if of is not None else roots(trace))
