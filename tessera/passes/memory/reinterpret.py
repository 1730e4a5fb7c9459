"""Chains of views that the library reads are one cheap call.

In: a final program. Out: the same, where a view of a view of what a kernel or a product gave is made at once, from its
sizes, strides and start. Every view is a call through PyTorch's dispatcher; between the products of an attention layer
stand some twenty of them, and on a fast device the host spends more time there than on launches. Naming the layout
outright skips the dispatcher, as TorchInductor does.

    h = aten.linear(x, w)
    a = aten.view(h, [50, 4, 64])          -->    h = aten.linear(x, w)
    q = aten.transpose(a, 0, 1)                   q = tessera.reinterpret(h, (4, 50, 64), (64, 256, 1), 0)

Only what nobody writes and nobody outside sees is made so, since such a view counts no versions with its base; and only
of what certainly lies as its type says. It is done for what runs; the stages that a person reads keep their views.
"""

from __future__ import annotations

from torch import Tensor

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.schema import schema_of
from tessera.ir.starts import has_known_sizes, starts
from tessera.ir.strides import LAID_OUT
from tessera.ir.trace import Trace
from tessera.ir.views import UNANNOTATED
from tessera.torch_internals.operators import OpOverload, op_name, reinterpret_tensor
from tessera.util.names import names


def _view(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Tensor:
    if type(x) is Tensor:
        return reinterpret_tensor(x, shape, stride, start)
    return x.as_strided(shape, stride, int(x.storage_offset()) + start)


REINTERPRET = Special("reinterpret", _view)
# The library writes the results of these row by row, whatever the device.
ROW_BY_ROW = names("mm addmm bmm baddbmm linear clone contiguous")


def reinterpret(trace: Trace) -> Trace:
    """Make views of views at once."""
    return _Views(trace).run()


class _Views:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.users = trace, trace.users()
        self.seen = {*trace.results(), *(v for v, _ in trace.symbols.values())}
        self.parts: dict[Value, tuple[Value, int]] = {}  # view -> what it is a part of, and where it begins
        self.certain: set[Value] = set()  # tensors that lie as their types say
        self.inner: set[Equation] = set()  # views that nobody writes, nor sees outside
        self.direct: set[Value] = set()  # views that are made of the tensor in whose memory they lie

    def run(self) -> Trace:
        for eqn in self.trace.equations:
            self.look_at(eqn)
        for eqn in reversed(self.trace.equations):
            results = eqn.results()
            if results and results[0] in self.parts and all(map(self.is_inner, results)):
                self.inner.add(eqn)
                if len(results) == 1 and not eqn.many and results[0] in self.certain:
                    self.direct.add(results[0])
        if not self.direct:
            return self.trace
        equations: list[Equation] = []
        same: dict[Value, Value] = {}  # views that are their base again
        for eqn in self.trace.equations:
            if self.direct.isdisjoint(eqn.results()):
                equations.append(eqn if same.keys().isdisjoint(eqn.inputs()) else eqn.substitute(same))
            elif any(self.direct.isdisjoint(reader.results()) for reader in self.users.get(eqn.out, ())):
                base, start = self.base(eqn.out)
                view, there = eqn.out.tensor, base.tensor
                if start == 0 and (view.shape, view.stride) == (there.shape, there.stride):
                    same[eqn.out] = base
                else:
                    args = (base, tuple(view.shape), tuple(view.stride), start)
                    equations.append(eqn.with_(op=REINTERPRET, args=args, kwargs={}))
        return self.trace.with_(equations=tuple(equations))

    def look_at(self, eqn: Equation) -> None:
        begins = starts(eqn)
        for v, start in zip(eqn.results(), begins, strict=False):
            base = eqn.inputs()[0]
            self.parts[v] = base, start
            if base in self.certain:
                self.certain.add(v)
        if eqn.op is LAID_OUT:
            self.certain.update(filter(has_known_sizes, eqn.results()))
        elif not begins and (_is_kernel(eqn) or isinstance(eqn.op, OpOverload) and eqn.opname in ROW_BY_ROW):
            self.certain.update(v for v in eqn.results() if has_known_sizes(v) and v.tensor.is_row_major)

    def is_inner(self, v: Value) -> bool:
        return v not in self.seen and not v.dtype.is_complex and all(map(self.only_reads, self.users.get(v, ())))

    def only_reads(self, eqn: Equation) -> bool:
        if eqn in self.inner:
            return True
        op = eqn.op.of if isinstance(eqn.op, Special) and eqn.op.of is not None else eqn.op
        if isinstance(op, OpOverload):
            schema = schema_of(op)
            shows = schema.is_view or op_name(op) in UNANNOTATED
            return not schema.mutated and (not shows or all(map(self.is_inner, eqn.results())))
        return _is_kernel(eqn) and not (eqn.op.recipe and eqn.op.recipe.over)  # type: ignore[union-attr]

    def base(self, v: Value) -> tuple[Value, int]:
        """The tensor in whose memory a view lies, and where it begins there."""
        start = 0
        while v in self.direct:
            v, step = self.parts[v]
            start += step
        return v, start


def _is_kernel(eqn: Equation) -> bool:
    return isinstance(eqn.op, Special) and eqn.op.kernel is not None
