"""Which values of a trace may share memory.

In: a Trace. Out: `roots`, which maps every value to the values whose memory it may show: an input, a
constant, or the result of an equation that allocates. Two values may share memory only if they have a root
in common. The answer errs on the side of sharing. Inputs are taken to be distinct memory: a caller whose
arguments overlap must say so before it runs a trace that writes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tessera.ir.alias import FUNCTIONAL, FUNCTIONAL_OVER, KEEP_GRAD, written_by
from tessera.ir.dist import OVER, Collective, is_collective, joins
from tessera.ir.equation import Equation, Special, Value, values_in
from tessera.ir.layouts import can_view
from tessera.ir.schema import DROPOUTS, Schema, schema_of
from tessera.ir.strides import LAID_OUT
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.views import MAY_COPY, UNANNOTATED
from tessera.ops.custom import AUTOGRAD_FUNCTION, CUSTOM_VJP, ONCE
from tessera.ops.launch import LAUNCH
from tessera.ops.tied import TIED
from tessera.torch_internals.operators import OpOverload, can_decompose, op_name, op_schema
from tessera.util.names import names

Roots = dict[Value, frozenset[Value]]

NONE: frozenset[Value] = frozenset()

# Composite operators that always allocate what they give, whatever their arguments. What is not listed may
# give an argument back: running it on fake tensors does not tell: decompositions copy where kernels do not.
_FRESH = names(
    """
    linear matmul layer_norm rms_norm _fused_rms_norm group_norm batch_norm instance_norm softmax
    log_softmax scaled_dot_product_attention cross_entropy_loss nll_loss nll_loss2d nll_loss_nd l1_loss
    kl_div embedding_bag conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d silu_backward
    mish_backward log_sigmoid isfinite ger outer std var std_mean var_mean max min one_hot where tile
    repeat_interleave square cosine_similarity hstack vstack lstm gru
    """
)


@functools.cache
def _kind(op: OpOverload) -> str:
    """'fresh', 'view' (the schema says what is shared) or 'any' (it may give any argument back)."""
    schema = schema_of(op)
    if op_name(op) in UNANNOTATED:
        return "view"
    if any(p.alias for p in schema.params) and _returns_alias(op):
        return "view"
    if op_name(op) not in _FRESH and can_decompose(op):
        return "any"
    return "fresh"


def _returns_alias(op: OpOverload) -> bool:
    return any(r.alias_info is not None for r in op_schema(op).returns)


def shared_by(eqn: Equation) -> list[Value]:
    """Arguments whose memory a result of this equation may show."""
    op = eqn.op
    if isinstance(op, Special):
        if op.of is not None:
            return shared_by(eqn.with_(op=op.of))
        if op is LAUNCH:
            return [eqn.args[4][name] for name in eqn.kwargs.get("over", ())]  # type: ignore[index,union-attr]
        if op is FUNCTIONAL_OVER:
            targets = written_by(eqn.args[0], eqn.args[2:], eqn.kwargs)  # type: ignore[arg-type]
            return [targets[i] for i in eqn.args[1]]  # type: ignore[attr-defined]
        if op in (ONCE, TIED):
            return values_in(eqn.args[:1])
        if op is KEEP_GRAD:  # a copy only until derivatives are known: then it is what it was given
            return values_in(eqn.args[1:2])
        if isinstance(op, Collective):
            return eqn.inputs()[:1] if _same_memory(eqn) else []
        return [] if op is FUNCTIONAL else eqn.inputs()
    kind = _kind(op)
    if kind == "fresh":
        return []
    if kind == "any":
        return [] if _computes(eqn) else eqn.inputs()
    return _annotated(eqn, schema_of(op))


def _same_memory(eqn: Equation) -> bool:
    """Collectives give new tensors, but for a sum that is written over its operand, and a wait that copies nothing."""
    if is_collective(eqn, "wait"):
        return not joins(str(eqn.args[2]), eqn.args[3:])
    return is_collective(eqn, "begin") and OVER in eqn.args


def _annotated(eqn: Equation, schema: Schema) -> list[Value]:
    if eqn.opname in UNANNOTATED:
        return values_in(eqn.args[:1])
    shown: list[Value] = []
    for index, param in enumerate(schema.params):
        if param.alias:
            if not param.keyword and index < len(eqn.args):
                shown += values_in(eqn.args[index])
            elif param.name in eqn.kwargs:
                shown += values_in(eqn.kwargs[param.name])
    return shown


def _computes(eqn: Equation) -> bool:
    """Operators that give their argument back only where they have nothing to do."""
    name, args = eqn.opname, eqn.args
    if name == "einsum":
        return isinstance(args[1], (list, tuple)) and len(args[1]) > 1
    if name in DROPOUTS:
        return len(args) == 3 and args[2] is True and type(args[1]) is float and args[1] > 0
    return False


def roots(trace: Trace) -> Roots:
    """For every value of the trace, the values whose memory it may share; numbers have none."""
    memory: Roots = {}
    for v in (*trace.inputs, *trace.constants):
        memory[v] = frozenset((v,)) if isinstance(v.type, TensorType) else NONE
    for eqn in trace.equations:
        if inside := _inside(eqn):
            _region(eqn, *inside, memory)
            continue
        shared = shared_by(eqn)
        held = NONE
        if shared:
            held = memory[shared[0]] if len(shared) == 1 else frozenset().union(*(memory[v] for v in shared))
            if _maybe_fresh(eqn) and eqn.results():
                held |= {eqn.results()[0]}  # or new memory, which several results may share
        for v in eqn.results():
            memory[v] = held or (frozenset((v,)) if isinstance(v.type, TensorType) else NONE)
    return memory


def _inside(eqn: Equation) -> tuple[Trace, list[Value]] | None:
    """The program that an equation runs, and its arguments: a region, or a user's function and what that saves."""
    if not isinstance(eqn.op, Special):
        return None
    if eqn.op.body is not None:
        return eqn.op.body, eqn.inputs()
    place = _RUNS.get(eqn.op)
    if place is None or not isinstance(eqn.args[place[0]], Trace):
        return None
    return eqn.args[place[0]], values_in(eqn.args[place[1] :])  # type: ignore[return-value]


