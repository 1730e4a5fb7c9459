"""Sharding rules of operators that work element by element: every dimension may be cut.

PyTorch's own tag says which operators these are. Those that are linear in some operands are listed.
"""

from __future__ import annotations

from tessera.ir.equation import Equation, Value
from tessera.ir.types import TensorType, size_key
from tessera.ops.factors.rule import Dims, Factors, rule, tensors
from tessera.util.names import names

# In which operands, counted among tensors; a list of sets in each of which it is linear together.
FIRST = names(
    """
    neg clone alias detach contiguous lift_fresh lift_fresh_copy view_as real positive _to_copy to
    gelu_backward threshold_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward elu_backward
    leaky_relu_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward
    """
)
TOGETHER = names("add sub rsub")


def _linear(eqn: Equation, operands: list[Value]) -> tuple[frozenset[int], ...]:
    name, count = eqn.opname, len(operands)
    if any(v is not None and not v.tensor.is_differentiable for v in eqn.outputs):
        return ()
    if name in FIRST:
        return (frozenset([0]),)
    if name == "mul":
        return tuple(frozenset([i]) for i in range(count)) if count < 2 or operands[0] is not operands[1] else ()
    if name == "div" and "rounding_mode" not in eqn.kwargs:
        return (frozenset([0]),) if count == 1 or operands[0] is not operands[1] else ()
    if name in TOGETHER and count == 2:
        return (frozenset([0, 1]),)
    if name == "where" and count == 3:
        return (frozenset([1, 2]),)
    return ()


def broadcast(eqn: Equation) -> Factors | None:
    """Dimensions are matched from the last on; those of size one are repeated."""
    results = [v for v in eqn.results() if isinstance(v.type, TensorType)]
    operands = tensors(eqn)
    if not results or len(results) != len(eqn.outputs):
        return None
    rank = results[0].ndim
    if any(v.ndim != rank for v in results) or any(v.ndim > rank for v in operands):
        return None

    def dims(v: Value) -> Dims | None:
        lead = rank - v.ndim
        out = results[0].shape[lead:]
        sizes = [(size_key(a), size_key(b)) for a, b in zip(v.shape, out, strict=True)]
        if any(a != b and a != 1 for a, b in sizes):
            return None
        return tuple((f"d{lead + i}",) if a == b else () for i, (a, b) in enumerate(sizes))

    given = [dims(v) for v in operands]
    if any(d is None for d in given):
        return None
    return Factors(
        tuple(d for d in given if d is not None),
        tuple(tuple((f"d{i}",) for i in range(rank)) for _ in results),
        linear=_linear(eqn, operands),
    )


rule(
    """
    _to_copy to clone alias detach lift_fresh lift_fresh_copy contiguous copy zeros_like ones_like full_like empty_like
    gelu_backward threshold_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward elu_backward
    leaky_relu_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward hardtanh masked_fill
    where.ScalarOther where.ScalarSelf where.Scalar
    """
)(broadcast)
