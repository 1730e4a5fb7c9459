"""Calls of sub-traces: `call(body, *operands)` and `checkpoint(body, *operands)`.

A block that a model repeats is one body that every call refers to; the body of a checkpoint is what backward runs
again instead of saving. Both compute `body(*operands)`. `in_place` puts the bodies' equations where the calls stand,
those of a checkpoint marked to be run again: transforms and passes look at a program in that form. The results of a
call keep their values, so whoever holds one of the trace's values still finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from tessera.ir import interp
from tessera.ir.builder import Builder
from tessera.ir.equation import (
    Arg,
    Equation,
    Source,
    Special,
    Value,
    recompute_region,
    recompute_tag,
    substitute,
    without_recompute,
)
from tessera.ir.trace import Trace
from tessera.torch_internals.fake import FakeTensor

Sub = Callable[..., tuple] | Trace


def runnable(sub: Sub) -> Callable[..., tuple]:
    """A sub-trace comes as a callable where a program runs, as a Trace where only its types are wanted."""
    return (lambda *args: tuple(interp.run(sub, *args))) if isinstance(sub, Trace) else sub


def _call(body: Sub, *operands: object) -> list:
    return list(runnable(body)(*operands))


def _checkpoint(body: Sub, *operands: object) -> list:
    """Where autograd looks on, it computes the body again too."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return list(checkpoint(runnable(body), *operands, use_reentrant=False))  # type: ignore[arg-type]
    return list(runnable(body)(*operands))


CALL = Special("call", _call)
CHECKPOINT = Special("checkpoint", _checkpoint)


def is_call(eqn: Equation) -> bool:
    return eqn.op is CALL or eqn.op is CHECKPOINT


def sub_traces(eqn: Equation) -> list[Trace]:
    return [a for a in eqn.args if isinstance(a, Trace)] if isinstance(eqn.op, Special) else []


def in_place(trace: Trace) -> Trace:
    """The same program with every call replaced by the equations of its body, inside other sub-traces too."""
    return _Inliner().trace(trace)


class _Inliner:
    def __init__(self) -> None:
        self.done: dict[Trace, Trace] = {}
        self.regions = 0  # checkpoints met so far
        self.homes: dict[Trace, str] = {}  # body -> the module that called it first, whose names its equations bear

    def trace(self, trace: Trace) -> Trace:
        if trace not in self.done:
            self.done[trace] = self.without_calls(trace)
        return self.done[trace]

    def without_calls(self, trace: Trace) -> Trace:
        if not any(is_call(e) or any(self.trace(sub) is not sub for sub in sub_traces(e)) for e in trace.equations):
            return trace
        builder = Builder.over(trace)
        for eqn in trace.equations:
            if is_call(eqn):
                self.expand(eqn, builder)
            else:
                builder.append(eqn.with_(args=tuple(map(self.argument, eqn.args))) if sub_traces(eqn) else eqn)
        return builder.finish(trace.outputs, trace.mutations)

    def argument(self, a: Arg) -> Arg:
        return self.trace(a) if isinstance(a, Trace) else a

    def expand(self, eqn: Equation, builder: Builder) -> None:
        """The equations of the body, on the operands; those that make its outputs make the call's results."""
        body: Trace = self.trace(eqn.args[0])  # type: ignore[arg-type]
        home = self.homes.setdefault(body, eqn.source.module)
        env: dict[Value, Arg] = dict(zip(body.inputs, eqn.args[1:], strict=True))
        named: dict[Value, Value] = {}
        for inner, outer in zip(body.outputs, eqn.outputs, strict=True):
            if isinstance(inner, Value) and inner not in env and outer is not None:
                named.setdefault(inner, outer)
        tags, again = eqn.tags, recompute_region(eqn.tags)
        if eqn.op is CHECKPOINT and again is None:
            self.regions += 1
            again, tags = str(self.regions), tags | {recompute_tag(self.regions)}
        for e in body.equations:
            outputs = [None if v is None else named.get(v) or builder.value(v.name, v.type) for v in e.outputs]
            args, kwargs = substitute(e.args, env), substitute(e.kwargs, env)
            source = moved(e.source, home, eqn.source.module)
            own = e.tags if again is None else without_recompute(e.tags)  # what is inside a region is all of it
            builder.equations.append(
                e.with_(args=args, kwargs=kwargs, outputs=tuple(outputs), source=source, tags=own | tags)
            )
            env.update((old, new) for old, new in zip(e.outputs, outputs, strict=True) if old is not None)  # type: ignore[misc]
        for inner, outer in zip(body.outputs, eqn.outputs, strict=True):
            if outer is not None and named.get(inner) is not outer:  # type: ignore[call-overload]
                # an operand, or a result given twice, under another name
                builder.equations.append(
                    Equation(torch.ops.aten.alias.default, (env[inner],), {}, (outer,), source=eqn.source, tags=tags)  # type: ignore[index]
                )
        for symbol, (v, dim) in body.symbols.items():
            if isinstance(value := env.get(v), Value):
                builder.symbols.setdefault(symbol, (value, dim))


def moved(source: Source, home: str, here: str) -> Source:
    """Of an equation in a body that was recorded under the module `home`, where `here` calls it."""
    if home == here or not home or not f"{source.module}.".startswith(f"{home}."):
        return source
    return replace(source, module=here + source.module.removeprefix(home))
