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
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Equation, Special, Value, substitute
from tessera.ir.rewrite import Rewrite, needed
from tessera.ir.schema import bind, has_effect
from tessera.ir.signature import signature
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ir.verify import same_type
from tessera.ops.fallback import call_key, kernels_of
from tessera.ops.families import cast
from tessera.passes.decompose import batch_norm, group_norm, outer_product, pool  # noqa: F401  (rules of DECOMPOSITIONS)
from tessera.passes.decompose import index as decompose_index
from tessera.passes.decompose import loss as decompose_loss
from tessera.passes.decompose.foreach import foreach_parts
from tessera.passes.decompose.nn import DECOMPOSITIONS
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload, decomposition_table, op_name, overload_name
from tessera.util.names import names

Holds = Callable[[Equation], bool]

# Operators whose decomposition in PyTorch is arithmetic worth fusing.
TORCH = names(
    """
    mse_loss mse_loss_backward smooth_l1_loss huber_loss huber_loss_backward
    soft_margin_loss soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits glu glu_backward log_sigmoid_forward log_sigmoid_backward celu selu
    softshrink softshrink_backward hardshrink hardshrink_backward mish_backward rrelu_with_noise_backward
    native_group_norm_backward native_batch_norm_backward logit
    logit_backward sinc _prelu_kernel_backward dist aminmax std_mean heaviside deg2rad rad2deg logaddexp
    logaddexp2 special_entr native_dropout_backward addr l1_loss masked_fill_ trace pixel_shuffle pixel_unshuffle
    """
)
# Those of them that kernels refuse for arguments of several dtypes, where parts would not.
UNMIXED = names("huber_loss huber_loss_backward binary_cross_entropy binary_cross_entropy_backward heaviside")
# Ours that look at what computed their arguments.
WITH_MAKERS = {**decompose_loss.FROM_LOGITS, **decompose_index.WITH_MAKERS}
DEPTH = 2  # how often parts may be taken apart themselves
_memory: dict[tuple, Trace | None] = {}


def decompose(trace: Trace, holds: Holds) -> Trace:
    """Every operator with a decomposition that kernels can hold, and which they cannot hold whole, in its parts."""
    return _Decompose(trace, holds).run()


