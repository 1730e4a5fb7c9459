"""The reference interpreter of traces: the oracle that every pass and executor is tested against.

In: a Trace and its arguments (tensors and numbers). Out: the list of its outputs. One operator call per
equation, nothing bound, nothing reordered. Mutations happen together at the end, as if all their values had
been read before the first write, and outputs keep the contents they had before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tessera.ir.equation import ATOMS, Arg, Value
from tessera.ir.expression import NAMES, expression
from tessera.ir.formula import Formula
from tessera.ir.printer import callable_of
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.memory import memory_of
from tessera.util.errors import InputError

Symbols = dict[str, object]


def run(trace: Trace, *args: object) -> list:
    """Run a trace on real tensors and numbers, one equation after the other."""
    return _run(trace, args, {})


def _run(trace: Trace, args: tuple[object, ...], outer: Symbols) -> list:
    if len(args) != len(trace.inputs):
        raise InputError(f"{trace.name}: expected {len(trace.inputs)} arguments, got {len(args)}")
    env: dict[Value, object] = {**dict(zip(trace.inputs, args, strict=True)), **trace.constants}
    symbols = dict(outer)
    by_value: dict[Value, list[tuple[str, int | None]]] = {}
    for symbol, (v, dim) in trace.symbols.items():
        by_value.setdefault(v, []).append((symbol, dim))

    def define(values: tuple[Value | None, ...] | list[Value]) -> None:
        for v in values:
            if v is None or v not in by_value:
                continue
            for symbol, dim in by_value[v]:
                held = env[v]
                symbols[symbol] = held if dim is None else held.shape[dim]  # type: ignore[attr-defined]

    def concrete(tree: Arg) -> object:
        return resolve(tree, env, symbols)

    define(trace.inputs)
    for eqn in trace.equations:
        out = callable_of(eqn.op)(*concrete(eqn.args), **concrete(eqn.kwargs))  # type: ignore[arg-type,misc]
        outs = tuple(out) if eqn.many else (out,) if eqn.outputs else ()
        if len(outs) != len(eqn.outputs):
            raise InputError(f"{trace.name}: {eqn.op} gave {len(outs)} results, expected {len(eqn.outputs)}")
        env.update({v: o for v, o in zip(eqn.outputs, outs, strict=True) if v is not None})
        define(eqn.outputs)
    return finish(trace, env, concrete)


def finish(trace: Trace, env: dict[Value, object], concrete: Callable[[Arg], object]) -> list:
    outputs = list(concrete(trace.outputs))  # type: ignore[call-overload]
    writes = [(env[t], env[v]) for t, v in trace.mutations.items() if t is not v]
    written = {memory_of(t) for t, _ in writes}
    outputs = [o.clone() if isinstance(o, torch.Tensor) and memory_of(o) in written else o for o in outputs]
    with torch.no_grad():
        news = [new.clone() for _, new in writes]  # type: ignore[attr-defined]
        for (target, _), new in zip(writes, news, strict=True):
            target.copy_(new)  # type: ignore[attr-defined]
    return outputs


def resolve(tree: Arg, env: Mapping[Value, object], symbols: Symbols) -> Any:
    """The same structure of what `env` holds, with symbolic numbers computed and sub-traces made callable."""
    if type(tree) is Value:
        held = env[tree]
        return number(held, symbols) if isinstance(held, SYMBOLIC) else held
    if isinstance(tree, (tuple, list)):
        items = [item if type(item) in ATOMS else resolve(item, env, symbols) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: resolve(item, env, symbols) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*resolve((tree.start, tree.stop, tree.step), env, symbols))
    if isinstance(tree, SYMBOLIC):
        return number(tree, symbols)
    if isinstance(tree, Formula):  # of a program that was loaded
        return tree.value(symbols)  # type: ignore[arg-type]
    if isinstance(tree, Trace):
        return lambda *args: tuple(_run(tree, args, symbols))
    return tree


def number(symbolic: torch.SymInt | torch.SymFloat | torch.SymBool, symbols: Symbols) -> int | float | bool:
    """The value of a symbolic number, given those of its symbols."""
    expr = symbolic.node.expr
    unbound = [str(s) for s in expr.free_symbols if str(s) not in symbols]
    if unbound:
        raise InputError(f"the size {expr} mentions {', '.join(unbound)}, which nothing in the trace binds")
    # As the generated code computes it, so that fake runs may stay symbolic.
    return eval(expression(symbolic), dict(NAMES), dict(symbols))
