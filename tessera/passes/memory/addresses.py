"""Views that only kernels read are addresses.

In: a final program. Out: the same, where kernels find what they read in the memory of other tensors, and write results
in the shape that whoever comes next reads, so that nobody makes a view for them. To a kernel a view is an address. To
the host it is a call of the library, and in programs with many of them (rows of a tensor, one after the other) these
took longer than all launches.

    row = aten.select(x, 0, 3)
    y, = tile.region(row)           -->    y, = tile.region(x)     which reads x from its third row on
    z = aten.reshape(y, [6, 4])            and gives z: [6, 4]

It is done for what runs; the stages that a person reads keep their views.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.kernel import Kernel, Operand
from tessera.ir.starts import has_known_sizes, starts
from tessera.ir.trace import Trace


def addresses(trace: Trace) -> Trace:
    """Hand kernels the tensors that views are made of."""
    kernels = {eqn: kernel for eqn in trace.equations if (kernel := _kernel(eqn)) is not None}
    return _Addresses(trace, kernels).run() if kernels else trace


class _Addresses:
    def __init__(self, trace: Trace, kernels: dict[Equation, Kernel]) -> None:
        self.trace, self.kernels, self.users = trace, kernels, trace.users()
        self.wanted = {*trace.results(), *(v for v, _ in trace.symbols.values())}
        self.parts: dict[Value, tuple[Value, int]] = {}  # view -> what it is a part of, and where it begins
        self.spared: set[Equation] = set()  # views that nobody makes
        self.renamed: dict[Value, Value] = {}  # result of a kernel -> the view of it that takes its place
        self.told: dict[tuple, Special] = {}  # kernels that know where their operands lie

    def run(self) -> Trace:
        for eqn in self.trace.equations:
            for v, start in zip(eqn.results(), starts(eqn), strict=False):
                self.parts[v] = (eqn.inputs()[0], start)
        for eqn in reversed(self.trace.equations):
            if eqn.results()[:1] and eqn.results()[0] in self.parts and all(map(self.is_address, eqn.results())):
                self.spared.add(eqn)
        for eqn in self.kernels:
            for v in eqn.results():
                self.reshape(v)
        if not self.spared:
            return self.trace
        equations = [self.read(eqn) for eqn in self.trace.equations if eqn not in self.spared]
        return self.trace.with_(equations=tuple(equations))

    def is_address(self, v: Value) -> bool:
        """Do only kernels read it, or views that are not made either?"""
        return v not in self.wanted and all(map(self.by_address, self.users.get(v, ())))

    def by_address(self, eqn: Equation) -> bool:
        return eqn in self.spared or eqn in self.kernels

    def reshape(self, v: Value) -> None:
        """Give a kernel's result the one shape in which others read it."""
        others = [eqn for eqn in self.users.get(v, ()) if not self.by_address(eqn)]
        if v in self.wanted or len(others) != 1 or len(others[0].outputs) != 1:
            return
        view = others[0].outputs[0]
        if view is None or self.parts.get(view) != (v, 0):
            return
        if v.tensor.is_row_major and view.tensor.is_row_major and v.numel() == view.numel():
            self.renamed[v] = view
            self.spared.add(others[0])

    def origin(self, v: Value) -> tuple[Value, int]:
        """The tensor in whose memory a value lies, and where it begins there."""
        start = 0
        while v in self.parts and self.is_address(v):
            v, step = self.parts[v]
            start += step
        return self.renamed.get(v, v), start

    def read(self, eqn: Equation) -> Equation:
        """The equation over what is there."""
        kernel = self.kernels.get(eqn)
        if kernel is None:
            return eqn if self.renamed.keys().isdisjoint(eqn.inputs()) else eqn.substitute(self.renamed)
        assert isinstance(eqn.op, Special) and kernel.reading is not None and eqn.op.recipe is not None
        origins = [self.origin(v) for v in eqn.inputs()]
        number = {v: i for i, v in enumerate(dict.fromkeys(v for v, _ in origins))}
        operands = tuple(Operand(number[v], v.type, start) for v, start in origins)
        results = [self.renamed.get(v, v) for v in eqn.results()]
        over = dict(eqn.op.recipe.over)
        given = [k for k in range(len(eqn.op.recipe.body.outputs)) if k not in over]
        changed = zip(given, eqn.results(), results, strict=True)
        shapes = {k: new.tensor for k, old, new in changed if old is not new}
        if all(v is old and not start for (v, start), old in zip(origins, eqn.args, strict=True)) and not shapes:
            return eqn
        key = (kernel, operands, tuple(shapes.items()))
        if key not in self.told:
            there = kernel.reading(operands, shapes)
            self.told[key] = replace(eqn.op, fn=there.run, kernel=there)
        return eqn.with_(op=self.told[key], args=tuple(number), outputs=tuple(results))


def _kernel(eqn: Equation) -> Kernel | None:
    """The kernel of a region that can be told where its operands lie."""
    op = eqn.op
    if not isinstance(op, Special) or op.kernel is None or op.kernel.reading is None or op.recipe is None:
        return None
    plain = not eqn.kwargs and all(isinstance(a, Value) and has_known_sizes(a) for a in (*eqn.args, *eqn.outputs))
    return op.kernel if plain and len(eqn.args) == len(op.recipe.body.inputs) else None
