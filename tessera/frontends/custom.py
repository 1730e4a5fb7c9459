"""Functions that bring a derivative of their own, recorded as one equation each.

In: a call of a `custom_vjp` function, or of a `torch.autograd.Function`, inside a traced program. Out: an
equation that holds what the call computes and its derivative as sub-traces. Both are traced where the call
stands, so what they close over of the surrounding program becomes an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils import _pytree as pytree

from tessera.frontends.functional import WATCHED, Traced, mode_for, trace_function, tracing
from tessera.ir import fake
from tessera.ir.equation import Arg, Value, map_values
from tessera.ir.record import Recorder, recording
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, Type, type_of
from tessera.ops.control import AUTOGRAD_FUNCTION, CUSTOM_VJP
from tessera.util.errors import CaptureError, InputError


def rewire(trace: Trace, slots: Sequence[int], types: Sequence[Type]) -> Trace:
    """The trace with inputs of these types; what was its i-th input is now input number `slots[i]`."""
    inputs: dict[int, Value] = {}
    rename: dict[Value, Value] = {}
    for v, slot in zip(trace.inputs, slots, strict=True):
        rename[v] = inputs.setdefault(slot, v)
    taken = {v.name for v in trace.values()}
    spare = (f"unused{i}" for i in range(len(types) + len(taken)))
    full = [inputs.get(i) or Value(next(n for n in spare if n not in taken), t) for i, t in enumerate(types)]
    outputs = tuple(map_values(o, lambda v: rename.get(v, v)) for o in trace.outputs)
    return sweep(
        trace.with_(inputs=tuple(full), equations=tuple(e.substitute(rename) for e in trace.equations), outputs=outputs)
    )


class Operands:
    """The tensors an equation reads: its arguments in order, then what it closes over, each once."""

    def __init__(self, args: tuple) -> None:
        self.tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]

    def slot(self, x: torch.Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is x:
                return i
        self.tensors.append(x)
        return len(self.tensors) - 1

    def slots(self, traced: Traced) -> list[int]:
        """Where the inputs of a trace over the arguments stand."""
        return [*range(len(traced.places)), *(self.slot(x) for x in traced.captured)]

    def types(self) -> list[Type]:
        return [type_of(x) for x in self.tensors]


def pure(traced: Traced, what: str) -> Traced:
    if traced.trace.mutations:
        raise CaptureError(f"{what} writes into one of its arguments; write a copy of it")
    return traced


def examples(values: Sequence[Arg], leaves: Sequence[object]) -> list[object]:
    """Stand-ins for what a trace gives: fake tensors for values, other results as they are."""
    mode = mode_for([])
    with fake.alone():
        return [
            fake.fake_of(v.tensor, mode) if isinstance(v, Value) else x for v, x in zip(values, leaves, strict=True)
        ]


# --- custom_vjp -----------------------------------------------------------------------------------


def record_custom_vjp(primal: Callable, fwd: Callable, bwd: Callable, args: tuple, recorder: Recorder) -> object:
    """One `custom_vjp` equation for this call; gives its result."""
    operands = Operands(args)
    first = pure(trace_function(primal, args, name="primal", close=True), "a custom_vjp function")
    second = pure(trace_function(fwd, args, name="fwd", close=True), "the fwd of a custom_vjp function")
    first_slots, second_slots = operands.slots(first), operands.slots(second)
    places = pytree.tree_unflatten(list(range(len(second.trace.outputs))), second.out_spec)
    if not (isinstance(places, tuple) and len(places) == 2):
        raise InputError(f"custom_vjp: expected fwd to give (result, residuals), got {second.out_spec}")
    out_places, out_spec = pytree.tree_flatten(places[0])
    if out_spec != first.out_spec:
        raise InputError(
            f"custom_vjp: expected fwd's result to be like the function's, {first.out_spec}, got {out_spec}"
        )
    res_places, res_spec = pytree.tree_flatten(places[1])
    stand_ins = examples(second.trace.outputs, second.trace.outputs)
    residuals = pytree.tree_unflatten([stand_ins[i] for i in res_places], res_spec)
    cts = pytree.tree_unflatten([_plain(stand_ins[i]) for i in out_places], out_spec)
    third = pure(
        trace_function(_spread_grads(bwd, args), (residuals, cts), name="bwd", close=True),
        "the bwd of a custom_vjp function",
    )
    # bwd reads residuals and cotangents; what it closes over comes to it as further residuals
    captured = [operands.slot(x) for x in third.captured]
    types = operands.types()
    tensors_out = [i for i in out_places if isinstance(second.trace.outputs[i], Value)]
    kept = [i for i in res_places if isinstance(second.trace.outputs[i], Value)]
    forward = rewire(second.trace, second_slots, types)
    results = [forward.outputs[i] for i in tensors_out]
    saved = [forward.outputs[i] for i in kept] + [forward.inputs[i] for i in captured]
    forward = forward.with_(outputs=(*results, *saved))
    plain = rewire(first.trace, first_slots, types)
    plain = plain.with_(outputs=tuple(o for o in plain.outputs if isinstance(o, Value)))
    backward = _backward(third, [v.type for v in saved], [v.type for v in results], len(kept), operands, args)  # type: ignore[union-attr]
    made = recorder.special(
        CUSTOM_VJP,
        (plain, forward, backward, *operands.tensors),
        {},
        [v.type for v in plain.outputs],  # type: ignore[union-attr]
    )
    given = iter(made)
    return first.pack([next(given) if isinstance(o, Value) else o for o in first.trace.outputs])


def _plain(x: object) -> object:
    if isinstance(x, torch.Tensor):
        with fake.alone():
            t = type_of(x)
            return fake.fake_of(TensorType(t.dtype, t.shape, _contiguous(t.shape), t.device), mode_for([]))  # type: ignore[union-attr]
    return x


def _contiguous(shape: Sequence) -> tuple:
    stride: list = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step = step * size
    return tuple(stride)


def _spread_grads(bwd: Callable, args: tuple) -> Callable:
    """bwd, giving one gradient (or None) for every leaf of the arguments."""

    def flat(residuals: object, cts: object) -> list:
        grads = bwd(residuals, cts)
        if len(args) == 1 and not isinstance(grads, (tuple, list)):
            grads = (grads,)
        if not isinstance(grads, (tuple, list)) or len(grads) != len(args):
            raise InputError(f"custom_vjp: expected bwd to give {len(args)} gradients, one an argument, got {grads!r}")
        return leaf_grads(args, grads)

    return flat


def leaf_grads(args: Sequence[object], grads: Sequence[object]) -> list:
    """Gradients for the flat arguments; None for a whole argument stands for each of its leaves."""
    flat: list = []
    for a, g in zip(args, grads, strict=True):
        leaves, spec = pytree.tree_flatten(a)
        given, got = pytree.tree_flatten(g)
        if g is None:
            given = [None] * len(leaves)
        elif got != spec:
            raise InputError(f"custom_vjp: expected a gradient of structure {spec}, got {got}")
        for x, grad in zip(leaves, given, strict=True):
            if isinstance(x, torch.Tensor) and isinstance(grad, torch.Tensor) and grad.shape != x.shape:
                raise InputError(f"custom_vjp: expected a gradient of shape {tuple(x.shape)}, got {tuple(grad.shape)}")
        flat += given
    return flat


def _backward(
    third: Traced, saved: list[Type], results: list[Type], kept: int, operands: Operands, args: tuple
) -> Trace:
    """bwd over (residuals, cotangents of differentiable results), with one output an operand."""
    trace = third.trace
    inputs = trace.inputs
    n_ct = len(inputs) - kept - len(third.captured)
    slots = [*range(kept), *range(len(saved), len(saved) + n_ct), *range(kept, len(saved))]
    cotangents = [v.type for v in inputs[kept : kept + n_ct]]
    made = rewire(trace, slots, [*saved, *cotangents])
    live = [i for i, t in enumerate(results) if t.is_differentiable]  # type: ignore[union-attr]
    if len(live) != n_ct:  # cotangents of whole numbers are not passed
        keep = [*made.inputs[: len(saved)], *(made.inputs[len(saved) + i] for i in live)]
        made = made.with_(inputs=tuple(keep))
    return made.with_(outputs=_by_operand(made.outputs, operands, args))


def _by_operand(grads: Sequence[Arg], operands: Operands, args: tuple) -> tuple:
    """One gradient for each operand: those of the arguments; what was closed over gets none."""
    by_argument = [g for x, g in zip(pytree.tree_leaves(args), grads, strict=True) if isinstance(x, torch.Tensor)]
    return (*by_argument, *[None] * (len(operands.tensors) - len(by_argument)))


# --- torch.autograd.Function ----------------------------------------------------------------------


class Context:
    """What `ctx` is to an autograd.Function: a place to save tensors and anything else."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self._saved: tuple = ()
        self._for_forward: tuple | None = None
        self._fixed: tuple = ()
        self._materialize = True

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
        raise CaptureError("an autograd.Function that writes its input (mark_dirty) is not traced; write a copy of it")

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    @classmethod
    def again(cls, attributes: dict[str, object]) -> Context:
        made = cls(())
        made.__dict__.update(attributes)
        return made


