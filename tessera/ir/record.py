"""Records what a PyTorch program does, as equations.

In: any callable over tensors. Out: a functional Trace over ATen operators. The program runs once on fake
tensors under a dispatch mode that stands below autocast and above autograd, so operators arrive whole
(`aten.linear`, not a transpose and an addmm). Composite operators outside `keep` are taken one level apart.
Tensors the program closes over become constants. Views and writes are made functional by `alias`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tessera.ir import fake, literals
from tessera.ir.alias import Ref, Root, View
from tessera.ir.builder import Builder
from tessera.ir.decided import decided
from tessera.ir.equation import NO_GRAD, NO_TANGENT, Arg, Source, Special, Value
from tessera.ir.layouts import laid_as
from tessera.ir.schema import (
    DROPOUTS,
    draws,
    is_composite,
    is_view,
    normalise,
    schema_of,
    touches_tensors,
)
from tessera.ir.strided import record_strided
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, Symbolic, Type, size_key, symbol_of, type_of
from tessera.ir.views import STRIDED
from tessera.ir.writing import (
    RUNNING_STATISTICS,
    SHAPE_CHANGES,
    VIEW_CHANGES,
    alias_of,
    record_statistics,
    record_view_change,
    record_write,
)
from tessera.torch_internals import pytree
from tessera.torch_internals.autograd import is_fwd_grad_enabled
from tessera.torch_internals.dispatch import TorchDispatchMode, disable_current_modes, is_traceable_wrapper_subclass
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.memory import storage_id
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.errors import CaptureError
from tessera.util.files import PACKAGE
from tessera.util.stack import Stack

Keep = Callable[[OpOverload], bool]

# Questions about a tensor, not operations on it.
_QUERIES = (
    "prim::",
    "aten::is_",
    "aten::sym_",
    "aten::size",
    "aten::stride",
    "aten::storage_offset",
    "aten::numel",
    "aten::dim",
)
# Questions about what it holds.
_aten = torch.ops.aten
_ASKS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.item.default, _aten.equal.default)
_recording: Stack[Recorder] = Stack()


def recording() -> Recorder | None:
    """The recorder whose program is running now, if any."""
    return _recording[-1] if _recording else None


def recorder_of(builder: Builder) -> Recorder | None:
    """The recorder at work, maybe around others, that writes to this builder."""
    return next((r for r in reversed(_recording.items) if r.builder is builder), None)


class Recorder(TorchDispatchMode):
    def __init__(self, builder: Builder, keep: Keep, locate: bool = True) -> None:
        super().__init__()
        self.builder, self.keep, self.locate = builder, keep, locate
        self.bodies: dict[object, Any] = {}  # sub-traces recorded on the way, that another call may use again
        self.refs: dict[int, Ref] = {}
        self.base_grad = torch.is_grad_enabled()
        self.base_tangent = is_fwd_grad_enabled()
        self.extra_tags: frozenset[str] = frozenset()  # put on every equation recorded now
        self.alive: list[torch.Tensor] = []  # an id names a tensor only while it lives
        self.symbolic = False  # some size is a symbol

    # --- tensors and their values ---

    def input(self, name: str, tensor: torch.Tensor) -> Value:
        v = self.builder.input(name, type_of(tensor))
        self.refs[id(tensor)] = Ref(tensor, v, Root(), given=True)
        return v

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The Ref of a tensor; one never seen before was closed over and becomes a constant."""
        ref = self.refs.get(id(tensor))
        if ref is None:
            v = self.builder.constant("const", tensor, type_of(tensor))
            ref = self.refs[id(tensor)] = Ref(tensor, v, Root(), given=True)
        return ref

    def value(self, tensor: torch.Tensor) -> Value:
        return self.ref(tensor).read(self.builder)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Real tensors met on the way (closed over, literals) take part as fake ones."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.builder.mode:
            return tensor
        if is_traceable_wrapper_subclass(tensor):
            raise CaptureError(f"tensor subclass {type(tensor).__name__} is not captured; it runs through its own code")
        known = self.refs.get(id(tensor))
        if known is not None and known.tensor is not tensor:
            return known.tensor
        fake_tensor = self.builder.mode.from_tensor(
            tensor.detach() if tensor.requires_grad else tensor, static_shapes=True
        )
        v = self.builder.constant("const", tensor, type_of(fake_tensor))
        ref = Ref(fake_tensor, v, Root(), given=True)
        self.refs[id(fake_tensor)] = ref
        self.refs[id(tensor)] = ref
        self.alive.append(tensor)
        return fake_tensor

    def lower(self, tree: object) -> Arg:
        """Arguments as the trace sees them: tensors become Values."""
        return pytree.tree_map_only(torch.Tensor, self.value, tree)

    # --- the dispatch mode ---

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func in _ASKS:
            with self.knowing(args):
                return self.dispatch(func, args, kwargs or {})
        return self.dispatch(func, args, kwargs or {})

    @contextmanager
    def knowing(self, asked: tuple) -> Iterator[None]:
        """While a program asks what tensors hold, those that no argument decides are known. Not longer: a write to them
        would not reach what is remembered here."""
        unknown = [x for x in asked if isinstance(x, FakeTensor) and x.constant is None]
        try:
            for x in unknown:
                x.constant = decided(self.builder, self.value(x))
            yield
        finally:
            for x in unknown:
                x.constant = None

    def dispatch(self, func: Any, args: tuple, kwargs: dict) -> object:
        name = func.name() if isinstance(func, OpOverload) else str(func)
        if name.startswith(_QUERIES) or (isinstance(func, OpOverload) and not touches_tensors(func)):
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self.literal(args[0])
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs))
        if op_name(func) in DROPOUTS and (_has_none(args[0]) or not draws(func, args, kwargs)):
            return args[0]  # as eager does: the argument itself, not a copy
        unwanted = not self.keep(func) and op_name(func) not in RUNNING_STATISTICS
        if is_composite(func) and (unwanted or _may_be_a_view(func, args)):
            with self:
                return func.decompose(*args, **kwargs)
        if self.locate:
            self.builder.source = user_line()
        self.builder.tags = self.tags()
        return self.operator(func, args, kwargs)

    def tags(self) -> frozenset[str]:
        tags = self.extra_tags
        if self.base_grad != torch.is_grad_enabled():
            if self.base_grad:
                tags = tags | {NO_GRAD}
            else:
                self.builder.enables_grad = True
        if self.base_tangent and not is_fwd_grad_enabled():
            tags = tags | {NO_TANGENT}
        return tags

    def special(
        self,
        op: Special,
        args: tuple,
        kwargs: dict,
        types: list[Type],
        many: bool = True,
        tags: frozenset[str] | None = None,
    ) -> list[torch.Tensor]:
        """An operator of Tessera's own, whose result types are known, as one equation."""
        if self.locate:
            self.builder.source = user_line()
        self.builder.tags = self.tags() if tags is None else tags
        with fake.alone():  # this is called by the program itself, under this very mode
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.fake, (args, kwargs))
            results = self.builder.record(op, *self.lower((args, kwargs)), list(types) if many else types[0])  # type: ignore[misc]
            outs = [fake.fake_of(t, self.builder.mode) for t in types]  # type: ignore[arg-type]
        for tensor, v in zip(outs, results if many else [results], strict=True):  # type: ignore[call-overload,arg-type]
            self.refs[id(tensor)] = Ref(tensor, v, Root())
        return outs  # type: ignore[return-value]

    def literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor written in the program itself is new on every call."""
        constant = self.fake(tensor)
        v = self.builder.emit(torch.ops.aten.lift_fresh_copy.default, self.value(constant))
        out = constant.clone()
        with disable_current_modes():
            literals.hold(out, tensor.clone())
        self.refs[id(out)] = Ref(out, v, Root())  # type: ignore[arg-type]
        return out

    def operator(self, func: OpOverload, args: tuple, kwargs: dict) -> object:
        schema = schema_of(func)
        name = op_name(func)
        if name in SHAPE_CHANGES:
            raise CaptureError(f"{func} changes a tensor's own storage, which no program can follow")
        if name in RUNNING_STATISTICS:
            return record_statistics(self, func, args, kwargs)
        if name in STRIDED:
            return record_strided(self, func, args, kwargs)
        if name in VIEW_CHANGES:
            return record_view_change(self, func, args, kwargs)
        if schema.mutated:
            return record_write(self, func, args, kwargs)
        out = self.outcome(func, args, kwargs)
        # Forward mode's zeros have no memory, and nothing may be written to them: a program has plain ones.
        plain = torch.ops.aten.zeros.default if name == "_efficientzerotensor" else func
        return self.pure(plain, args, kwargs, out)

    def outcome(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """What an operator gives on fake tensors."""
        with fake.symbolic_rules(self.symbolic):
            return literals.call(fake.rule_of(func), func, args, kwargs)[0]

    def pure(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> object:
        """An operator that writes nothing: one equation, and views noted."""
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if isinstance(out, torch.Tensor) and id(out) in self.refs:
            return out  # the operator had nothing to do and gave its argument back
        if (
            not leaves
            and not isinstance(out, (torch.SymInt, torch.SymFloat, torch.SymBool))
            and schema_of(func).returns
        ):
            return out  # a plain Python answer, such as a device
        if any(id(t) in self.refs for t in leaves):
            out = pytree.tree_map_only(torch.Tensor, lambda t: alias_of(t) if id(t) in self.refs else t, out)
        eqn_args, eqn_kwargs = normalise(func, *self.lower((args, kwargs)))  # type: ignore[misc]
        types = fake.types_of(out)
        if is_view(func) and not _lies_as(args[0], eqn_args[0]):
            # What was written to a tensor with gaps lies without them, and so does a view of it.
            types = fake.infer(func, eqn_args, eqn_kwargs, self.builder.mode)
        results = self.builder.record(func, eqn_args, eqn_kwargs, types)
        if isinstance(out, SYMBOLIC):
            self.bind_symbol(out, results)  # type: ignore[arg-type]
        elif isinstance(out, torch.Tensor):
            self.note(out, results, func, args, kwargs, None)  # type: ignore[arg-type]
        elif isinstance(out, (tuple, list)):
            for index, (tensor, v) in enumerate(zip(out, results, strict=True)):  # type: ignore[arg-type]
                if isinstance(tensor, torch.Tensor):
                    self.note(tensor, v, func, args, kwargs, index)
                elif isinstance(tensor, SYMBOLIC):
                    self.bind_symbol(tensor, v)
        for tensor in leaves:
            self.bind_sizes(tensor)
        return out

    def note(
        self, tensor: torch.Tensor, v: Value, func: OpOverload, args: tuple, kwargs: dict, index: int | None
    ) -> None:
        """Remember a result, as a view where it shares memory with an argument."""
        parent = self.parent_of(tensor, args)
        if parent is None:
            self.refs[id(tensor)] = Ref(tensor, v, Root())
            return
        rest = self.lower(args[1:])
        view = View(parent, func, rest, self.lower(kwargs), index, NO_GRAD in self.builder.tags)  # type: ignore[arg-type]
        self.refs[id(tensor)] = Ref(tensor, v, parent.root, view, parent.root.version)

    def parent_of(self, tensor: torch.Tensor, args: tuple) -> Ref | None:
        if not args or not isinstance(args[0], torch.Tensor) or tensor.layout is not torch.strided:
            return None
        if args[0].layout is not torch.strided or not _same_storage(tensor, args[0]):
            return None
        return self.ref(args[0])

    def bind_symbol(self, symbol: Symbolic, v: Value) -> None:
        if name := symbol_of(symbol):
            self.builder.symbols.setdefault(name, (v, None))

    def bind_sizes(self, tensor: torch.Tensor) -> None:
        """Sizes known only at run time (nonzero, unique) are read off the result that brings them. A sub-trace has
        those of the program around it."""
        for dim, size in enumerate(tensor.shape):
            name = symbol_of(size) if isinstance(size, torch.SymInt) else None
            if name and not any(name in r.builder.symbols for r in (self, *_recording.items)):
                self.builder.symbols[name] = (self.refs[id(tensor)].value, dim)

    # --- writes ---

    def write_to(self, ref: Ref, new: Value, known: bool = False) -> None:
        """Give a tensor new contents of its own dtype and shape. `known`: its constant holds them already."""
        if not known:
            literals.forget(ref.tensor)
        kept = ref.value.tensor
        if kept.is_differentiable and not new.tensor.is_differentiable:  # y.eq_(z): the old contents get zeros
            new = self.builder.emit(torch.ops.aten.copy.default, ref.read(self.builder), new)  # type: ignore[assignment]
        if new.tensor.dtype != kept.dtype:
            new = self.builder.emit(torch.ops.aten._to_copy.default, new, dtype=kept.dtype)  # type: ignore[assignment]
        if new.tensor.ndim != kept.ndim:
            new = self.builder.emit(torch.ops.aten.expand.default, new, list(kept.shape))  # type: ignore[assignment]
        ref.write(laid_as(self.builder, new, ref.tensor), self.builder)  # what is made of it follows its strides

    # --- finishing ---

    def __enter__(self) -> Recorder:
        _recording.append(self)
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *exc) -> None:  # noqa: ANN002
        _recording.pop()
        super().__exit__(*exc)

    def close(self) -> dict[torch.Tensor, torch.Tensor]:
        """Make inputs of the tensors closed over; gives each with the fake tensor that stands for it here."""
        closed: dict[torch.Tensor, torch.Tensor] = {}
        for v, tensor in self.builder.constants.items():
            self.builder.inputs.append(v)
            closed[tensor] = self.refs[id(tensor)].tensor
        self.builder.constants.clear()
        return closed

    def finish(self, outputs: list[object], inputs: list[torch.Tensor | None], writes_closed: bool = False) -> Trace:
        """Close the trace. `inputs[i]` is the tensor behind the builder's i-th input, or None for a number. Tensors
        closed over may be written where the caller makes inputs of them (`writes_closed`)."""
        mutations: dict[Value, Value] = {}
        for v, tensor in zip(list(self.builder.inputs), inputs, strict=True):
            if tensor is None:
                continue
            now = self.ref(tensor).read(self.builder)
            if now is not v:
                mutations[v] = now
        for v, tensor in self.builder.constants.items():
            ref = self.refs.get(id(tensor))
            if ref is not None and (now := ref.read(self.builder)) is not v:
                if not writes_closed:
                    raise CaptureError(
                        f"the program writes a tensor it closes over ({v.type}); pass that tensor as an argument"
                    )
                mutations[v] = now
        self.builder.tags = frozenset()
        return self.builder.finish([self.lower(o) for o in outputs], mutations)


def _has_none(x: torch.Tensor) -> bool:
    """No elements; sizes that are symbols are not asked."""
    return any(type(n) is int and n == 0 for n in x.shape)


def _may_be_a_view(func: OpOverload, args: tuple) -> bool:
    """einsum of one operand may only permute it, which its schema does not tell."""
    return op_name(func) == "einsum" and len(args[1]) == 1


def _lies_as(tensor: object, v: Arg) -> bool:
    """Whether the value of a tensor has its strides."""
    if not isinstance(tensor, torch.Tensor) or not isinstance(v, Value) or tensor.layout is not torch.strided:
        return True
    strides = zip(tensor.shape, tensor.stride(), v.tensor.stride, strict=True)
    return all(size_key(a) == size_key(b) for n, a, b in strides if size_key(n) != 1)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_id(a) == storage_id(b)


_HIDDEN = (torch.__path__[0], PACKAGE, "<")


def user_line() -> Source:
    """The innermost line outside PyTorch and Tessera that is running now."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HIDDEN):
            return Source(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Source()


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast remembers casts of parameters; one remembered from elsewhere is no value of this program."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def record(
    fn: Callable,
    fakes: Sequence[object],
    names: list[str],
    keep: Keep,
    builder: Builder,
    whole: bool = True,
    locate: bool = True,
) -> tuple[Trace, pytree.TreeSpec]:
    """Run `fn(*fakes)` and give its Trace with the structure of its result.

    Fakes are fake tensors of the builder's mode, or symbolic numbers. With `whole` false, autograd is on and
    composite operators arrive taken apart: the way to trace PyTorch's own derivative formulas.
    """
    recorder = Recorder(builder, keep, locate)
    if not whole:  # autograd runs backward with gradients off: that is no `no_grad` of the program's
        recorder.base_grad = False
    recorded = record_with(recorder, fn, fakes, names, whole)
    return recorded.trace, recorded.spec


