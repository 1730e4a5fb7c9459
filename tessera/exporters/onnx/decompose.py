"""An operator without a form of its own, as the operators that it is made of.

In: an equation. Out: a Trace over the equation's values, recorded from PyTorch's decomposition of the operator or from
its composite kernel; operators that have a form stay whole. None where PyTorch has neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from sympy import Integer

from tessera.exporters.onnx.registry import has_form
from tessera.ir import fake
from tessera.ir.alias import FUNCTIONAL, on_copies
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, substitute
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, known
from tessera.ops.fake_quantize import PARTS
from tessera.ops.fallback import call_key
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload, decomposition_table
from tessera.torch_internals.shapes import ShapeEnv, new_guards, symbol_values

_TRIED = (4, 5, 6, 7, 9, 12, 16)  # sizes that a condition is tried on
_TRIES = 500


class Decompositions:
    """What operators are made of, remembered by the types of their arguments."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: dict[tuple, Trace | None] = {}

    def of(self, eqn: Equation) -> Trace | None:
        if not all(isinstance(v.type, TensorType) for v in eqn.inputs()):
            return None
        key = call_key(eqn, self.mode)
        if key not in self.known:
            self.known[key] = self.trace(eqn)
        return self.known[key]

    def trace(self, eqn: Equation) -> Trace | None:
        op, values = eqn.op, list(dict.fromkeys(eqn.inputs()))
        call = _parts_of(op)

        def run(*tensors: torch.Tensor) -> list[object]:
            env = dict(zip(values, tensors, strict=True))
            out = call(*substitute(eqn.args, env), **substitute(eqn.kwargs, env))  # type: ignore[arg-type]
            return list(out) if isinstance(out, (tuple, list)) else [out]

        # Its strides are nobody's concern: an operator is asked for what it gives of plain tensors.
        fakes = [fake.fake_of(_plain(v.tensor), self.mode) for v in values]
        names = [f"x{i}" for i in range(len(fakes))]
        open_sizes = [n for v in values for n in v.tensor.shape if not isinstance(n, int) and known(n) is n]
        env = self.mode.shape_env
        try:
            with new_guards(env) if env is not None else nullcontext([]) as conditions:
                parts, _ = record(
                    run, fakes, names, lambda o: has_form(o) and o is not op, Builder("parts", self.mode), locate=False
                )
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return None  # PyTorch's decomposition does not take these arguments
        declined = any(o is NotImplemented for o in parts.outputs)
        if any(known(n) is not n for n in open_sizes):
            return None  # the parts are those of one size alone
        if env is not None and not all(_usual(condition, env) for condition in conditions):
            return None  # or of sizes that divide each other, and the like
        if declined or parts.mutations or any(e.op is op for e in parts.equations):
            return None
        return parts


def _usual(condition: Any, env: ShapeEnv) -> bool:
    """Whether a condition on sizes holds for others than those of the example. PyTorch asks whether a size is 1, or the
    same as another, to broadcast; ONNX's operators do that by themselves, so small and equal ones are not tried."""
    symbols = sorted(condition.free_symbols, key=str)
    ranges = [env.var_to_range.get(s) for s in symbols]
    example = symbol_values(env)
    tried = [
        [n for n in _TRIED if r is None or n in r] or [int(example[s])] for s, r in zip(symbols, ranges, strict=True)
    ]
    for values in itertools.islice(itertools.product(*tried), _TRIES):
        chosen = dict(zip(symbols, map(Integer, values), strict=True))
        if len(set(values)) == len(values) and not condition.xreplace(chosen):
            return False
    return True


def _parts_of(op: OpOverload | Special) -> Callable:
    if op is FUNCTIONAL:  # of an operator that writes: its parts are recorded over copies

        def functional(inner: OpOverload, *args: object, **kwargs: object) -> object:
            return on_copies(decomposition_table.get(inner, inner), inner, (), args, kwargs)

        return functional
    if isinstance(op, OpOverload):
        return PARTS.get(op) or decomposition_table.get(op, op)
    return op.fn


def _plain(t: TensorType) -> TensorType:
    return replace(t, bits=(False, False))
