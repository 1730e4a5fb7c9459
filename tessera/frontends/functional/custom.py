"""`custom_vjp` functions, which bring a derivative of their own, recorded as one equation each.

In: a call of such a function inside a traced program. Out: an equation that holds what the call computes and its
derivative as sub-traces. Both are traced where the call stands, so what they close over of the surrounding program
becomes an operand. (`function` does the same for a `torch.autograd.Function`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.frontends.functional.trace import Traced, mode_for, trace_function
from tessera.ir import fake
from tessera.ir.equation import Arg, Value, map_values
from tessera.ir.record import Recorder
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, Type, contiguous_strides, symbol_of, type_of
from tessera.ops.custom import CUSTOM_VJP
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError, InputError


def rewire(trace: Trace, slots: Sequence[int], types: Sequence[Type]) -> Trace:
    """The trace with inputs of these types; what was its i-th input is now input number `slots[i]`. Sizes are read off
    the inputs: a tensor that was closed over brings its own before anything is computed."""
    inputs: dict[int, Value] = {}
    rename: dict[Value, Value] = {}
    for v, slot in zip(trace.inputs, slots, strict=True):
        rename[v] = inputs.setdefault(slot, v)
    taken = {v.name for v in trace.values()}
    spare = (f"unused{i}" for i in range(len(types) + len(taken)))
    full = [inputs.get(i) or Value(next(n for n in spare if n not in taken), t) for i, t in enumerate(types)]
    outputs = tuple(map_values(o, lambda v: rename.get(v, v)) for o in trace.outputs)
    symbols = {name: (rename.get(v, v), d) for name, (v, d) in trace.symbols.items()} | _sizes(full)
    equations = tuple(e.substitute(rename) for e in trace.equations)
    return sweep(trace.with_(inputs=tuple(full), equations=equations, outputs=outputs, symbols=symbols))


def _sizes(inputs: Sequence[Value]) -> dict[str, tuple[Value, int | None]]:
    """Where symbols are dimensions of an input."""
    tensors = [(v, v.type) for v in reversed(inputs) if isinstance(v.type, TensorType)]
    found = [(symbol_of(n), (v, d)) for v, t in tensors for d, n in enumerate(t.shape) if isinstance(n, torch.SymInt)]
    return {name: place for name, place in found if name}


class Operands:
    """The tensors an equation reads: its arguments in order, then what it closes over, each once.

    The first `moving` of them are others at each turn of a loop: what is closed over is none of these, also where a
    loop begins with the same tensor.
    """

    def __init__(self, args: tuple, moving: int = 0) -> None:
        self.tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        self.moving = moving

    def slot(self, x: torch.Tensor) -> int:
        for i, known in enumerate(self.tensors[self.moving :], self.moving):
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
    """What a trace gives, without data: fake tensors for values, other results as they are."""
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
    fakes = examples(second.trace.outputs, second.trace.outputs)
    residuals = pytree.tree_unflatten([fakes[i] for i in res_places], res_spec)
    cts = pytree.tree_unflatten([seed_like(fakes[i]) for i in out_places], out_spec)
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
    outs = recorder.special(
        CUSTOM_VJP,
        (plain, forward, backward, *operands.tensors),
        {},
        [v.type for v in plain.outputs],  # type: ignore[union-attr]
    )
    given = iter(outs)
    return first.pack([next(given) if isinstance(o, Value) else o for o in first.trace.outputs])


def seed_like(x: object) -> object:
    """A fake cotangent or tangent of a tensor: contiguous."""
    if isinstance(x, torch.Tensor):
        with fake.alone():
            t = type_of(x)
            return fake.fake_of(TensorType(t.dtype, t.shape, contiguous_strides(t.shape), t.device), mode_for([]))  # type: ignore[union-attr]
    return x


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
    trace = rewire(trace, slots, [*saved, *cotangents])
    live = [i for i, t in enumerate(results) if t.is_differentiable]  # type: ignore[union-attr]
    if len(live) != n_ct:  # cotangents of whole numbers are not passed
        keep = [*trace.inputs[: len(saved)], *(trace.inputs[len(saved) + i] for i in live)]
        trace = trace.with_(inputs=tuple(keep))
    return trace.with_(outputs=_by_operand(trace.outputs, operands, args))


def _by_operand(grads: Sequence[Arg], operands: Operands, args: tuple) -> tuple:
    """One gradient for each operand: those of the arguments; what was closed over gets none."""
    by_argument = [g for x, g in zip(pytree.tree_leaves(args), grads, strict=True) if isinstance(x, torch.Tensor)]
    return (*by_argument, *[None] * (len(operands.tensors) - len(by_argument)))


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

    outs = Function.apply(*leaves)
    return pytree.tree_unflatten(list(outs[: shape["count"]]), shape["out"])  # type: ignore[arg-type,misc]
