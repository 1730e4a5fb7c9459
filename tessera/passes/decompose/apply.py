"""Takes operators apart that no kernel computes whole, where kernels can be made of all their parts.

In: a trace, and a predicate that says which equations kernels can hold. Out: the same program with softmaxes, norms
and losses written out as arithmetic and reductions, writes at indices as gathers; every result keeps its name and
type, every part the source of the operator it came from. Ours stand in `decompose_*`; of the other operators listed
here PyTorch's own decomposition is traced, and taken only if kernels can hold every part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.record import record
from tessera.ir.schema import bind, has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import same_type
from tessera.passes.decompose import batch_norm  # noqa: F401  (its rules are in DECOMPOSITIONS)
from tessera.passes.decompose import index as decompose_index
from tessera.passes.decompose import loss as decompose_loss
from tessera.passes.decompose.foreach import foreach_parts
from tessera.passes.decompose.nn import DECOMPOSITIONS
from tessera.torch_internals.operators import OpOverload, decomposition_table, op_name, overload_name
from tessera.util.names import names

Holds = Callable[[Equation], bool]

# Operators whose decomposition in PyTorch is arithmetic worth fusing.
TORCH = names(
    """
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    soft_margin_loss soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits glu glu_backward log_sigmoid_forward log_sigmoid_backward celu selu
    softshrink softshrink_backward hardshrink hardshrink_backward mish_backward rrelu_with_noise_backward
    native_group_norm_backward native_batch_norm_backward logit
    logit_backward sinc _prelu_kernel_backward dist aminmax std_mean heaviside deg2rad rad2deg logaddexp
    logaddexp2 special_entr native_dropout_backward addr l1_loss masked_fill_ trace
    """
)
# Ours that look at what computed their arguments.
WITH_MAKERS = {**decompose_loss.FROM_LOGITS, **decompose_index.WITH_MAKERS}
DEPTH = 2  # how often parts may be taken apart themselves
_memory: dict[tuple, Trace | None] = {}


def decompose(trace: Trace, holds: Holds) -> Trace:
    """Every operator with a decomposition that kernels can hold, and which they cannot hold whole, in its parts."""
    walk = _Walk(trace, holds)
    for eqn in trace.equations:
        walk.equation(eqn)
    if not walk.changed:
        return trace
    return trace.with_(equations=tuple(walk.builder.equations), constants={**trace.constants, **walk.builder.constants})


class _Walk:
    def __init__(self, trace: Trace, holds: Holds) -> None:
        self.holds, self.changed = holds, False
        self.wanted = {*trace.results(), *(v for v, _ in trace.symbols.values()), *trace.users()}
        self.makers = {v: eqn for eqn in trace.equations for v in eqn.results()}
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(list(trace.values()))

    def equation(self, eqn: Equation) -> None:
        if isinstance(eqn.op, OpOverload) and not has_effect(eqn) and not self.holds(eqn):
            parts = self.parts(eqn)
            if parts:
                self.builder.equations += parts
                self.changed = True
                return
        self.builder.equations.append(eqn)

    def parts(self, eqn: Equation, depth: int = DEPTH) -> list[Equation] | None:
        """Equations that compute what this one does, under its results' names."""
        start = len(self.builder.equations)
        if depth == DEPTH:  # results that nothing reads need no parts
            eqn = eqn.with_(outputs=tuple(v if v in self.wanted else None for v in eqn.outputs))
        if not eqn.results():
            return None
        with self.builder, self.builder.at(eqn):
            made = self.ours(eqn) or self.torchs(eqn)
            found = None if made is None else self.named(eqn, made, start)
        del self.builder.equations[start:]
        return None if not found else self.held(found, depth)

    def held(self, equations: list[Equation], depth: int) -> list[Equation] | None:
        """The equations, those that kernels cannot hold in their own parts; None where some have none."""
        kept: list[Equation] = []
        for eqn in equations:
            # Of our own making: it stands between kernels.
            outside = isinstance(eqn.op, Special) or eqn.op in decompose_index.BETWEEN
            inner = [eqn] if outside or self.holds(eqn) else self.parts(eqn, depth - 1) if depth else None
            if inner is None:
                return None
            kept += inner
        return kept

    def ours(self, eqn: Equation) -> list[Value | None] | None:
        op = eqn.op
        assert isinstance(op, OpOverload)
        if op.namespace != "aten":
            return None
        if op_name(op).startswith("_foreach_"):
            return foreach_parts(op_name(op), overload_name(op), *bind(op, eqn.args, eqn.kwargs), self.builder)
        rule = DECOMPOSITIONS.get(f"{op_name(op)}.{overload_name(op)}") or DECOMPOSITIONS.get(op_name(op))
        if op_name(op) in WITH_MAKERS:
            rule = partial(WITH_MAKERS[op_name(op)], self.makers)
        if rule is None:
            return None
        positional, keyword = bind(op, eqn.args, eqn.kwargs)
        made = rule(eqn, *positional, **keyword)
        return [made] if isinstance(made, Value) else made

    def torchs(self, eqn: Equation) -> list[Value | None] | None:
        if op_name(eqn.op) not in TORCH or eqn.op not in decomposition_table:  # type: ignore[union-attr]
            return None
        formula = _traced(eqn, self.builder)
        if formula is None:
            return None
        made = self.builder.inline(formula, list(dict.fromkeys(eqn.inputs())))
        return made if all(v is None or isinstance(v, Value) for v in made) else None  # type: ignore[return-value]

    def named(self, eqn: Equation, made: list[Value | None], start: int) -> list[Equation] | None:
        """The emitted equations with the results called as before; a result in another layout is copied into it."""
        rename: dict[Value, Value] = {}
        for old, new in zip(eqn.outputs, made, strict=True):
            if old is None:
                continue
            if new is None:
                return None
            fresh = any(new in e.outputs for e in self.builder.equations[start:]) and new not in rename
            if not fresh or not same_type(old.type, new.type):
                new = self.laid_out(new, old.tensor)
            if not same_type(old.type, new.type):
                return None
            rename[new] = old

        def look(v: Value) -> Value:
            return rename.get(v, v)

        return _needed(
            [
                e.with_(
                    args=map_values(e.args, look),
                    kwargs=map_values(e.kwargs, look),
                    outputs=tuple(None if v is None else look(v) for v in e.outputs),
                )
                for e in self.builder.equations[start:]
            ],
            set(eqn.results()),
        )

    def laid_out(self, v: Value, like: TensorType) -> Value:
        if v.dtype != like.dtype:
            v = self.builder.call("_to_copy", v, dtype=like.dtype)  # type: ignore[assignment]
        return self.builder.call("clone", v, memory_format=torch.contiguous_format)  # type: ignore[return-value]


