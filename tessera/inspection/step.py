"""Runs a trace one equation at a time, letting someone look in between.

In: a trace, its arguments, and what to do around each equation. Out: the trace's outputs. Values are freed after
their last use, as the generated program frees them, unless all are to be kept; nothing is reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.interp import finish, resolve
from tessera.ir.printer import callable_of
from tessera.ir.trace import Trace
from tessera.util.errors import InputError

Around = Callable[[int, Equation], AbstractContextManager]
After = Callable[[Equation, list[object]], None]
Call = Callable[[Equation, tuple, dict], object]


def plain(eqn: Equation, args: tuple, kwargs: dict) -> object:
    """The equation as it stands."""
    return callable_of(eqn.op)(*args, **kwargs)


def step(
    trace: Trace,
    args: Sequence[object],
    around: Around | None = None,
    after: After | None = None,
    call: Call = plain,
    boxed: bool = False,
) -> list:
    """The outputs. `around(i, eqn)` is entered while an equation runs; `after(eqn, results)` sees what it gave; `call`
    runs it in another way. `boxed`: `args` is a list that is emptied, and its tensors die with their last reader."""
    if len(args) != len(trace.inputs):
        raise InputError(f"{trace.name}: expected {len(trace.inputs)} arguments, got {len(args)}")
    return _Steps(trace, args, call, boxed).run(around or (lambda index, eqn: nullcontext()), after)


class _Steps:
    def __init__(self, trace: Trace, args: Sequence[object], call: Call, boxed: bool) -> None:
        self.trace, self.call = trace, call
        self.env: dict[Value, object] = {**trace.constants, **dict(zip(trace.inputs, args, strict=True))}
        self.symbols: dict[str, object] = {}
        self.last: dict[Value, int] = {}
        for index, eqn in enumerate(trace.equations):
            self.last.update({v: index for v in (*eqn.results(), *eqn.inputs())})
        self.stay = {*trace.constants, *trace.results(), *trace.mutations}
        if boxed and isinstance(args, list):
            args.clear()
        else:
            self.stay.update(trace.inputs)

    def run(self, around: Around, after: After | None) -> list:
        self.define(self.trace.inputs)
        for index, eqn in enumerate(self.trace.equations):
            with around(index, eqn):
                self.equation(eqn)
            if after is not None:
                after(eqn, [self.env[v] for v in eqn.results()])
            with around(index, eqn):
                for v in (*eqn.inputs(), *eqn.results()):
                    if self.last[v] <= index and v not in self.stay:
                        self.env.pop(v, None)
        return finish(self.trace, self.env, self.concrete)

    def equation(self, eqn: Equation) -> None:
        out: Any = self.call(eqn, self.concrete(eqn.args), self.concrete(eqn.kwargs))  # type: ignore[arg-type]
        outs = tuple(out) if eqn.many else (out,) if eqn.outputs else ()
        if len(outs) != len(eqn.outputs):
            raise InputError(f"{self.trace.name}: {eqn.op} gave {len(outs)} results, expected {len(eqn.outputs)}")
        self.env.update({v: o for v, o in zip(eqn.outputs, outs, strict=True) if v is not None})
        self.define(eqn.results())

    def define(self, values: Sequence[Value]) -> None:
        for symbol, (v, dim) in self.trace.symbols.items():
            if v in values:
                held = self.env[v]
                self.symbols[symbol] = held if dim is None else held.shape[dim]  # type: ignore[attr-defined]

    def concrete(self, tree: Arg) -> object:
        return resolve(tree, self.env, self.symbols)


def values_of(trace: Trace, args: Sequence[object], call: Call = plain) -> tuple[list, dict[str, torch.Tensor]]:
    """The outputs, and a copy of every tensor the program computes, by name; later writes do not reach the copies."""
    values: dict[str, torch.Tensor] = {}

    def keep(eqn: Equation, results: list[object]) -> None:
        for v, result in zip(eqn.results(), results, strict=True):
            if isinstance(result, torch.Tensor):
                values[v.name] = result.detach().clone()

    return step(trace, args, after=keep, call=call), values
