"""The words that rules of operators with sub-traces are made of.

A sub-trace has no constants: all it reads are operands. The functions here differentiate or batch one and put its
equations where the active builder stands (`pull`, `push`, `rows`, `splice`), or make a new one (`sub_trace`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import ACTIVE, Arg, Special, Value
from tessera.ir.replay import sweep
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType, Type, contiguous_strides
from tessera.ops.fallback import conform
from tessera.ops.families import carry
from tessera.torch_internals.fake import FakeTensorMode
from tessera.transforms.jvp import jvp
from tessera.transforms.vjp import Joint, vjp
from tessera.transforms.vmap import vmap

Values = Sequence[Value]


def _builder() -> Builder:
    return ACTIVE[-1]  # type: ignore[return-value]


def active_mode() -> FakeTensorMode:
    return _builder().mode


def randomness() -> str:
    """What the batching at work says about random numbers."""
    return _builder().randomness


def emit(op: Special, *args: Arg, types: Sequence[Type]) -> list[Value]:
    return _builder().record(op, args, {}, list(types))  # type: ignore[return-value]


def splice(trace: Trace, args: Sequence[Arg]) -> list[Arg]:
    """The equations of a sub-trace here, on these arguments, in the layouts it was traced for."""
    fitted = [conform(a, v.tensor) if _is_tensor(a) else a for a, v in zip(args, trace.inputs, strict=True)]  # type: ignore[arg-type]
    return _builder().inline(trace, fitted, here=True)


def sub_trace(name: str, types: Sequence[Type], body: Callable[..., Sequence[Arg]]) -> Trace:
    """A new sub-trace: `body` says what it computes from inputs of these types."""
    builder = Builder(name, _builder().mode)
    builder.again = _builder().again
    inputs = [builder.input(f"x{i}", t) for i, t in enumerate(types)]
    with builder:
        outputs = list(body(*inputs))
    return sweep(builder.finish(outputs))


def _is_tensor(a: object) -> bool:
    return isinstance(a, Value) and isinstance(a.type, TensorType)


def floats(v: Arg) -> bool:
    return isinstance(v, Value) and v.is_differentiable


def types_of(values: Sequence[Arg]) -> list[Type]:
    return [v.type for v in values]  # type: ignore[union-attr]


def plain_type(t: TensorType) -> TensorType:
    """The type of a cotangent or a tangent: contiguous, whatever made it."""
    return TensorType(t.dtype, t.shape, contiguous_strides(t.shape), t.device)


def zeros(t: TensorType) -> Value:
    return aten.zeros(list(t.shape), dtype=t.dtype, device=t.device)


def filled(t: Arg | None, like: Value) -> Value:
    """A tangent or cotangent that is there, contiguous."""
    return zeros(like.tensor) if t is None else conform(t, plain_type(like.tensor))  # type: ignore[arg-type]


def pull(trace: Trace, operands: Values, cts: Sequence[Value | None], wrt: Sequence[bool]) -> list[Value | None]:
    """Gradients of a sub-trace's outputs by the operands wanted, computing its forward again here."""
    wanted = [v for v, w in zip(trace.inputs, wrt, strict=True) if w]
    seeds: dict[Value, Value] = {}
    for out, ct in zip(trace.outputs, cts, strict=True):
        if floats(out) and ct is not None:
            seeds[out] = aten.add(seeds[out], ct) if out in seeds else ct  # type: ignore[index]
    # outputs that a formula renames keep their order among the results
    heads = list(dict.fromkeys(v for v in trace.results() if v in seeds))
    joint = vjp(trace, wanted, _builder().mode, pull=heads, again=_builder().again)
    names = [v for v in heads if _pulled(joint, trace, v)]
    outs = splice(joint.trace, [*operands, *(seeds[v] for v in names)])
    grads = iter(outs[len(trace.outputs) :])
    return [next(grads) if w else None for w in wrt]  # type: ignore[misc]


def _pulled(joint: Joint, trace: Trace, v: Value) -> bool:
    """Whether this output of the trace got a cotangent input, under whatever name the joint trace gives it."""
    place = trace.outputs.index(v)
    return joint.trace.outputs[place] in joint.pulled


def push(trace: Trace, operands: Values, tangents: Sequence[Value | None]) -> tuple[list[Value], list[Value | None]]:
    """Results of a sub-trace and their tangents, computed here."""
    moving = [v for v, t in zip(trace.inputs, tangents, strict=True) if t is not None]
    pushed = jvp(trace, moving, _builder().mode)
    outs = splice(pushed, [*operands, *(t for t in tangents if t is not None)])
    count = len(trace.outputs)
    return outs[:count], outs[count:]  # type: ignore[return-value]


def rows(trace: Trace, on: Sequence[bool], operands: Values, size: Size) -> list[Value]:
    """Results of a sub-trace over a batch, all of them with the batch at dimension 0."""
    batched = {v: (a.tensor, 0) for v, a, b in zip(trace.inputs, operands, on, strict=True) if b}
    batch = vmap(trace, batched, size, _builder().mode, randomness="different")
    outs = _builder().inline(batch.trace, operands, here=True)
    return [carry(o, b, size) for o, b in zip(outs, batch.on, strict=True)]  # type: ignore[arg-type]


def agreed(values: Sequence[Arg], types: Sequence[Type]) -> list[Arg]:
    """Results in the layout that every branch, or every turn of a loop, has to give."""
    return [conform(v, t) if isinstance(t, TensorType) else v for v, t in zip(values, types, strict=True)]  # type: ignore[arg-type]


def batch_type(t: Type, size: Size) -> TensorType:
    assert isinstance(t, TensorType)
    return plain_type(TensorType(t.dtype, (size, *t.shape), (), t.device))
