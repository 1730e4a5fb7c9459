"""If, Loop, Scan and SequenceMap: graphs that run under a condition or many times.

While a program is recorded, a branch that is known is put in its place, and turns that can be counted are written out.
A condition that only a run tells makes two sub-traces where both branches give the same types, else it is read at the
call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.frontends.functional import control
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.structure import Graph
from tessera.frontends.onnx.values import Untraceable, ValueNeeded, is_known, literal, number
from tessera.ir.record import recording
from tessera.util.errors import CaptureError, InputError

Tensor = torch.Tensor
UNROLLED = 8  # times `limits.unrolled` of turns in one program
_REFUSED = (ValueNeeded, Untraceable, CaptureError, InputError)


@operator("If")
def if_(condition: Tensor, *, then_branch: Graph, else_branch: Graph, context: Context) -> tuple:
    if not is_known(condition) and recording() is not None:
        try:
            return _both_branches(condition, then_branch, else_branch, context)
        except _REFUSED:
            pass  # the branches differ in their types: the condition is read
    return tuple(context.run(then_branch if number(condition) else else_branch, []))


def _both_branches(condition: Tensor, then_branch: Graph, else_branch: Graph, context: Context) -> tuple:
    def branch(graph: Graph):  # noqa: ANN202
        def run() -> list[Tensor]:
            return [_tensor(x) for x in context.run(graph, [])]

        return run

    return tuple(control.cond(condition.reshape(()), branch(then_branch), branch(else_branch), ()))  # type: ignore[arg-type]


def _tensor(x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise Untraceable("a branch gives something that is no tensor")
    return x.clone()


def _stacked(rows: list, graph: Graph, place: int, axis: int, context: Context) -> Tensor:
    """What a body gave at each turn, side by side."""
    if rows:
        return torch.stack(rows, axis)
    info = graph.outputs[place]
    inner = [n if isinstance(n, int) else 0 for n in info.shape or ()]
    dtype = torch.float32 if not info.element else context.interpreter.dtype(info.element)
    return torch.zeros([0, *inner], dtype=dtype, device=context.device)


@operator("Loop")
def loop(count: Tensor | None, condition: Tensor | None, *state: object, body: Graph, context: Context) -> tuple:
    turns = None if count is None else int(number(count))
    going = True if condition is None else bool(number(condition))
    carried, rows = list(state), [[] for _ in body.outputs[1 + len(state) :]]
    turn = 0
    while going and (turns is None or turn < turns):
        _turn(context, turn)
        given = literal(True, torch.bool) if condition is None and turn == 0 else condition
        out = context.run(
            body, [literal(turn, torch.int64), given if given is not None else literal(True, torch.bool), *carried]
        )
        condition, carried = out[0], out[1 : 1 + len(carried)]  # type: ignore[assignment]
        for row, x in zip(rows, out[1 + len(carried) :], strict=True):
            row.append(x)
        turn += 1
        going = bool(number(condition))
    stacked = [_stacked(row, body, 1 + len(carried) + i, 0, context) for i, row in enumerate(rows)]
    return (*carried, *stacked)


def _turn(context: Context, turn: int) -> None:
    """One turn more. Turns of loops in loops count together."""
    interpreter, limits = context.interpreter, context.limits
    interpreter.turns += 1
    if recording() is not None:
        if turn >= limits.unrolled or interpreter.turns > UNROLLED * limits.unrolled:
            raise Untraceable(f"loops of more than {limits.unrolled} turns")
    elif interpreter.turns > limits.loop_turns:
        raise OnnxError(
            f"{context.node}: more than {limits.loop_turns} turns; tessera.onnx.load(..., limits=) takes another limit"
        )


@operator("Scan", 9)
def scan(
    *inputs: Tensor,
    body: Graph,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[int] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[int] | None = None,
    context: Context,
) -> tuple:
    held = len(inputs) - num_scan_inputs
    axes = scan_input_axes or [0] * num_scan_inputs
    backwards = scan_input_directions or [0] * num_scan_inputs
    given = [x.flip(a) if b else x for x, a, b in zip(inputs[held:], axes, backwards, strict=True)]
    carried, rows = _turns(list(inputs[:held]), given, axes, body, context)
    out_axes = scan_output_axes or [0] * len(rows)
    reverse = scan_output_directions or [0] * len(rows)
    stacked = []
    for i, (row, axis, back) in enumerate(zip(rows, out_axes, reverse, strict=True)):
        stacked.append(_stacked(row[::-1] if back else row, body, held + i, axis, context))
    return (*carried, *stacked)


def _turns(
    carried: list, given: Sequence[Tensor], axes: Sequence[int], body: Graph, context: Context
) -> tuple[list, list[list]]:
    length = given[0].shape[axes[0]] if given else 0
    if recording() is not None and length > context.limits.unrolled:
        raise Untraceable(f"a loop of more than {context.limits.unrolled} turns")
    rows: list[list] = [[] for _ in body.outputs[len(carried) :]]
    for t in range(length):
        _turn(context, t)
        out = context.run(body, [*carried, *(x.select(a, t) for x, a in zip(given, axes, strict=True))])
        carried = out[: len(carried)]
        for row, x in zip(rows, out[len(carried) :], strict=True):
            row.append(x)
    return carried, rows


@operator("Scan", 8, 8)
def scan_of_batch(
    lengths: Tensor | None,
    *inputs: Tensor,
    body: Graph,
    num_scan_inputs: int,
    directions: list[int] | None = None,
    context: Context,
) -> tuple:
    """Every example of a batch by itself, along the second dimension."""
    if lengths is not None:
        raise OnnxError(f"{context.node}: Scan of opset 8 with sequence_lens; use opset 9")
    results = []
    for example in range(inputs[0].shape[0]):
        results.append(
            scan(
                *(x[example] for x in inputs),
                body=body,
                num_scan_inputs=num_scan_inputs,
                scan_input_directions=directions,
                context=context,
            )
        )
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


@operator("SequenceMap", 17)
def sequence_map(first: list, *others: object, body: Graph, context: Context) -> tuple:
    results: list[list] = [[] for _ in body.outputs]
    for i, x in enumerate(first):
        out = context.run(body, [x, *(y[i] if isinstance(y, list) else y for y in others)])
        for column, value in zip(results, out, strict=True):
            column.append(value)
    return tuple(results)