class _Decompose:
    def __init__(self, trace: Trace, holds: Holds) -> None:
        self.holds, self.rewrite = holds, Rewrite(trace)
        self.wanted = {*self.rewrite.results, *self.rewrite.users}
        self.known: dict[int, tuple[Equation, list[Equation] | None]] = {}  # by signature: an equation and its parts
        self.looked = False  # a decomposition looked at what computed its arguments

    def run(self) -> Trace:
        for eqn in self.rewrite:
            if isinstance(eqn.op, OpOverload) and not has_effect(eqn) and not self.holds(eqn):
                # results that nothing reads need no parts
                read = eqn.with_(outputs=tuple(v if v in self.wanted else None for v in eqn.outputs))
                if parts := self.like_before(read):
                    self.rewrite.keep(*parts)
        return self.rewrite.finish()

    def like_before(self, eqn: Equation) -> list[Equation] | None:
        """The parts of an equation; of one that differs from an earlier one in its values alone, that one's."""
        if (known := self.known.get(signature(eqn))) is None:
            self.looked = False
            parts = self.parts(eqn, DEPTH)
            if not self.looked:
                self.known[signature(eqn)] = eqn, parts
            return parts
        first, parts = known
        return None if parts is None else self.again(parts, first, eqn)

    def again(self, parts: list[Equation], first: Equation, eqn: Equation) -> list[Equation]:
        """An earlier equation's parts over the values of this one."""
        values = zip((*first.inputs(), *first.outputs), (*eqn.inputs(), *eqn.outputs), strict=True)
        env: dict[Value, Value] = {old: new for old, new in values if old is not None and new is not None}
        copies: list[Equation] = []
        for part in parts:
            env |= {v: self.rewrite.builder.value(v.name, v.type) for v in part.results() if v not in env}
            copied = part.renamed(env)
            copies.append(copied.with_(source=eqn.source, tags=eqn.tags))
        return copies

    def parts(self, eqn: Equation, depth: int) -> list[Equation] | None:
        """Equations that compute what this one does, under its results' names, all of which kernels hold."""
        if not eqn.results():
            return None
        parts = self.rewrite.parts(eqn, self.written_out)
        return None if not parts else self.held(needed(parts, eqn.results()), depth)

    def held(self, equations: list[Equation], depth: int) -> list[Equation] | None:
        """The equations, those that kernels cannot hold in their own parts; None where some have none."""
        kept: list[Equation] = []
        for eqn in equations:
            # Of our own making, or empty, as the second result of log_sigmoid is on a GPU: it stands between kernels.
            outside = isinstance(eqn.op, Special) or eqn.op in decompose_index.BETWEEN or _is_empty(eqn)
            inner = [eqn] if outside or self.holds(eqn) else self.parts(eqn, depth - 1) if depth else None
            if inner is None:
                return None
            kept += inner
        return kept

    def written_out(self, eqn: Equation) -> list[Value | None] | None:
        """The results by a decomposition; those that lie otherwise are copied into their layout."""
        start = len(self.rewrite.equations)
        results = self.ours(eqn) or self.torchs(eqn)
        if results is None:
            return None
        fresh = {v for part in self.rewrite.equations[start:] for v in part.results()}
        laid_out: list[Value | None] = []
        for old, new in zip(eqn.outputs, results, strict=True):
            if old is not None and new is not None:
                if new not in fresh or not same_type(old.type, new.type):
                    new = _contiguous(new, old.dtype)
                fresh.discard(new)  # a second result that is the same value is a copy
            laid_out.append(new)
        return laid_out

    def ours(self, eqn: Equation) -> list[Value | None] | None:
        op = eqn.op
        assert isinstance(op, OpOverload)
        if op.namespace != "aten":
            return None
        if op_name(op).startswith("_foreach_"):
            bound = bind(op, eqn.args, eqn.kwargs)
            return foreach_parts(op_name(op), overload_name(op), *bound, self.rewrite.builder)
        rule = DECOMPOSITIONS.get(f"{op_name(op)}.{overload_name(op)}") or DECOMPOSITIONS.get(op_name(op))
        if op_name(op) in WITH_MAKERS:
            self.looked = True
            rule = partial(WITH_MAKERS[op_name(op)], self.rewrite.makers)
        if rule is None:
            return None
        positional, keyword = bind(op, eqn.args, eqn.kwargs)
        results = rule(eqn, *positional, **keyword)
        return [results] if isinstance(results, Value) else results

    def torchs(self, eqn: Equation) -> list[Value | None] | None:
        if eqn.opname not in TORCH or eqn.op not in decomposition_table:
            return None
        if eqn.opname in UNMIXED and len({v.dtype for v in eqn.inputs()}) > 1:
            return None
        formula = _traced(eqn, self.rewrite.builder.mode)
        if formula is None:
            return None
        results = self.rewrite.builder.inline(formula, list(dict.fromkeys(eqn.inputs())))
        return results if all(v is None or isinstance(v, Value) for v in results) else None  # type: ignore[return-value]


def _is_empty(eqn: Equation) -> bool:
    return all(isinstance(v.type, TensorType) and v.numel() == 0 for v in eqn.results())


def _contiguous(v: Value, dtype: torch.dtype) -> Value:
    return aten.clone(cast(v, dtype), memory_format=torch.contiguous_format)


def _traced(eqn: Equation, mode: FakeTensorMode) -> Trace | None:
    """PyTorch's decomposition of this call, remembered by the types of its arguments."""
    key = call_key(eqn, mode)
    if key not in _memory:
        _memory[key] = _trace(eqn, list(dict.fromkeys(eqn.inputs())), mode)
    return _memory[key]


def _trace(eqn: Equation, values: list[Value], mode: FakeTensorMode) -> Trace | None:
    def run(*tensors: torch.Tensor) -> list[object]:
        env = dict(zip(values, tensors, strict=True))
        out = decomposition_table[eqn.op](*substitute(eqn.args, env), **substitute(eqn.kwargs, env))  # type: ignore[index]
        return list(out) if isinstance(out, (tuple, list)) else [out]

    if not all(isinstance(v.type, TensorType) for v in values):
        return None
    fakes = [fake.fake_of(v.tensor, mode) for v in values]
    try:
        formula = kernels_of(run, fakes, [f"x{i}" for i in range(len(fakes))], Builder("parts", mode))
    except (RuntimeError, NotImplementedError, TypeError, ZeroDivisionError):
        return None  # PyTorch's decomposition does not take these arguments
    return None if formula.mutations or formula.constants else formula
