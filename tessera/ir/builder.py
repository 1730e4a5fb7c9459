"""Builds a Trace equation by equation.

A Builder names values, infers their types and keeps the order. Inside `with builder:` the name `aten` is
PyTorch's operator namespace over Values, so that rules read like the traces they make:

    with builder:
        y = aten.mul(x, aten.sigmoid(x))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tessera.ir import fake
from tessera.ir.equation import (
    ACTIVE,
    NOWHERE,
    Arg,
    Equation,
    Operator,
    Source,
    Special,
    Value,
    substitute,
    without_recompute,
)
from tessera.ir.mode import mode_of
from tessera.ir.printer import identifier
from tessera.ir.schema import normalise, resolve
from tessera.ir.trace import Trace
from tessera.ir.types import ScalarType, Type
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload, OpOverloadPacket, op_name
from tessera.util.errors import RuleError

_COUNTED = re.compile(r"(_\d+)+$")


class Builder:
    def __init__(self, name: str, mode: FakeTensorMode | None = None) -> None:
        self.name = name
        self.mode = mode or fake.default_mode()
        self.inputs: list[Value] = []
        self.constants: dict[Value, torch.Tensor] = {}
        self.equations: list[Equation] = []
        self.symbols: dict[str, tuple[Value, int | None]] = {}
        self.source: Source = NOWHERE
        self.tags: frozenset[str] = frozenset()
        self.enables_grad = False  # called under no_grad, the program turned gradients on
        self.again = False  # what is emitted may be differentiated once more
        self.by_base = False  # views show what their base holds, also to whoever wrote through them
        self.randomness = "different"  # where a batch is made: do the examples share what is drawn
        self.hooked: list[tuple[Value, Value]] = []  # tensors whose gradient a hook changes, before and behind it
        self.data_taken: list[Value] = []  # tensors whose `.data` the program took
        self.wanted: dict[str, str] = {}  # names that became free, by what they begin with
        self._names: dict[str, int] = {}

    @classmethod
    def over(cls, trace: Trace, mode: FakeTensorMode | None = None) -> Builder:
        """A builder that goes on where a trace begins: its inputs, constants, symbols and names, without equations."""
        builder = cls(trace.name, mode or mode_of(trace))
        builder.inputs.extend(trace.inputs)
        builder.constants.update(trace.constants)
        builder.symbols.update(trace.symbols)
        builder.reserve(trace.values())
        return builder

    # --- names and values ---

    def fresh(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2` … where it is taken."""
        base = _COUNTED.sub("", identifier(hint)) or hint
        if base in self.wanted:
            return self.wanted.pop(base)
        while True:
            count = self._names.get(base, -1) + 1
            self._names[base] = count
            name = f"{base}_{count}" if count else base
            if not count or name not in self._names:
                self._names.setdefault(name, 0)
                return name

    def value(self, hint: str, type_: Type) -> Value:
        return Value(self.fresh(hint), type_)

    def input(self, hint: str, type_: Type) -> Value:
        name = identifier(hint)
        v = Value(name, type_) if name not in self._names else self.value(hint, type_)
        self._names.setdefault(name, 0)
        self.inputs.append(v)
        return v

    def adopt(self, v: Value) -> Value:
        """Take over a value of another trace under its own name, as an input."""
        self.reserve([v])
        self.inputs.append(v)
        return v

    def reserve(self, values: Iterable[Value]) -> None:
        for v in values:
            self._names.setdefault(v.name, 0)

    def constant(self, hint: str, tensor: torch.Tensor, type_: Type) -> Value:
        v = self.value(hint, type_)
        self.constants[v] = tensor
        return v

    @contextmanager
    def in_place_of(self, values: list[Value]) -> Iterator[None]:
        """What is emitted inside takes the place of these values: like results get their names."""
        self.wanted = {_COUNTED.sub("", v.name): v.name for v in values}
        try:
            yield
        finally:
            self.wanted = {}

    # --- equations ---

    def append(self, eqn: Equation) -> None:
        """Take over a finished equation; its results keep their names."""
        self.reserve(eqn.results())
        self.equations.append(eqn)

    def record(self, op: Operator, args: tuple, kwargs: dict, types: object, hint: str = "") -> object:
        """Add an equation whose result types are known. Gives a Value, or a list of Values and Nones."""
        name = hint or (op.name if isinstance(op, Special) else op_name(op)).strip("_")
        many = fake.is_many(types)
        listed = types if isinstance(types, list) else [] if types is None else [types]
        outputs = tuple(None if t is None else self.value(name, t) for t in listed)  # type: ignore[arg-type]
        self.equations.append(Equation(op, args, kwargs, outputs, many, self.source, self.tags))
        if many:
            return list(outputs)
        return outputs[0] if outputs else None

    def emit(self, op: Operator, *args: Arg, **kwargs: Arg) -> object:
        """Add an equation, inferring the types of its results."""
        if isinstance(op, OpOverload):
            args, kwargs = normalise(op, args, kwargs)
        return self.record(op, args, kwargs, fake.infer(op, args, kwargs, self.mode))

    def call(self, name: str, *args: Arg, **kwargs: Arg) -> object:
        return self.call_packet(getattr(torch.ops.aten, name), args, kwargs)

    def call_packet(self, packet: OpOverloadPacket, args: tuple, kwargs: dict) -> object:
        overload = resolve(packet, args, kwargs)
        if overload is None:
            raise RuleError(f"no overload of {packet} takes {args} {kwargs}; it has {packet.overloads()}")
        return self.emit(overload, *args, **kwargs)

    def inline(self, trace: Trace, args: Sequence[Arg], here: bool = False) -> list[Arg]:
        """Replay a trace's equations on other arguments; gives its outputs."""
        env: dict[Value, Arg] = dict(zip(trace.inputs, args, strict=True))
        self.share_constants(trace)
        self.replay(trace.equations, env, here)
        return [substitute(o, env) for o in trace.outputs]

    def share_constants(self, trace: Trace) -> None:
        self.constants.update(trace.constants)
        self.reserve(trace.constants)

    def replay(self, equations: Iterable[Equation], env: dict[Value, Arg], here: bool = False) -> None:
        """Add equations over what `env` has for their values, under fresh names, which `env` then has too. `here`: they
        come from where the builder is now, with its tags."""
        for eqn in equations:
            outputs = tuple(None if v is None else self.value(v.name, v.type) for v in eqn.outputs)
            replayed = eqn.over(env, outputs)
            self.equations.append(replayed.with_(source=self.source, tags=self.tags) if here else replayed)
            env.update({old: new for old, new in zip(eqn.outputs, outputs, strict=True) if old is not None})  # type: ignore[misc]

    # --- state ---

    @contextmanager
    def at(self, eqn: Equation, note: str = "") -> Iterator[None]:
        """What is emitted inside comes from where `eqn` came from."""
        before = self.source, self.tags
        source = eqn.source
        self.source = Source(source.file, source.line, source.module, note) if note else source
        self.tags = without_recompute(eqn.tags) if note else eqn.tags  # what is made of it need not run again too
        try:
            yield
        finally:
            self.source, self.tags = before

    def __enter__(self) -> Builder:
        ACTIVE.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        ACTIVE.pop()

    def finish(self, outputs: list[Arg] | tuple[Arg, ...], mutations: dict[Value, Value] | None = None) -> Trace:
        for v in self.inputs:  # a symbolic input number binds its own symbol
            if isinstance(v.type, ScalarType):
                self.symbols.setdefault(v.name, (v, None))
        return Trace(
            self.name,
            tuple(self.inputs),
            tuple(self.equations),
            tuple(outputs),
            dict(mutations or {}),
            dict(self.constants),
            dict(self.symbols),
        )


def emit(op: Operator, *args: Arg, **kwargs: Arg) -> Any:
    """Add an equation to the innermost builder; gives its results."""
    return ACTIVE[-1].emit(op, *args, **kwargs)  # type: ignore[attr-defined]


class _Operators:
    """`aten.sin(x)` over Values adds an equation to the innermost builder."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str):  # noqa: ANN204
        packet = getattr(getattr(torch.ops, self._namespace), name)

        def call(*args: Arg, **kwargs: Arg):  # noqa: ANN202
            return ACTIVE[-1].call_packet(packet, args, kwargs)  # type: ignore[attr-defined]

        call.__name__ = name
        setattr(self, name, call)
        return call


aten = _Operators("aten")
