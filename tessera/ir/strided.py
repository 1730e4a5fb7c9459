"""as_strided and its kin, recorded over values instead of memory.

In: a call of `as_strided`, `as_strided_copy` or `as_strided_scatter` while a program is recorded. They address memory:
how an element is found depends on where the tensor lies in its storage, and a view may reach what it does not show.
Out: the same call on a vector and without an offset. The vector is the memory of the nearest tensor that holds every
address, element after element. What such a call means depends on the vector's values alone, so that it can be written
through, differentiated and batched like any other operator. What cannot be put so is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.ir.recording import Recording
from tessera.ir.schema import bind
from tessera.ir.types import Size, is_dense, row_major, size_key
from tessera.ir.views import PARTS, PERMUTES, REPEATS, RESHAPES
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.errors import CaptureError

# Views that only choose and order elements: what they show lies in their parent's memory as it is.
_GEOMETRY = PARTS | PERMUTES | RESHAPES | REPEATS | {"alias"}


def record_strided(recorder: Recording, func: OpOverload, args: tuple, kwargs: dict) -> object:
    """The result of the call, recorded."""
    (x, *part, size, stride, offset), _ = bind(func, args, kwargs)
    assert isinstance(x, torch.Tensor)
    size, stride = list(size), list(stride)  # type: ignore[call-overload]
    start = x.storage_offset() if offset is None else offset
    if not part:
        owner = _owner(recorder, x, size, stride, start)  # type: ignore[arg-type]
    elif _holds(x, size, stride, start):  # type: ignore[arg-type]
        owner = x
    else:
        raise _refused(func, "it writes what its argument does not hold")
    with recorder:
        memory, back = _memory(owner)
        at = start - owner.storage_offset()  # type: ignore[operator]
        rest = memory if _is_zero(at) else memory[at:]
    op = torch.ops.aten.as_strided_scatter.default if part else torch.ops.aten.as_strided.default
    call = (rest, *part, size, stride)
    out = recorder.pure(op, call, {}, recorder.outcome(op, call, {}))
    assert isinstance(out, torch.Tensor)
    with recorder:
        if part:
            return back(out if rest is memory else torch.slice_scatter(memory, out, 0, at))  # type: ignore[arg-type]
        return out.clone(memory_format=torch.contiguous_format) if op_name(func) == "as_strided_copy" else out


def _owner(recorder: Recording, x: torch.Tensor, size: list, stride: list, start: Size) -> torch.Tensor:
    """The nearest tensor, going up from `x`, that holds every address."""
    ref = recorder.ref(x)
    while not _holds(ref.tensor, size, stride, start) or ref.tensor.dtype != x.dtype:
        view = ref.view
        if view is None or op_name(view.op) not in _GEOMETRY or view.no_grad:
            raise _refused(view.op if view else "as_strided", "it reaches memory that no tensor of the program holds")
        ref = view.parent
    return ref.tensor


def _refused(what: object, why: str) -> CaptureError:
    return CaptureError(f"{what}: {why}, or not for sure; the graph that holds it runs eagerly")


def _holds(t: torch.Tensor, size: Sequence[Size], stride: Sequence[Size], start: Size) -> bool:
    """Every address is that of an element of `t`, and each of its elements lies in memory once, with no gaps."""
    first = t.storage_offset()
    if _static((*size, *stride, start, *t.shape, *t.stride(), first)):
        if 0 in size:
            return True
        return is_dense(t.shape, t.stride()) and first <= start and start + _reach(size, stride) < first + t.numel()  # type: ignore[operator]
    # Sizes that are not known: PyTorch has checked that a tensor's whole memory holds it.
    whole = t.untyped_storage().nbytes() // t.element_size()
    return _is_plain(t) and _is_zero(first) and size_key(whole) == size_key(t.numel())


def _memory(t: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A tensor's elements as they lie in memory, and the way back from such a vector."""
    if t.ndim == 1 and _is_plain(t):
        return t, lambda vector: vector
    if _is_plain(t):
        shape = list(t.shape)
        return t.reshape([-1]), lambda vector: vector.reshape(shape)
    order = sorted(range(t.ndim), key=lambda d: (-t.stride(d), -t.shape[d]))
    back = [order.index(d) for d in range(t.ndim)]
    ordered = t.permute(order)
    shape = list(ordered.shape)
    return ordered.reshape([-1]), lambda vector: vector.reshape(shape).permute(back)


def _is_plain(t: torch.Tensor) -> bool:
    """Row after row, without gaps."""
    return row_major(tuple(t.shape), t.stride())


def _reach(size: Sequence[Size], stride: Sequence[Size]) -> int:
    """The last address, counted from the first; -1 where there is none."""
    if 0 in size:
        return -1
    return sum((n - 1) * s for n, s in zip(size, stride, strict=True))  # type: ignore[misc]


def _static(sizes: Sequence[object]) -> bool:
    return all(type(n) is int for n in sizes)


def _is_zero(n: object) -> bool:
    return type(n) is int and n == 0
