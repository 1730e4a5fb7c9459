"""Calls of a `torch.autograd.Function` inside a traced program, recorded as one equation each.

In: the class and its arguments. Out: an equation that holds what the call computes and the function's own rules
(`backward` or `vjp`, `jvp`, `vmap`) as sub-traces. The forward is traced where the call stands, and a backward that
looks at nothing but its tensors too; one that asks what is needed, or that cannot be traced, is traced when a
derivative is taken. What they close over of the surrounding program becomes an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.frontends.functional.custom import Operands, examples, pure, rewire, seed_like
from tessera.frontends.functional.trace import WATCHED, Traced, trace_function, tracing
from tessera.ir.alias import Ref, Root, View
from tessera.ir.equation import Arg, Equation, Value, symbols_in
from tessera.ir.record import Recorder, recording
from tessera.ir.schema import is_view
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType, Type, type_of
from tessera.ops.custom import AUTOGRAD_FUNCTION, ONCE, Deferred, Flags, is_float
from tessera.ops.families import is_one, same_shape
from tessera.torch_internals import pytree
from tessera.torch_internals.autograd import SingleLevelFunction
from tessera.torch_internals.functorch import VmapInfo
from tessera.torch_internals.memory import storage_id
from tessera.util.errors import CaptureError, InputError, TesseraError

_ONCE_CODE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


class Context:
    """What `ctx` is to an autograd.Function: a place to save tensors and anything else."""

    def __init__(self, needs: Flags) -> None:
        self._needs = needs
        self._looked = False  # at what is needed
        self._saved: tuple = ()
        self._for_forward: tuple | None = None
        self._fixed: tuple = ()
        self._dirty: tuple = ()
        self._materialize = True

    @property
    def needs_input_grad(self) -> Flags:
        self._looked = True
        return self._needs

    def save_for_backward(self, *tensors: object) -> None:
        self._saved = tensors

    def save_for_forward(self, *tensors: object) -> None:
        self._for_forward = tensors

    @property
    def saved_tensors(self) -> tuple:
        return self._saved

    saved_variables = saved_tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self._fixed = tensors

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        self._dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    def state(self) -> dict[str, object]:
        """What a later rule finds again."""
        own = ("_needs", "_looked", "_fixed", "_dirty")
        return {name: held for name, held in self.__dict__.items() if name not in own}

    @classmethod
    def again(cls, state: dict[str, object], needs: Flags = ()) -> Context:
        ctx = cls(needs)
        ctx.__dict__.update(state)
        return ctx


def _has_setup(function: type) -> bool:
    return function.setup_context is not SingleLevelFunction.setup_context  # type: ignore[attr-defined]


def _run_forward(function: type, args: tuple) -> tuple[object, Context]:
    ctx = Context(tuple(map(is_float, args)))
    if not _has_setup(function):
        return function.forward(ctx, *args), ctx  # type: ignore[attr-defined]
    out = function.forward(*args)  # type: ignore[attr-defined]
    function.setup_context(ctx, args, out)  # type: ignore[attr-defined]
    given = [o for o in pytree.tree_leaves(out) if any(o is a for a in args) and not _among(o, ctx._dirty)]
    if any(_among(o, (*ctx._saved, *(ctx._for_forward or ()))) for o in given):
        raise InputError(
            f"{function.__name__}: An input that has been returned as-is is also saved, which setup_context cannot "
            "tell apart from the result; return and save a view of it (x.view_as(x))"
        )
    return out, ctx


def _among(x: object, others: Sequence[object]) -> bool:
    return any(x is o for o in others)


class _Recorded:
    """One call: its traced forward, and its rules as traces over the equation's operands."""

    def __init__(self, function: type, args: tuple) -> None:
        self.function, self.args, self.name = function, args, function.__name__
        self.operands = Operands(args)
        with torch.no_grad():  # as eager runs it
            self.first = trace_function(self.forward, args, name=self.name, close=True)
        self.slots = self.operands.slots(self.first)
        outputs = self.first.trace.outputs
        places = pytree.tree_unflatten(list(range(len(outputs))), self.first.out_spec)
        self.out_places, self.out_spec = pytree.tree_flatten(places[0])
        self.state_places, self.state_spec = pytree.tree_flatten(places[1])
        self.fixed, self.dirty = ([outputs[i] for i in pytree.tree_leaves(part)] for part in places[2:])
        self.fakes = examples(outputs, outputs)
        self.looked = False
        if set(self.first.trace.mutations) - {v for v, d in zip(self.argument_values(), self.dirty, strict=True) if d}:
            raise CaptureError(f"{self.name}.forward writes into an argument that it does not mark_dirty")

    def forward(self, *xs: object) -> tuple:
        out, ctx = _run_forward(self.function, xs)
        outs = pytree.tree_leaves(out)
        memory = {storage_id(x): i for i, x in enumerate(xs) if isinstance(x, torch.Tensor)}
        self.shown = [memory.get(storage_id(o)) if isinstance(o, torch.Tensor) else None for o in outs]
        return out, ctx.state(), [_among(o, ctx._fixed) for o in outs], [_among(x, ctx._dirty) for x in xs]

    def argument_values(self) -> list[Value | None]:
        """The trace's input for each argument that is a tensor."""
        inputs = iter(self.first.trace.inputs)
        return [next(inputs) if isinstance(a, torch.Tensor) else None for a in self.args]

    # --- the forward as a sub-trace ---

    def finish_forward(self) -> None:
        """`fwd`: results, then what a rule saved that is neither an operand nor a result."""
        self.types = self.operands.types()
        fwd = rewire(self.first.trace.with_(mutations={}), self.slots, self.types)
        self.results: list[Value] = [fwd.outputs[i] for i in self.out_places if isinstance(fwd.outputs[i], Value)]  # type: ignore[misc]
        self.kept = [fwd.outputs[i] for i in self.state_places if isinstance(fwd.outputs[i], Value)]
        extras = [v for v in dict.fromkeys(self.kept) if v not in self.results and v not in fwd.inputs]
        self.fwd: Trace = fwd.with_(outputs=(*self.results, *extras))

    def arguments(self, by_operand: Sequence[bool]) -> Flags:
        """Flags of the operands, as flags of the arguments."""
        flags = iter(by_operand)
        return tuple(next(flags) if isinstance(a, torch.Tensor) else False for a in self.args)

    # --- backward ---

    def trace_backward(self, needs: Flags | None, given: Flags | None) -> Traced:
        """Over what was saved and the cotangents of the results that float; `needs` is about the arguments, `given`
        about the results, and None stands for all."""
        needs = tuple(map(is_float, self.args)) if needs is None else needs
        state = pytree.tree_unflatten([self.fakes[i] for i in self.state_places], self.state_spec)
        outs = [self.fakes[i] for i in self.out_places]
        there = iter(given or [True] * len(outs))
        pulled = [isinstance(o, torch.Tensor) and next(there) for o in outs]
        rule = self.function.backward  # type: ignore[attr-defined]
        rule = self.function.vjp if rule is SingleLevelFunction.backward else rule  # type: ignore[attr-defined]
        once = getattr(rule, "__code__", None) is _ONCE_CODE

        def backward(state: dict, cts: list) -> list:
            ctx = Context.again(state, needs)
            seeds = [self.seed(ctx, *at) for at in zip(outs, cts, pulled, self.fixed, strict=True)]
            grads = rule(ctx, *seeds)
            self.looked |= ctx._looked or not ctx._materialize
            fitted = [self.fitted(i, g) if needs[i] else g for i, g in enumerate(self.listed(grads))]
            return [_one(g, (*cts, *ctx._saved), once) for g in fitted]

        seeds = [seed_like(o) if is_float(o) else None for o in outs]
        traced = trace_function(backward, (state, seeds), name=f"{self.name}_backward", close=True)
        return pure(traced, f"{self.name}.backward")

    def seed(self, ctx: Context, out: object, ct: object, given: bool, fixed: object) -> object:
        """A cotangent as eager passes it: where there is none, zeros, or None if the function asked for that."""
        if ct is not None and given and not fixed:
            return ct
        if not isinstance(out, torch.Tensor) or not ctx._materialize:
            return None
        return torch.zeros(out.shape, dtype=out.dtype, device=out.device)

    def listed(self, grads: object) -> list:
        """One gradient (or None) for each argument."""
        listed = list(grads) if isinstance(grads, (tuple, list)) else [grads]
        if len(listed) < len(self.args):
            raise InputError(
                f"{self.name}.backward gave {len(listed)} gradients, expected {len(self.args)}, one an argument"
            )
        return [g if isinstance(g, torch.Tensor) else None for g in listed[: len(self.args)]]

    def fitted(self, index: int, g: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient as autograd takes it: summed where the argument was broadcast, refused if it was not."""
        x: torch.Tensor = self.args[index]
        if g is not None and g.is_complex() and not x.is_complex():
            raise CaptureError(f"{self.name}.backward gave a complex gradient for argument {index}, which is real")
        shape = x.shape
        if g is None or same_shape(g.shape, shape):
            return g
        lead = g.ndim - len(shape)
        if lead < 0 or not all(is_one(s) or same_shape([s], [n]) for s, n in zip(shape, g.shape[lead:], strict=True)):
            raise CaptureError(
                f"Function {self.name}Backward returned an invalid gradient at index {index} - got {list(g.shape)} "
                f"but expected shape compatible with {list(shape)}"
            )
        return g.sum_to_size(shape)

    def backward_trace(self, second: Traced) -> Trace:
        """The traced backward over (operands, all that forward gives, cotangents): one output an operand."""
        where = {v: i for i, v in enumerate(self.fwd.inputs)}
        where |= {v: len(self.types) + i for i, v in enumerate(self.fwd.outputs)}  # type: ignore[misc]
        base = len(self.types) + len(self.fwd.outputs)
        seeds = second.trace.inputs[len(self.kept) : len(second.trace.inputs) - len(second.captured)]
        captured = [self.known(x, "backward") for x in second.captured]
        slots = [*(where[v] for v in self.kept), *range(base, base + len(seeds)), *captured]  # type: ignore[index]
        given = [*self.types, *(v.type for v in self.fwd.outputs), *(v.type for v in seeds)]  # type: ignore[union-attr]
        trace = rewire(second.trace, slots, given)
        grads: list[Arg] = []
        for a, g in zip(self.args, trace.outputs, strict=True):
            leaves = [x for x in pytree.tree_leaves(a) if isinstance(x, torch.Tensor)]
            grads += [g] if isinstance(a, torch.Tensor) else [None] * len(leaves)
        return trace.with_(outputs=(*grads, *[None] * (len(self.types) - len(grads))))

    def known(self, x: torch.Tensor, rule: str) -> int:
        if not _among(x, self.operands.tensors):
            raise CaptureError(
                f"{self.name}.{rule} closes over a tensor that its forward does not; pass it as an argument"
            )
        return self.operands.slot(x)

    def backward(self) -> Trace | Deferred:
        """The backward; one that has to be asked anew for every need is deferred."""
        second = None
        try:
            second = self.trace_backward(None, None)
        except TesseraError as error:
            if isinstance(error, InputError):
                raise
        except Exception:  # whatever a user's code raises: it counts only if a derivative is taken
            second = None
        for x in second.captured if second is not None else ():
            self.operands.slot(x)
        self.finish_forward()
        if second is not None and not self.looked:
            return self.backward_trace(second)
        return Deferred(
            f"{self.name}_backward",
            lambda needs, given: self.backward_trace(self.trace_backward(self.arguments(needs), given)),
        )

    # --- jvp and vmap ---

    def push(self) -> Trace | Deferred | None:
        """The function's own forward-mode rule over (operands, tangents of the differentiable ones)."""
        if self.function.jvp is SingleLevelFunction.jvp:  # type: ignore[attr-defined]
            return None
        return Deferred(f"{self.name}_jvp", self.trace_push)

    def trace_push(self) -> Trace:
        def forward(xs: tuple, ts: tuple) -> list:
            _, ctx = _run_forward(self.function, tuple(xs))
            if ctx._for_forward is not None:
                ctx._saved = ctx._for_forward
            moved = self.function.jvp(ctx, *ts)  # type: ignore[attr-defined]
            listed = list(moved) if isinstance(moved, (tuple, list)) else [moved]
            return [None if f else t for t, f in zip(listed, self.fixed, strict=True)]

        args = self.fresh()
        tangents = tuple(seed_like(a) if is_float(a) else None for a in args)
        traced = trace_function(forward, (args, tangents), name=f"{self.name}_jvp", close=True)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        moving = [i for i, x in enumerate(self.operands.tensors) if is_float(x)]
        base = len(self.types)
        slots = list(range(len(tensors)))
        slots += [base + moving.index(i) for i, a in enumerate(tensors) if is_float(a)]
        slots += [self.known(x, "jvp") for x in traced.captured]
        types = [*self.types, *(type_of(seed_like(self.operands.tensors[i])) for i in moving)]
        return rewire(traced.trace.with_(mutations={}), slots, types)

    def fresh(self) -> tuple:
        """Stand-ins for the arguments: those of the call belong to its program."""
        tensors = [a for a in self.args if isinstance(a, torch.Tensor)]
        fakes = iter(examples([Value("x", type_of(a)) for a in tensors], tensors))
        return tuple(next(fakes) if isinstance(a, torch.Tensor) else a for a in self.args)

    def rows(self) -> Callable[..., Trace] | None:
        """The function's own batching rule."""
        own = getattr(self.function, "vmap", None)
        return None if own in (None, torch.autograd.Function.vmap) else self.trace_rows

    def trace_rows(self, size: Size, on: Flags, types: Sequence[Type], randomness: str) -> Trace:
        """The results, batch first, over operands of these types, of which those `on` carry the batch at 0."""
        if self.function.generate_vmap_rule:  # type: ignore[attr-defined]
            raise InputError(f"{self.name} has both generate_vmap_rule=True and a vmap staticmethod; keep one of them")
        in_dims = tuple(0 if flag else None for flag in self.arguments(on))

        def batched(*xs: object) -> list:
            given = self.function.vmap(VmapInfo(size, randomness), in_dims, *xs)  # type: ignore[attr-defined,arg-type]
            return _batch_first(self.name, given, self.out_spec, size)

        places = [i for i, a in enumerate(self.args) if isinstance(a, torch.Tensor)]
        given: dict[int, TensorType] = dict(zip(places, types, strict=False))  # type: ignore[arg-type]
        traced = pure(
            trace_function(batched, self.fresh(), types=given, name=f"{self.name}_vmap", close=True), "a vmap rule"
        )
        slots = [*range(len(places)), *(self.known(x, "vmap") for x in traced.captured)]
        return rewire(traced.trace, slots, types)


def _one(g: object, read: Sequence[object], once: bool) -> object:
    """A gradient that a backward gave; marked, if it may not be differentiated again."""
    recorder = recording()
    if not once or not is_float(g) or recorder is None:
        return g
    tensors = [x for x in read if isinstance(x, torch.Tensor)]
    return recorder.special(ONCE, (g, *tensors), {}, [type_of(g)], many=False)[0]  # type: ignore[arg-type]


def _batch_first(name: str, given: object, out_spec: pytree.TreeSpec, size: Size) -> list:
    """What a vmap staticmethod gave, (results, their batch dimensions), with the batch at dimension 0."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise InputError(f"{name}.vmap: expected it to have two returns, the output and out_dims, got {given!r}")
    leaves, spec = pytree.tree_flatten(given[0])
    dims = pytree.broadcast_to_and_flatten(given[1], spec, is_leaf=lambda d: d is None)
    if spec != out_spec or dims is None:
        raise InputError(f"{name}.vmap returned an incompatible output or out_dims: {spec}, {given[1]!r}")
    return [
        x.unsqueeze(0).expand(size, *x.shape) if d is None else x.movedim(d, 0)
        for x, d in zip(leaves, dims, strict=True)
    ]


def record_function(function: type, args: tuple, recorder: Recorder) -> object:
    """One `autograd_function` equation for a call of `function.apply(*args)`."""
    call = _Recorded(function, args)
    bwd = call.backward()
    outs = recorder.special(
        AUTOGRAD_FUNCTION,
        (len(call.results), call.fwd, bwd, call.push(), call.rows(), *call.operands.tensors),
        {},
        [v.type for v in call.fwd.outputs],  # type: ignore[union-attr]
    )
    written = _write(call, outs)
    given = iter(outs)
    outputs = call.first.trace.outputs
    leaves = [next(given) if isinstance(outputs[i], Value) else outputs[i] for i in call.out_places]
    for x, place, argument in zip(leaves, call.out_places, call.shown, strict=True):
        if argument is not None and not call.dirty[argument]:
            _note_view(call, outputs[place], x, argument, recorder)
    leaves = [
        written.get(id(x), _without_history(x, recorder) if f else x) for x, f in zip(leaves, call.fixed, strict=True)
    ]
    return pytree.tree_unflatten(leaves, call.out_spec)


def _note_view(call: _Recorded, v: Arg, out: torch.Tensor, argument: int, recorder: Recorder) -> None:
    """A result that shows an argument's memory is a view of it, whose history is the function's."""
    makers = call.first.trace.makers()
    given = call.argument_values()[argument]
    steps: list[tuple[Equation, int | None]] = []
    while v is not given:
        eqn = makers.get(v)  # type: ignore[arg-type]
        if eqn is None or not is_view(eqn.op) or len(eqn.inputs()) != 1 or symbols_in((eqn.args, eqn.kwargs)):
            return  # made in a way that cannot be told here
        steps.append((eqn, eqn.outputs.index(v) if eqn.many else None))
        v = eqn.inputs()[0]
    value, ref = recorder.value(out), recorder.ref(call.args[argument])
    views = [(eqn.op, eqn.args[1:], eqn.kwargs, index) for eqn, index in reversed(steps)]
    for op, args, kwargs, index in views or [(torch.ops.aten.alias.default, (), {}, None)]:
        ref = Ref(out, value, ref.root, View(ref, op, args, kwargs, index), version=-1)
    ref.version, ref.own_history = ref.root.version, True
    recorder.refs[id(out)] = ref


def _without_history(x: torch.Tensor | Arg, recorder: Recorder) -> torch.Tensor:
    """A result that has no gradient. It is no view: whoever writes it writes nothing that has one."""
    assert isinstance(x, torch.Tensor)
    fixed = x.detach()
    recorder.refs[id(fixed)] = Ref(fixed, recorder.value(fixed), Root())
    return fixed


def _write(call: _Recorded, outs: list[torch.Tensor]) -> dict[int, object]:
    """Arguments that the function wrote hold its results now, and are given back in their place."""
    outputs = [call.first.trace.outputs[i] for i in call.out_places]
    tensors = [o for o in outputs if isinstance(o, Value)]
    written: dict[int, object] = {}
    for x, v, dirty in zip(call.args, call.argument_values(), call.dirty, strict=True):
        new = call.first.trace.mutations.get(v, v) if dirty and v is not None else None
        if new is None:
            continue
        if new not in tensors:
            raise CaptureError(f"{call.name} marks an input dirty that it does not return")
        result = outs[tensors.index(new)]
        x.copy_(result)  # type: ignore[attr-defined]
        written[id(result)] = x
    return written


def _watched_apply(_: object) -> classmethod:
    """`Function.apply` ends in its base's: that one is replaced, since a program may hold `F.apply` from before."""

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        recorder = recording()
        if recorder is None or not tracing():
            return super(SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]
        if kwargs:  # those that have a place were put there
            raise CaptureError(f"{cls.__name__}.apply: expected positional arguments, got {', '.join(kwargs)} by name")
        return record_function(cls, args, recorder)

    return classmethod(apply)


WATCHED.append((SingleLevelFunction, "apply", _watched_apply))
