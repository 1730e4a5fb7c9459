"""Runs a trace inside whatever is around it.

In: a Trace and its arguments. Out: the list of its outputs. One operator call per equation, so that a recorder
that is active writes the equations into its own program, eager autograd notes them, and plain tensors are just
computed. `no_grad` regions, other tags and the user's lines are kept; values are freed after their last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tessera.ir import interp
from tessera.ir.alias import KEEP_GRAD
from tessera.ir.equation import Arg, Equation, Special, Value, map_values, symbols_in
from tessera.ir.printer import callable_of
from tessera.ir.record import NO_GRAD, Recorder, recording
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.autograd import set_grad_enabled
from tessera.torch_internals.dispatch import DisableAutocast
from tessera.torch_internals.memory import memory_of
from tessera.util.errors import InputError


def replay(trace: Trace, args: Sequence[object], casts: bool = False) -> list:
    """The outputs of a trace on these arguments; mutated inputs are written at the end.

    Autocast is off, for the casts of the program are equations already; `casts` leaves it as it is.
    """
    if len(args) != len(trace.inputs):
        raise InputError(f"{trace.name}: expected {len(trace.inputs)} arguments, got {len(args)}")
    with nullcontext() if casts else DisableAutocast():
        return _Replay(trace, args, recording()).run()


def sweep(trace: Trace) -> Trace:
    """The trace without equations whose results nothing needs."""
    needed = set(trace.results()) | {v for v, _ in trace.symbols.values()}
    kept: list[Equation] = []
    for eqn in reversed(trace.equations):
        if has_effect(eqn) or any(v in needed for v in eqn.results()):
            kept.append(eqn)
            needed.update(eqn.inputs())
    return trace.with_(
        equations=tuple(reversed(kept)), constants={v: t for v, t in trace.constants.items() if v in needed}
    )


class _Replay:
    def __init__(self, trace: Trace, args: Sequence[object], recorder: Recorder | None) -> None:
        self.trace, self.recorder = trace, recorder
        self.env: dict[Value, object] = {**trace.constants, **dict(zip(trace.inputs, args, strict=True))}
        self.symbols: dict[str, object] = {}
        self.brings: dict[Value, list[tuple[str, int | None]]] = {}
        for symbol, (v, dim) in trace.symbols.items():
            self.brings.setdefault(v, []).append((symbol, dim))
        self.last = {v: i for i, eqn in enumerate(trace.equations) for v in eqn.inputs()}
        self.stay = {*trace.results(), *trace.mutations}

    def run(self) -> list:
        self.bind(self.trace.inputs)
        grad, located = torch.is_grad_enabled(), self.recorder.locate if self.recorder else True
        tags = self.recorder.extra_tags if self.recorder else frozenset()
        try:
            for index, eqn in enumerate(self.trace.equations):
                set_grad_enabled(grad and NO_GRAD not in eqn.tags)
                if self.recorder is not None:
                    self.recorder.extra_tags = tags | (eqn.tags - {NO_GRAD})
                    self.recorder.locate = located and not eqn.source.file
                    if not self.recorder.locate:
                        self.recorder.builder.source = eqn.source
                self.equation(eqn)
                for v in (*eqn.inputs(), *eqn.results()):
                    if self.last.get(v, -1) <= index and v not in self.stay:
                        self.env.pop(v, None)
        finally:
            set_grad_enabled(grad)
            if self.recorder is not None:
                self.recorder.extra_tags, self.recorder.locate = tags, located
        return self.finish()

    def equation(self, eqn: Equation) -> None:
        args, kwargs = self.concrete(eqn.args), self.concrete(eqn.kwargs)
        if isinstance(eqn.op, Special):
            out: Any = self.special(eqn, args, kwargs)  # type: ignore[arg-type]
        else:
            out = eqn.op(*args, **kwargs)  # type: ignore[misc]
        outs = tuple(out) if eqn.many else (out,)
        self.env.update({v: o for v, o in zip(eqn.outputs, outs, strict=False) if v is not None})
        self.bind(eqn.results())

    def special(self, eqn: Equation, args: tuple, kwargs: dict) -> object:
        assert isinstance(eqn.op, Special)
        if self.recorder is not None:  # stays one equation, sub-traces and all
            given = iter(self.recorder.special(eqn.op, args, kwargs, [v.type for v in eqn.results()], eqn.many))
            outs = [None if v is None else next(given) for v in eqn.outputs]
            return outs if eqn.many else outs[0]
        if eqn.op is KEEP_GRAD and torch.is_grad_enabled():
            return _KeepGrad.apply(*args[:2])
        return callable_of(eqn.op)(*callables(args), **callables(kwargs))  # type: ignore[arg-type,misc]

    def finish(self) -> list:
        outputs = [self.concrete(o) for o in self.trace.outputs]
        writes = [(self.env[t], self.env[v]) for t, v in self.trace.mutations.items() if t is not v]
        if not writes:
            return outputs
        written = {memory_of(t) for t, _ in writes}
        outputs = [o.clone() if isinstance(o, torch.Tensor) and memory_of(o) in written else o for o in outputs]
        news = [n.clone() if memory_of(n) in written else n for _, n in writes]  # type: ignore[attr-defined]
        for (target, _), new in zip(writes, news, strict=True):
            target.copy_(new)  # type: ignore[attr-defined]
        return outputs

    # --- values and sizes ---

    def bind(self, values: Sequence[Value]) -> None:
        for v in values:
            for symbol, dim in self.brings.get(v, ()):
                held = self.env[v]
                self.symbols[symbol] = held if dim is None else held.shape[dim]  # type: ignore[attr-defined]

    def concrete(self, tree: Arg) -> object:
        held = map_values(tree, self.env.__getitem__)
        return self.sizes(held) if symbols_in(held) else held

    def sizes(self, tree: object) -> object:
        """Symbolic numbers of the trace become those of the world around: ints, or its own symbols."""
        if isinstance(tree, SYMBOLIC):
            return interp.number(tree, self.symbols)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.sizes(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self.sizes(item) for key, item in tree.items()}
        return tree


def callables(tree: object) -> object:
    """The same structure with sub-traces made callable."""
    if isinstance(tree, Trace):
        return lambda *args: tuple(replay(tree, args))
    if isinstance(tree, (list, tuple)):
        return type(tree)(callables(item) for item in tree)
    if isinstance(tree, dict):
        return {key: callables(item) for key, item in tree.items()}
    return tree


class _KeepGrad(torch.autograd.Function):
    """The value of `new` with the gradient history of `old`, for eager autograd."""

    @staticmethod
    def forward(ctx, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return new.clone()

    @staticmethod
    def backward(ctx, ct: torch.Tensor) -> tuple:  # noqa: ANN001
        return ct, None