def _run_forward(function: type, args: tuple) -> tuple[object, Context]:
    ctx = Context(tuple(isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()) for a in args))
    if function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context:  # type: ignore[attr-defined]
        out = function.forward(*args)  # type: ignore[attr-defined]
        function.setup_context(ctx, args, out)  # type: ignore[attr-defined]
    else:
        out = function.forward(ctx, *args)  # type: ignore[attr-defined]
    return out, ctx


def record_function(function: type, args: tuple, recorder: Recorder) -> object:
    """One `autograd_function` equation for a call of `function.apply(*args)`."""
    name = function.__name__
    base_class = torch.autograd.function._SingleLevelFunction
    pull = function.vjp if function.backward is base_class.backward else function.backward  # type: ignore[attr-defined]
    operands = Operands(args)

    def forward(*xs: object) -> tuple:
        out, ctx = _run_forward(function, xs)
        outs = out if isinstance(out, tuple) else (out,)
        state = {k: v for k, v in ctx.__dict__.items() if k != "_fixed"}
        fixed = [any(o is t for t in ctx._fixed) for o in outs]
        return out, state, fixed

    first = pure(trace_function(forward, args, name=name, close=True), f"{name}.forward")
    slots = operands.slots(first)
    outputs = first.trace.outputs
    places = pytree.tree_unflatten(list(range(len(outputs))), first.out_spec)
    out_places, out_spec = pytree.tree_flatten(places[0])
    state_places, state_spec = pytree.tree_flatten(places[1])
    fixed = [outputs[i] for i in pytree.tree_leaves(places[2])]
    results = [outputs[i] for i in out_places if isinstance(outputs[i], Value)]
    stand_ins = examples(outputs, outputs)
    state = pytree.tree_unflatten([stand_ins[i] for i in state_places], state_spec)
    cts = [_plain(stand_ins[i]) for i in out_places]

    def backward(state: dict, cts: list) -> list:
        seeds = [
            torch.zeros_like(c) if f and isinstance(c, torch.Tensor) else c for c, f in zip(cts, fixed, strict=True)
        ]
        grads = pull(Context.again(state), *seeds)
        listed = list(grads) if isinstance(grads, (tuple, list)) else [grads]
        if len(listed) < len(args):
            raise InputError(f"{name}.backward gave {len(listed)} gradients, expected {len(args)}, one an argument")
        return [g if isinstance(g, torch.Tensor) else None for g in listed[: len(args)]]

    second = pure(trace_function(backward, (state, cts), name=f"{name}_backward", close=True), f"{name}.backward")
    for x in second.captured:
        operands.slot(x)
    types = operands.types()
    fwd = rewire(first.trace, slots, types)
    results = [fwd.outputs[i] for i in out_places if isinstance(fwd.outputs[i], Value)]
    kept = [fwd.outputs[i] for i in state_places if isinstance(fwd.outputs[i], Value)]
    extras = [v for v in dict.fromkeys(kept) if v not in results and v not in fwd.inputs]
    fwd = fwd.with_(outputs=(*results, *extras))
    # what backward reads: operands, results and extras stand in this order before the cotangents
    where = {v: i for i, v in enumerate(fwd.inputs)} | {v: len(types) + i for i, v in enumerate(fwd.outputs)}
    base = len(types) + len(fwd.outputs)
    n_ct = len(second.trace.inputs) - len(kept) - len(second.captured)
    back_slots = [*(where[v] for v in kept), *range(base, base + n_ct), *(operands.slot(x) for x in second.captured)]
    ct_types = [v.type for v in second.trace.inputs[len(kept) : len(kept) + n_ct]]
    bwd = rewire(second.trace, back_slots, [*types, *(v.type for v in fwd.outputs), *ct_types])  # type: ignore[union-attr]
    live = [i for i, v in enumerate(results) if v.type.is_differentiable]  # type: ignore[union-attr]
    bwd = bwd.with_(inputs=(*bwd.inputs[:base], *(bwd.inputs[base + i] for i in live)))
    bwd = bwd.with_(outputs=_by_operand(bwd.outputs, operands, args))
    push = _push(function, args, operands, results, fixed)  # type: ignore[arg-type]
    made = recorder.special(
        AUTOGRAD_FUNCTION,
        (len(results), fwd, bwd, push, *operands.tensors),
        {},
        [v.type for v in fwd.outputs],  # type: ignore[union-attr]
    )
    given = iter(made)
    leaves = [next(given) if isinstance(outputs[i], Value) else outputs[i] for i in out_places]
    return pytree.tree_unflatten(leaves, out_spec)


