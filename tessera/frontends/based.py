"""Inputs whose views, made without gradients, may or may not require gradients: autograd asks the input's base.

In: a captured program. Out: the inputs of which it makes such views and computes something with gradients from them. A
program is compiled for a base that requires gradients, as that of most inputs does, since they have none or are it
themselves. A leaf that was made as a view of something without gradients (`x[:, ::2].requires_grad_()`) is another
case, which nothing but the tensor itself tells: there the program runs eagerly.
"""

from __future__ import annotations

import torch

from tessera.frontends.captured import Captured
from tessera.ir.equation import NO_GRAD, Value
from tessera.ir.fake import shows_argument
from tessera.torch_internals.operators import aten_name


def asked_bases(captured: Captured) -> tuple[int, ...]:
    """The inputs whose bases decide, by position."""
    equations = captured.trace.equations
    if not any(NO_GRAD in eqn.tags for eqn in equations):
        return ()
    pairs = enumerate(zip(captured.trace.inputs, captured.requires_grad, strict=True))
    shown: dict[object, int] = {v: i for i, (v, wanted) in pairs if wanted}  # views of inputs, and inputs
    unheard: dict[Value, int] = {}  # those made without gradients
    asked: set[int] = set()
    for eqn in equations:
        source = shown.get(eqn.args[0]) if eqn.args and isinstance(eqn.args[0], Value) else None
        if NO_GRAD not in eqn.tags:
            asked.update(unheard[v] for v in eqn.inputs() if v in unheard)
        if source is not None and shows_argument(eqn) and aten_name(eqn.op) != "detach":
            shown.update(dict.fromkeys(eqn.results(), source))
            if NO_GRAD in eqn.tags or eqn.args[0] in unheard:
                unheard.update(dict.fromkeys(eqn.results(), source))
    return tuple(sorted(asked))


def base_requires_grad(x: object) -> bool:
    """What a view of this input, made without gradients, says."""
    with torch.no_grad():
        return not isinstance(x, torch.Tensor) or not x.requires_grad or x.view_as(x).requires_grad