_RUNS = {AUTOGRAD_FUNCTION: (1, 5), CUSTOM_VJP: (0, 3)}  # where the program stands among the arguments, and its own


def _region(eqn: Equation, body: Trace, arguments: list[Value], memory: Roots) -> None:
    """Results of a region share memory with its arguments and with each other as its equations say."""
    inner = roots(body)
    outside: dict[Value, frozenset[Value]] = {
        v: memory[a] for v, a in zip(body.inputs, arguments, strict=True) if isinstance(v.type, TensorType)
    }
    for v, result in zip(values_in(body.outputs), eqn.results(), strict=True):
        mine: frozenset[Value] = NONE
        for root in inner[v]:
            mine |= outside.setdefault(root, frozenset((result,)))
        memory[result] = mine


def _maybe_fresh(eqn: Equation) -> bool:
    """Shares memory or allocates, as its arguments have it: its result is a root too."""
    if isinstance(eqn.op, Special):
        plain = is_collective(eqn, "begin", "wait") and eqn.inputs()[0].type.shape == eqn.out.type.shape  # type: ignore[union-attr]
        return not plain and eqn.op is not LAID_OUT  # that copies where a library broke its word
    if eqn.opname in MAY_COPY:
        return not _certain_view(eqn)
    return _kind(eqn.op) == "any"


def _certain_view(eqn: Equation) -> bool:
    types = [v.type for v in (*eqn.inputs()[:1], *eqn.results()[:1])]
    known = all(isinstance(n, int) for t in types if isinstance(t, TensorType) for n in (*t.shape, *t.stride))
    return known and len(types) == 2 and can_view(*types)  # type: ignore[arg-type]


def always_view(op: OpOverload) -> bool:
    """Is the result its argument's memory whatever the arguments are? Others copy where a view cannot be."""
    return schema_of(op).is_view and op_name(op) not in MAY_COPY and not can_decompose(op)


def shown(values: Iterable[Value], of: Roots) -> set[Value]:
    """All roots of these values."""
    memory: set[Value] = set()
    for v in values:
        memory |= of[v]
    return memory


def escaping(trace: Trace, of: Roots | None = None) -> set[Value]:
    """Roots that the caller sees after the call: those of the outputs."""
    return shown(values_in(trace.outputs), of if of is not None else roots(trace))


def last_touches(equations: Iterable[Equation], of: Roots) -> dict[Value, int]:
    """Memory -> the last equation that reads it or gives it."""
    last: dict[Value, int] = {}
    for index, eqn in enumerate(equations):
        for v in (*eqn.inputs(), *eqn.results()):
            last.update(dict.fromkeys(of[v], index))
    return last