def _push(function: type, args: tuple, operands: Operands, results: list[Value], fixed: list) -> Trace | None:
    """The function's own forward-mode rule over (operands, tangents of the differentiable ones)."""
    if function.jvp is torch.autograd.function._SingleLevelFunction.jvp:  # type: ignore[attr-defined]
        return None

    def forward(xs: tuple, ts: tuple) -> list:
        _, ctx = _run_forward(function, xs)
        if ctx._for_forward is not None:
            ctx._saved = ctx._for_forward
        moved = function.jvp(ctx, *ts)  # type: ignore[attr-defined]
        listed = list(moved) if isinstance(moved, (tuple, list)) else [moved]
        return [None if f else t for t, f in zip(listed, fixed, strict=True)]

    floats = [isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()) for a in args]
    tangents = tuple(_plain(a) if f else None for a, f in zip(args, floats, strict=True))
    traced = pure(trace_function(forward, (args, tangents), name=f"{function.__name__}_jvp", close=True), "a jvp rule")
    if any(all(x is not t for t in operands.tensors) for x in traced.captured):
        raise CaptureError(
            f"{function.__name__}.jvp closes over a tensor that its forward does not; pass it as an argument"
        )
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    moving = [i for i, x in enumerate(operands.tensors) if x.is_floating_point() or x.is_complex()]
    base = len(operands.tensors)
    slots = list(range(len(tensors)))
    slots += [base + moving.index(i) for i, a in enumerate(tensors) if a.is_floating_point() or a.is_complex()]
    slots += [operands.slot(x) for x in traced.captured]
    types = [*operands.types(), *(type_of(_plain(operands.tensors[i])) for i in moving)]
    return rewire(traced.trace, slots, types)