@dataclass(frozen=True)
class Recorded:
    """A trace, and what was known of the tensors when it ended."""

    trace: Trace
    spec: pytree.TreeSpec  # the structure of the result
    refs: dict[int, Ref]  # by the id of the tensor
    inputs: list[torch.Tensor | None]  # the tensor behind each input; None for a number
    outputs: list[object]  # the result, flat
    closed: tuple[torch.Tensor, ...] = ()  # tensors closed over that are the last inputs


def record_with(
    recorder: Recorder,
    fn: Callable,
    fakes: Sequence[object],
    names: list[str],
    whole: bool = True,
    close: bool = False,
    writes_closed: bool = False,
) -> Recorded:
    """As `record`, with a recorder of the caller's; with `close`, tensors closed over become inputs. With
    `writes_closed` the caller makes inputs of them, and the program may write them."""
    builder = recorder.builder
    recorder.symbolic = any(map(fake.has_symbols, fakes))
    tensors: list[torch.Tensor | None] = []
    for name, x in zip(names, fakes, strict=True):
        if isinstance(x, torch.Tensor):
            recorder.input(name, x)
            tensors.append(x)
        else:
            v = builder.input(name, type_of(x))
            tensors.append(None)
            if isinstance(x, SYMBOLIC) and x.node.expr.is_symbol:
                builder.symbols[str(x.node.expr)] = (v, None)
    for x in tensors:  # sizes that no scalar input brings
        if x is not None:
            recorder.bind_sizes(x)
    with ExitStack() as stack:
        if builder.mode.shape_env is not None:  # the trace binds sizes known only at run time itself
            stack.enter_context(builder.mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(builder.mode)
        stack.enter_context(recorder)
        stack.enter_context(_no_autocast_cache())
        # A device's own thread has no Python frame below autograd: a condition on sizes found there could not be named.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if whole:
            stack.enter_context(fake.below_autograd())
        out = fn(*fakes)
    leaves: list[object]
    leaves, spec = pytree.tree_flatten(out)
    with builder.mode, fake.below_autograd():
        leaves = [recorder.fake(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        for x in leaves:
            if isinstance(x, torch.Tensor):
                recorder.ref(x)  # one that is closed over and only handed on is known from here
        closed = recorder.close() if close else {}
        tensors += closed.values()
        trace = recorder.finish(leaves, tensors, writes_closed)
    return Recorded(trace, spec, recorder.refs, tensors, leaves, tuple(closed))
