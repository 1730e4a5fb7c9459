"""Other equations that compute the same, for operators of which PyTorch has no derivative, tangent or batching rule."""

from __future__ import annotations

import re

import torch

from tessera.ir.equation import Equation, Special
from tessera.torch_internals import pytree
from tessera.torch_internals.operators import decomposition_table, overload_name

_UNWRITTEN = re.compile(r"derivative for \S+.* is not implemented")


def is_unwritten(error: Exception) -> bool:
    """PyTorch says that nobody has written this derivative."""
    return _UNWRITTEN.search(str(error)) is not None


def is_users(eqn: Equation) -> bool:
    """An operator that users call as a method: where eager has no derivative of it, they shall hear so. Others stand
    for something that has one: what a write was made of, or the backward of a kernel."""
    name = eqn.opname
    return not name.startswith("_") and not name.endswith("_backward") and hasattr(torch.Tensor, name)


# PyTorch's Python for these computes something else: labels after a -1 count there.
_MISTAKEN = frozenset((torch.ops.aten.multilabel_margin_loss_forward.default,))


def twins(eqn: Equation) -> list[Equation]:
    """Equations that compute the same: PyTorch differentiates `copy_` and not `copy`, and has kernels (silu's
    backward) that it can only differentiate, or batch, written out."""
    if isinstance(eqn.op, Special):
        return []
    written_out = None if eqn.op in _MISTAKEN else decomposition_table.get(eqn.op)
    decomposed = [] if written_out is None else [eqn.with_(op=Special(eqn.opname, written_out, "formula"))]
    return [twin for twin in (_complex_twin(eqn), _writing_twin(eqn)) if twin is not None] + decomposed


def _complex_twin(eqn: Equation) -> Equation | None:
    """The same computation with every operand complex. PyTorch's gradients of `fill` and `where` by a real operand
    beside complex ones are complex, and autograd refuses those; that of the cast takes the real part."""
    wide = next((v.dtype for v in eqn.results() if v.is_differentiable and v.dtype.is_complex), None)
    mixed = wide is not None and any(v.is_differentiable and not v.dtype.is_complex for v in eqn.inputs())

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(wide) if x.is_floating_point() else x

    def run(*args: object, **kwargs: object) -> object:
        args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        return eqn.op(*args, **kwargs)  # type: ignore[operator]

    return eqn.with_(op=Special(eqn.opname, run, "formula")) if mixed else None


def _writing_twin(eqn: Equation) -> Equation | None:
    """The same computation by the in-place operator, on a copy."""
    if isinstance(eqn.op, Special) or eqn.opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, eqn.op.namespace), eqn.opname + "_", None)
    writing = getattr(packet, overload_name(eqn.op), None)

    def run(first: torch.Tensor, *args: object, **kwargs: object) -> object:
        return writing(first.clone(), *args, **kwargs)  # type: ignore[misc]

    return None if writing is None else eqn.with_(op=Special(eqn.opname, run, "formula"))
