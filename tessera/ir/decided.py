"""Numbers that a program asks for while it is recorded, and that no argument decides.

    make_causal = bool((mask == torch.ones(n, n).triu(1)).all())        # both made by the program itself

In: the builder of a recording, and a value of it. Out: the real tensor, where the equations that lead to it read
literals alone and draw nothing; they are run at once. Otherwise None: only a run of the program would tell.
"""

from __future__ import annotations

import torch

from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value, symbols_in
from tessera.ir.interp import run
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.operators import OpOverload

LARGEST = 1 << 24  # elements of what is computed on the way
LITERAL = torch.ops.aten.lift_fresh_copy.default


def decided(builder: Builder, v: Value) -> torch.Tensor | None:
    """What a value holds in every run."""
    makers = {out: eqn for eqn in builder.equations for out in eqn.results()}
    wanted, seen, constants = [v], set[int](), dict[Value, torch.Tensor]()
    while wanted:
        eqn = makers.get(wanted.pop())
        if eqn is None or not _plain(eqn):
            return None
        if id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if eqn.op is LITERAL:
            literals = {x: builder.constants.get(x) for x in eqn.inputs()}
            if any(t is None or isinstance(t, FakeTensor) for t in literals.values()):
                return None
            constants.update(literals)  # type: ignore[arg-type]
        else:
            wanted += eqn.inputs()
    equations = tuple(eqn for eqn in builder.equations if id(eqn) in seen)
    with disable_current_modes(), torch.no_grad():
        return run(Trace(builder.name, (), equations, (v,), constants=constants))[0]


def _plain(eqn: Equation) -> bool:
    if not isinstance(eqn.op, OpOverload) or has_effect(eqn):
        return False
    if symbols_in((eqn.args, eqn.kwargs)):  # the sizes of an argument decide it
        return False
    types = [v.type for v in eqn.results()]
    return all(isinstance(t, TensorType) and not t.is_symbolic and _here(t) for t in types)


def _here(type_: TensorType) -> bool:
    """It is small, and on a device that this machine has."""
    there = type_.device.type == "cpu" or torch.get_device_module(type_.device).is_available()
    return there and type_.numel() <= LARGEST