def _needed(equations: list[Equation], wanted: set[Value]) -> list[Equation]:
    kept: list[Equation] = []
    for eqn in reversed(equations):
        if any(v in wanted for v in eqn.results()):
            kept.append(eqn)
            wanted.update(eqn.inputs())
    return kept[::-1]


def _traced(eqn: Equation, builder: Builder) -> Trace | None:
    """PyTorch's decomposition of this call, remembered by the types of its arguments."""
    values = list(dict.fromkeys(eqn.inputs()))
    pattern = tuple(values.index(v) for v in eqn.inputs())
    key: tuple = (eqn.op, fake.argument_key(eqn.args), fake.argument_key(eqn.kwargs), pattern)
    if fake.mentions_symbols((eqn.args, eqn.kwargs)):
        key = (*key, id(builder.mode.shape_env))
    if key not in _memory:
        _memory[key] = _trace(eqn, values, builder)
    return _memory[key]


def _trace(eqn: Equation, values: list[Value], builder: Builder) -> Trace | None:
    def run(*tensors: torch.Tensor) -> list[object]:
        env = dict(zip(values, tensors, strict=True))
        written_out = decomposition_table[eqn.op]  # type: ignore[index]
        out = written_out(*map_values(eqn.args, env.__getitem__), **map_values(eqn.kwargs, env.__getitem__))  # type: ignore[misc]
        return list(out) if isinstance(out, (tuple, list)) else [out]

    if not all(isinstance(v.type, TensorType) for v in values):
        return None
    fakes = [fake.fake_of(v.tensor, builder.mode) for v in values]
    try:
        inner = Builder("parts", builder.mode)
        found, _ = record(run, fakes, [f"x{i}" for i in range(len(fakes))], _apart, inner, whole=False, locate=False)
    except (RuntimeError, NotImplementedError, TypeError):  # PyTorch's decomposition does not take these arguments
        return None
    return None if found.mutations or found.constants else found


def _apart(_: object) -> bool:
    return False
