"""Checks that a Trace keeps its own rules.

In: a Trace. Out: nothing, or a `VerifyError` that shows the equations around the fault. The rules: every
value is defined once and before it is used; names are unique identifiers; every symbolic size is bound before
an equation mentions it; outputs and mutations are defined; the type of every result is the one PyTorch's own
meta kernels give (dtype, shape, device, strides); a value that lies on a mesh has the sizes that one rank has there;
sub-traces keep the same rules.
"""

from __future__ import annotations

import keyword
from contextlib import ExitStack

from tessera.ir import fake, printer
from tessera.ir.call import is_call
from tessera.ir.equation import Arg, Equation, Special, Value, symbols_in, values_in
from tessera.ir.mesh import Mesh
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, Type, size_key
from tessera.torch_internals import shapes
from tessera.torch_internals.fake import DataDependentOutputException, FakeTensorMode
from tessera.torch_internals.operators import aten_name
from tessera.util.errors import VerifyError
from tessera.util.names import names

AROUND = 5  # equations shown before and after a fault

# Their result's strides are not promised by anyone: they depend on the kernel that is chosen.
LAYOUT_FREE = names("empty empty_like new_empty _to_copy scaled_dot_product_attention convolution conv2d")
# Beside its result it gives what its backward reads, whose sizes depend on whether the table wants gradients.
FIRST_RESULT_ONLY = names("embedding_bag")


def verify(trace: Trace, types: bool = True) -> Trace:
    """Give the trace back if it keeps the rules. `types` also infers every result's type again."""
    _Verifier(trace, set(), types).run()
    return trace


class _Verifier:
    def __init__(self, trace: Trace, symbols: set[str], types: bool) -> None:
        self.trace, self.types = trace, types
        self.defined: set[Value] = set()
        self.names: set[str] = set()
        self.symbols = set(symbols)
        self.binds: dict[Value, list[str]] = {}
        for symbol, (v, _) in trace.symbols.items():
            self.binds.setdefault(v, []).append(symbol)
        self.mesh: Mesh | None = None  # on which its values lie
        self.at = -1  # the equation now looked at; -1 is the head, len(equations) the end

    def run(self) -> None:
        trace = self.trace
        for v in (*trace.inputs, *trace.constants):
            self.define(v)
        mode = mode_of(trace) if self.types else None
        with ExitStack() as stack:
            if mode is not None and mode.shape_env is not None:
                # looking must not leave traces: no guards, no run-time sizes waiting to be bound
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            for self.at, eqn in enumerate(trace.equations):
                self.equation(eqn, mode)
        self.at = len(trace.equations)
        self.finish()

    # --- the rules ---

    def define(self, v: Value) -> None:
        if v in self.defined:
            self.fail(f"{v.name} is defined twice")
        if v.name in self.names:
            self.fail(f"two values are called {v.name}")
        if not v.name.isidentifier() or keyword.iskeyword(v.name) or v.name in printer.RESERVED:
            self.fail(f"{v.name!r} is not a name a Python variable can have here")
        if isinstance(v.type, TensorType) and v.type.placement is not None:
            self.check_placement(v, v.type)
        self.defined.add(v)
        self.names.add(v.name)
        self.symbols.update(self.binds.get(v, ()))

    def check_placement(self, v: Value, type_: TensorType) -> None:
        placement = type_.placement
        assert placement is not None
        mesh = self.mesh or placement.mesh
        if placement.mesh != mesh:
            self.fail(f"{v.name} lies on the mesh {placement.mesh}, others on {mesh}")
        self.mesh = mesh
        if len(placement.shape) != type_.ndim or not _same_sizes(type_.shape, placement.local_shape):
            local = ", ".join(map(str, placement.local_shape))
            self.fail(f"{v.name} is {list(type_.shape)} on a rank; placed as {placement} on {mesh} that is [{local}]")

    def used(self, tree: Arg, what: str) -> None:
        for v in values_in(tree):
            if v not in self.defined:
                other = " (another value of that name is)" if v.name in self.names else ""
                self.fail(f"{what} {v.name}, which is not defined before it{other}")
        unbound = symbols_in(tree) - self.symbols
        if unbound:
            self.fail(f"{what} the size {', '.join(sorted(unbound))}, which no input or result before it binds")

    def equation(self, eqn: Equation, mode: FakeTensorMode | None) -> None:
        self.used((eqn.args, eqn.kwargs), f"{eqn.op} reads")
        subs = [a for a in (*eqn.args, *eqn.kwargs.values()) if isinstance(a, Trace)]
        for sub in subs:
            _Verifier(sub, self.symbols, self.types).run()
        if is_call(eqn):
            self.check_call(eqn)
        if not eqn.many and len(eqn.outputs) > 1:
            self.fail(f"{eqn.op} gives {len(eqn.outputs)} results but is not marked as giving a sequence")
        if mode is not None and not subs and _inferable(eqn):
            self.check_types(eqn, mode)
        for v in eqn.results():
            self.define(v)

    def check_call(self, eqn: Equation) -> None:
        """The operands are what the body takes, the results what it gives."""
        body, *operands = eqn.args
        assert isinstance(body, Trace)
        for what, mine, theirs in (("operands", operands, body.inputs), ("results", eqn.outputs, body.outputs)):
            if len(mine) != len(theirs):
                self.fail(f"{body.name} has {len(theirs)} {what}, the equation {len(mine)}")
            for a, b in zip(mine, theirs, strict=True):
                if isinstance(a, Value) and isinstance(b, Value) and not same_type(a.type, b.type):
                    self.fail(f"{a.name} is {_full(a.type)}; among the {what} of {body.name} it is {_full(b.type)}")

    def check_types(self, eqn: Equation, mode: FakeTensorMode) -> None:
        try:
            inferred = fake.infer(eqn.op, eqn.args, eqn.kwargs, mode)
        except (shapes.GuardOnDataDependentSymNode, DataDependentOutputException):  # the run knows
            return
        except Exception as error:
            self.fail(f"{eqn.op} does not take these arguments ({type(error).__name__}: {error})")
        if isinstance(inferred, list) != eqn.many:
            what = "a sequence" if isinstance(inferred, list) else "one result"
            self.fail(f"{eqn.op} gives {what}; the equation says otherwise")
        types = inferred if isinstance(inferred, list) else [] if inferred is None else [inferred]
        if len(types) != len(eqn.outputs):
            self.fail(f"{eqn.op} gives {len(types)} results, the equation names {len(eqn.outputs)}")
        name = aten_name(eqn.op)
        layout, checked = name not in LAYOUT_FREE, 1 if name in FIRST_RESULT_ONLY else None
        for v, type_ in zip(eqn.outputs[:checked], types[:checked], strict=True):
            if v is not None and not same_type(v.type, type_, layout):  # type: ignore[arg-type]
                self.fail(f"{v.name} is said to be {_full(v.type)}, but {eqn.op} gives {_full(type_)}")

    def finish(self) -> None:
        trace = self.trace
        self.used(trace.outputs, "the trace returns")
        for target, v in trace.mutations.items():
            if target not in trace.inputs:
                self.fail(f"{target.name} is mutated but is no input")
            self.used(v, f"the new contents of {target.name} are")
            if v.tensor.dtype != target.tensor.dtype or not _same_sizes(v.tensor.shape, target.tensor.shape):
                self.fail(f"{target.name} is {target.type}; it cannot hold {v}")
        for symbol, (v, dim) in trace.symbols.items():
            if v not in self.defined:
                self.fail(f"the size {symbol} is read off {v.name}, which is not defined")
            if dim is not None and dim >= v.ndim:
                self.fail(f"the size {symbol} is read off dimension {dim} of {v}")

    # --- the message ---

    def fail(self, message: str) -> None:
        trace = self.trace
        low, high = max(0, self.at - AROUND), min(len(trace.equations), self.at + AROUND + 1)
        lines = [] if low == 0 else ["      …"]
        for index in range(low, high):
            mark = "  >>> " if index == self.at else "      "
            lines.append(mark + printer.print_line(trace, trace.equations[index]))
        if high < len(trace.equations):
            lines.append("      …")
        else:
            names = ", ".join(v.name if isinstance(v, Value) else str(v) for v in trace.outputs)
            lines.append(("  >>> " if self.at == len(trace.equations) else "      ") + f"return ({names})")
        head = ", ".join(map(repr, trace.inputs))
        raise VerifyError(f"{trace.name}: {message}\n    def {trace.name}({head}):\n" + "\n".join(lines))


