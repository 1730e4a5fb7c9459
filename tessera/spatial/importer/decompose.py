"""An operator without a form of its own, as the operators that it is made of.

In: an equation. Out: a Trace over the equation's values, recorded from what `written_out` says of the operator, from
PyTorch's decomposition, or from its composite kernel; operators that have a form stay whole. None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import tessera.spatial.importer.written_experts
import tessera.spatial.importer.written_layers  # noqa: F401  (they declare them)
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Arg, Equation, substitute
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ops.fallback import call_key
from tessera.spatial.errors import MapError
from tessera.spatial.importer.written_out import written_out
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import decomposition_table


class Decompositions:
    """What operators are made of, remembered by the types of their arguments."""

    def __init__(self, mode: FakeTensorMode, has_form: Callable[[object], bool]) -> None:
        self.mode, self.has_form = mode, has_form
        self.known: dict[tuple, Trace | None] = {}

    def of(self, eqn: Equation) -> Trace | None:
        key = call_key(eqn, self.mode)
        if key not in self.known:
            self.known[key] = self.trace(eqn)
        return self.known[key]

    def trace(self, eqn: Equation) -> Trace | None:
        ours = None
        if (written := written_out(eqn.op)) is not None:
            ours = self.recorded(eqn, written, *eqn.bound())
        call = decomposition_table.get(eqn.op, eqn.op)  # type: ignore[call-overload]
        return ours or self.recorded(eqn, call, eqn.args, eqn.kwargs)

    def recorded(self, eqn: Equation, call: Callable, args: Sequence[Arg], kwargs: Arg) -> Trace | None:
        op, values = eqn.op, list(dict.fromkeys(eqn.inputs()))

        def run(*tensors: torch.Tensor) -> list[object]:
            env = dict(zip(values, tensors, strict=True))
            out = call(*substitute(args, env), **substitute(kwargs, env))  # type: ignore[arg-type,misc]
            return list(out) if isinstance(out, (tuple, list)) else [out]

        fakes = [fake.fake_of(v.tensor, self.mode) for v in values]
        labels = [f"x{i}" for i in range(len(fakes))]
        keep = lambda o: (self.has_form(o) or written_out(o) is not None) and o is not op  # noqa: E731
        try:
            parts, _ = record(run, fakes, labels, keep, Builder("parts", self.mode), locate=False)
        except MapError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None  # PyTorch's decomposition does not take these arguments
        declined = any(o is NotImplemented for o in parts.outputs)
        if declined or parts.mutations or any(e.op is op for e in parts.equations):
            return None
        return parts
