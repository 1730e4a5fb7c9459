"""A Trace as ONNX nodes.

In: a cleaned, functional Trace, and the names and contents of the inputs that are weights. Out: a `Graph`. Each
equation is written by its form; one that has none is taken apart, and its parts are written; what still has none is an
error that names the operator and the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import tessera.exporters.onnx.forms.all  # noqa: F401  (declares them)
from tessera.exporters.onnx.decompose import Decompositions
from tessera.exporters.onnx.errors import ExportError, NoForm
from tessera.exporters.onnx.graph import Graph, Ref, as_real
from tessera.exporters.onnx.patterns.whole import whole_operators
from tessera.exporters.onnx.registry import forms_of
from tessera.exporters.onnx.sizes import Numbers
from tessera.exporters.onnx.specials import special
from tessera.ir.equation import Arg, Equation, Special, Value, map_values
from tessera.ir.schema import draws
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.torch_internals.fake import FakeTensorMode

_CLAIMS = ("_assert", "sym_constrain")  # what a program says of itself; nothing of it is computed
DEPTH = 8  # how often parts are taken apart themselves


class Lowering:
    def __init__(self, g: Graph, trace: Trace, mode: FakeTensorMode, outer: Lowering | None = None) -> None:
        self.g, self.trace = g, trace
        self.env: dict[Value, Ref] = {}
        self.outer = outer
        self.symbols = dict(trace.symbols) if outer is None else {}
        self.decompositions = Decompositions(mode) if outer is None else outer.decompositions
        self.mode = mode
        g.compute = Numbers(g, self.symbol)
        g.transposed = self.transposed
        self.weights: dict[str, torch.Tensor] = {} if outer is None else outer.weights
        self.readers: dict[str, int] = {} if outer is None else outer.readers
        self.read: set[Value] = read_values(trace)
        self.whole = whole_operators(trace, g.opset) if outer is None else {}

    def run(self) -> list[Ref | object]:
        """Write all equations; gives what the trace gives."""
        for v, data in self.trace.constants.items():
            self.env[v] = self.g.tensor(data, v.name)
        for eqn in self.trace.equations:
            self.equation(eqn, DEPTH)
        return [self.env[o] if isinstance(o, Value) else o for o in self.trace.outputs]

    def inside(self) -> Lowering:
        """Writes a graph inside a node of this one."""
        return Lowering(Graph(self.g.opset, self.g), self.trace, self.mode, self)

    def within(self, body: Trace, given: Sequence[Ref]) -> list[Any]:
        """Write the equations of a body here, over these values; gives what the body gives."""
        self.enter(body, given)
        source = self.g.source
        for eqn in body.equations:
            self.equation(eqn if str(eqn.source) else eqn.with_(source=source), DEPTH)
        self.g.source = source
        return [self.refs(o) for o in body.outputs]

    def enter(self, body: Trace, given: Iterable[Ref]) -> None:
        self.env.update(zip(body.inputs, given, strict=True))
        self.whole |= whole_operators(body, self.g.opset)
        for v, data in body.constants.items():
            self.env[v] = self.g.tensor(data, v.name)
        for name, place in body.symbols.items():
            self.symbols.setdefault(name, place)
        self.read |= read_values(body)

    def weight(self, v: Value, name: str, data: torch.Tensor) -> Ref:
        """A parameter or buffer, which the file holds."""
        name = self.g.fresh(name)
        self.g.initializers[name] = self.weights[name] = as_real(data.detach())
        return Ref(name, data.dtype, v.tensor.shape)

    def transposed(self, x: Ref) -> Ref:
        """A matrix turned. One of the file's that nothing else reads is held turned."""
        assert x.shape is not None
        shape = x.shape[::-1]
        if self.weights.get(x.name) is not None and self.readers.get(x.name) == 1:
            name = f"{x.name}.T"
            if name not in self.g.initializers:
                self.g.initializers[self.g.fresh(name)] = self.weights[x.name].detach().t()
            return Ref(name, x.dtype, shape)
        return self.g.op("Transpose", x, perm=[1, 0], shape=shape)

    def symbol(self, name: str) -> Ref:
        """A symbol of the sizes, as one element."""
        if name not in self.symbols:
            if self.outer is not None:
                return self.outer.symbol(name)
            raise ExportError(f"the program does not say where the size {name} comes from")
        value, dim = self.symbols[name]
        x = self.env[value]
        if dim is None:
            return self.g.one(x)
        return self.g.op("Shape", x, start=dim, end=dim + 1, dtype=torch.int64, shape=(1,))

    # --- equations ---

    def equation(self, eqn: Equation, depth: int) -> None:
        g = self.g
        g.source = eqn.source
        if isinstance(eqn.op, Special):
            out = special(self, eqn)
            if out is None:
                self.decompose(eqn, depth)
            else:
                self.bind(eqn, out)
            return
        if eqn.opname.startswith(_CLAIMS):
            return
        random = draws(eqn.op, eqn.args, eqn.kwargs)
        if random and self.read.isdisjoint(eqn.outputs):
            return
        types = [v.type if v is not None and isinstance(v.type, TensorType) else None for v in eqn.outputs]
        g.results = [t if v in self.read else None for v, t in zip(eqn.outputs, types, strict=True)]
        g.result = next((t for t in types if t is not None), None)  # type: ignore[assignment]
        if types and all(map(_is_empty, types)):
            self.bind(eqn, [g.tensor(torch.zeros(t.shape, dtype=t.dtype)) for t in types if t is not None])
            return  # runtimes differ in what they make of nothing
        if eqn in self.whole and not random and (out := self.tried(lambda: self.whole[eqn](self))) is not None:
            self.bind(eqn, out)
            return
        positional, keyword = eqn.bound()
        args, kwargs = self.refs(positional), self.refs(keyword)
        for fn in forms_of(eqn.op, g.opset, any(map(_is_complex, (*eqn.inputs(), *eqn.outputs))), random):
            out = self.tried(lambda fn=fn: fn(g, *args, **kwargs))  # type: ignore[misc]
            if out is not None:
                self.bind(eqn, out)
                return
        self.decompose(eqn, depth)

    def tried(self, write: Callable[[], Any]) -> Any:
        """What a form gives; None where it does not hold, and nothing of it stays."""
        before = self.g.written()
        try:
            return write()
        except NoForm:
            self.g.forget(before)
            return None

    def refs(self, tree: Arg) -> Arg:
        return map_values(tree, self.env.__getitem__)

    def decompose(self, eqn: Equation, depth: int) -> None:
        """Write an equation as the equations that it is made of."""
        parts = self.decompositions.of(eqn) if depth else None
        if parts is None:
            raise ExportError(f"ONNX has no form for {eqn.op}: {where(eqn)}")
        self.enter(parts, [self.env[v] for v in dict.fromkeys(eqn.inputs())])
        for part in parts.equations:
            self.equation(part.with_(source=eqn.source), depth - 1)
        self.g.source = eqn.source
        self.bind(eqn, [self.refs(o) for o in parts.outputs])

    def bind(self, eqn: Equation, out: object) -> None:
        """The results of an equation, of the dtypes and shapes that it says."""
        refs = list(out) if isinstance(out, (list, tuple)) else [out]
        for v, ref in zip(eqn.outputs, refs, strict=False):
            if v is None:
                continue
            if not isinstance(ref, Ref):
                if ref is None or not isinstance(v.type, TensorType):
                    self.env[v] = ref  # type: ignore[assignment]
                    continue
                ref = self.g.scalar(ref, v.dtype)
            if isinstance(v.type, TensorType):
                ref = ref if v.dtype.is_complex else self.g.cast(ref, v.dtype)
                ref = Ref(ref.name, v.dtype, v.type.shape)
            self.env[v] = ref


def _is_empty(t: TensorType | None) -> bool:
    if t is None or t.dtype.is_complex:
        return False
    return all(isinstance(n, int) for n in t.shape) and 0 in t.shape


def _is_complex(v: Value | None) -> bool:
    return v is not None and isinstance(v.type, TensorType) and v.type.dtype.is_complex


def where(eqn: Equation) -> str:
    return f"called at {eqn.source}" if str(eqn.source) else "at an unknown line"


def read_values(trace: Trace) -> set[Value]:
    """What equations read, or the program gives."""
    return (
        {v for eqn in trace.equations for v in eqn.inputs()}
        | {*trace.results()}
        | {v for v, _ in trace.symbols.values()}
    )


def count_readers(trace: Trace, names: Mapping[Value, str]) -> dict[str, int]:
    """How many equations read each weight."""
    counts: dict[str, int] = {}
    for eqn in trace.equations:
        for v in dict.fromkeys(eqn.inputs()):
            if v in names:
                counts[names[v]] = counts.get(names[v], 0) + 1
    for v in trace.results():
        if v in names:
            counts[names[v]] = counts.get(names[v], 0) + 1
    return counts