def _inferable(eqn: Equation) -> bool:
    """An executor's own callable need not run on fakes; a write for its effect alone names no result."""
    if not eqn.outputs and not isinstance(eqn.op, Special):
        return False
    return not isinstance(eqn.op, Special) or eqn.op.namespace in ("tessera", "dist")


def same_type(a: Type | None, b: Type | None, layout: bool = True) -> bool:
    """Equal types; strides count only where they tell one element from another."""
    if not isinstance(a, TensorType) or not isinstance(b, TensorType):
        return a is not None and b is not None and a.key() == b.key()
    if a.dtype != b.dtype or a.device != b.device or a.layout != b.layout or len(a.shape) != len(b.shape):
        return False
    if not _same_sizes(a.shape, b.shape):
        return False
    if not layout or any(type(s) is int and s == 0 for s in a.shape):
        return True
    return a.bits == b.bits and all(
        _same_size(p, q) for p, q, size in zip(a.stride, b.stride, a.shape, strict=False) if size_key(size) != 1
    )


def _same_sizes(a: tuple, b: tuple) -> bool:
    return len(a) == len(b) and all(map(_same_size, a, b))


def _same_size(a: object, b: object) -> bool:
    """Sizes known only at run time get a new symbol whenever they are inferred: those cannot be compared."""
    return size_key(a) == size_key(b) or any(s.startswith(("u", "zuf")) for s in symbols_in((a, b)))


def _full(t: object) -> str:
    if not isinstance(t, TensorType):
        return str(t)
    return f"{t} with strides {tuple(map(size_key, t.stride))} on {t.device}"
