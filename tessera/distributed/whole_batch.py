"""A captured loss or call over a microbatch, set beside the same one over the whole batch.

In: both, as they were captured. Out: the program over a microbatch as it must be written so that the mean over all
microbatches is what the whole batch gives. Where a size of the batch is another size too, such as as many rows as
there are columns, simplifying has made two programs of one: then they are compared as they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from tessera.distributed.capture import Forward, simplified
from tessera.distributed.stateless import attributes_kept
from tessera.ir.call import in_place
from tessera.ir.equation import NOWHERE, Value
from tessera.ir.types import TensorType, contiguous_strides
from tessera.transforms.pipelined.rows import Seen
from tessera.transforms.pipelined.whole_loss import Written, written
from tessera.util.errors import OptionError

OTHER = Seen("a program that depends on how many rows there are", NOWHERE)


def over_whole_batch(
    part: Forward,
    whole: Forward,
    microbatches: int,
    batch: Sequence[Value] = (),
    buffers: Collection[Value] = (),
    pulled: bool = True,
) -> Written:
    found = written(in_place(part.trace), in_place(whole.trace), microbatches, batch, buffers, pulled)
    if found is not None:
        return found
    found = written(in_place(part.recorded), in_place(whole.recorded), microbatches, batch, buffers, pulled)
    return Written(part.trace, None, (OTHER,)) if found is None else replace(found, trace=simplified(found.trace))


def steady(forward: Forward, other: Forward) -> frozenset[int]:
    """The caller's outputs whose first dimension is the same over a batch of other rows, though it is as long."""
    rows = _numbers(v.shape[:1] for v in forward.batch)
    pairs = enumerate(zip(forward.outputs, other.outputs, strict=False))
    return frozenset(
        i
        for i, (v, there) in pairs
        if isinstance(v, Value) and isinstance(there, Value) and v.ndim and there.ndim == v.ndim
        and isinstance(v.shape[0], int) and v.shape[0] in rows and v.shape[0] == there.shape[0]
    )  # fmt: skip


def refuse_steady(part: Forward, whole: Forward, who: str) -> None:
    """Of microbatches only rows can be put together."""
    for i in steady(part, whole):
        raise OptionError(
            f"{who}: a pipeline cuts the batch into microbatches; expected results that have its rows, got "
            f"{part.outputs[i].type}, which is as long by chance"
        )


def with_steady(
    model: nn.Module, forward: Forward, types: Mapping[int, TensorType], again: Callable[[dict], Forward]
) -> Forward:
    """Where something else than the batch is as long as it has rows, the program is captured `again`, over twice as
    many rows, which shows what results have them."""
    rows = _numbers(v.shape[:1] for v in forward.batch)
    held = (*forward.weights.values(), *forward.buffers.values())
    others = _numbers((*(v.shape for v in held), *(v.shape[1:] for v in forward.batch)))
    given = _numbers(v.shape[:1] for v in forward.outputs if isinstance(v, Value))
    if not rows & others & given:
        return forward
    try:
        with attributes_kept(model):
            other = again({i: _twice(t) for i, t in types.items()})
    except Exception:  # the model takes no other batch
        return forward
    return replace(forward, steady=steady(forward, other))


def _numbers(shapes: Iterable[Sequence[object]]) -> set[int]:
    return {n for shape in shapes for n in shape if isinstance(n, int)}


def _twice(type_: TensorType) -> TensorType:
    if not type_.shape:
        return type_
    shape = (2 * type_.shape[0], *type_.shape[1:])
    return TensorType(type_.dtype, shape, contiguous_strides(shape), type_.device)
