"""Operators without a sharding rule that PyTorch can write as arithmetic: elementwise operators, sums and means.

In: an equation over whole values. Out: emits what it is made of, or nothing where that is more than arithmetic. Losses
and their gradients are such operators: in parts they need no rule of their own, and nothing is gathered for them.
"""

from __future__ import annotations

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value, substitute
from tessera.ir.schema import draws, has_effect, is_pointwise
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.factors.lookup import factors_of
from tessera.ops.fallback import call_key, kernels_of
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload, decomposition_table
from tessera.util.names import names

# beside elementwise operators; look-ups are left out, since what is written with them is slower than its kernel
PLAIN = names(
    """
    sum mean amax amin view unsqueeze squeeze expand detach
    full_like zeros_like ones_like scalar_tensor full new_full new_zeros new_ones
    """
)

_known: dict[tuple, Trace | None] = {}


def arithmetic(eqn: Equation, builder: Builder) -> list | None:
    """The results, emitted in parts; None where the operator cannot be written so."""
    if not isinstance(eqn.op, OpOverload) or eqn.op not in decomposition_table or has_effect(eqn):
        return None
    if draws(eqn.op, eqn.args, eqn.kwargs) or not all(isinstance(v.type, TensorType) for v in eqn.inputs()):
        return None
    key = call_key(eqn, builder.mode)
    if key not in _known:
        _known[key] = _written(eqn, builder.mode)
    parts = _known[key]
    return None if parts is None else builder.inline(parts, list(dict.fromkeys(eqn.inputs())), here=True)


def _written(eqn: Equation, mode: FakeTensorMode) -> Trace | None:
    values = list(dict.fromkeys(eqn.inputs()))

    def run(*tensors: torch.Tensor) -> list[object]:
        env = dict(zip(values, tensors, strict=True))
        out = decomposition_table[eqn.op](*substitute(eqn.args, env), **substitute(eqn.kwargs, env))  # type: ignore[index]
        return list(out) if isinstance(out, (tuple, list)) else [out]

    fakes = [fake.fake_of(v.tensor, mode) for v in values]
    try:
        parts = kernels_of(run, fakes, [f"x{i}" for i in range(len(fakes))], Builder("parts", mode))
    except (RuntimeError, NotImplementedError, TypeError, ZeroDivisionError):
        return None  # PyTorch's decomposition does not take these arguments
    if (
        not all(_is_plain(e, mode) for e in parts.equations)
        or parts.mutations
        or parts.constants
        or not _as_said(parts, eqn)
    ):
        return None
    return parts


def _is_plain(eqn: Equation, mode: FakeTensorMode) -> bool:
    if is_pointwise(eqn.op) or eqn.opname in PLAIN:
        return factors_of(eqn) is not None
    return eqn.op in decomposition_table and _written(eqn, mode) is not None


def _as_said(parts: Trace, eqn: Equation) -> bool:
    """PyTorch's Python gives results of the types that its kernels give; empty ones of kernels, which only the CPU's
    have, may be missing."""
    for v, part in zip(eqn.outputs, parts.outputs, strict=True):
        if v is None:
            continue
        if not isinstance(part, Value) or (part.dtype, str(part.shape)) != (v.dtype, str(v.shape)):
            return False
    return True