def _watched_apply(_: object) -> classmethod:
    """`Function.apply` ends in its base's: that one is replaced, since a program may hold `F.apply` from before."""

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        recorder = recording()
        if recorder is not None and tracing() and not kwargs:
            return record_function(cls, args, recorder)
        return super(_BASE, cls).apply(*args, **kwargs)  # type: ignore[misc]

    return classmethod(apply)


_BASE = torch.autograd.function._SingleLevelFunction
WATCHED.append((_BASE, "apply", _watched_apply))


# --- custom_vjp in eager PyTorch ------------------------------------------------------------------


def eager_custom_vjp(func: Callable, fwd: Callable, bwd: Callable, args: tuple) -> object:
    """The call as eager autograd and torch.func see it."""
    leaves, spec = pytree.tree_flatten(args)
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) or not torch.is_grad_enabled():
        return func(*args)
    shape: dict[str, object] = {}

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*flat: object) -> tuple:
            out, residuals = fwd(*pytree.tree_unflatten(list(flat), spec))
            outs, shape["out"] = pytree.tree_flatten(out)
            kept, shape["residuals"] = pytree.tree_flatten(residuals)
            shape["count"] = len(outs)
            # autograd wants fresh results: a residual that is an argument is handed on as a view
            return tuple(x.view_as(x) if isinstance(x, torch.Tensor) else x for x in (*outs, *kept))

        @staticmethod
        def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
            kept = output[shape["count"] :]  # type: ignore[misc]
            ctx.places = [i for i, x in enumerate(kept) if isinstance(x, torch.Tensor)]
            ctx.others = [None if isinstance(x, torch.Tensor) else x for x in kept]
            ctx.save_for_backward(*(x for x in kept if isinstance(x, torch.Tensor)))

        @staticmethod
        def backward(ctx, *cts: torch.Tensor) -> tuple:  # noqa: ANN001
            kept = list(ctx.others)
            for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
                kept[i] = x
            residuals = pytree.tree_unflatten(kept, shape["residuals"])  # type: ignore[arg-type]
            outs = pytree.tree_unflatten(list(cts[: shape["count"]]), shape["out"])  # type: ignore[arg-type,misc]
            return tuple(_spread_grads(bwd, args)(residuals, outs))

    made = Function.apply(*leaves)
    return pytree.tree_unflatten(list(made[: shape["count"]]), shape["out"])  # type: ignore[arg-type,misc]
