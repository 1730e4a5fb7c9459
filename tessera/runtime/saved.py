"""What a graph's forward saved, as its backward reads it.

In: the context of a graph, and what its bridge says of saved values. Out: those values in order, numbers among them,
then the proxies. PyTorch checks that nobody has written a saved tensor since. Where some results alone are
differentiated, only what their gradients read is looked at, as in eager, which has a node for every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from tessera.runtime.proxies import Context
from tessera.torch_internals.autograd import raw_saved, unpacks_one_by_one, version_of
from tessera.torch_internals.operators import OpOverload

Restore = Callable[..., list]


def as_read(saved: Sequence[torch.Tensor], own: Sequence[int]) -> list[torch.Tensor]:
    """What is saved, with the leaves at these places as forward reads them: a detached tensor shares the count of
    writes, and keeps its memory and sizes where somebody assigns to the leaf's `.data`. Tensors that are no leaves are
    needed themselves, for their history."""
    saved = list(saved)
    for k in own:
        if saved[k].is_leaf:
            saved[k] = saved[k].detach()
    return saved


class Held(torch.autograd.Function):
    """What a leaf held when forward read it, with the leaf's history."""

    @staticmethod
    def forward(ctx, leaf, contents):  # noqa: ANN001, ANN205
        return contents.detach()

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return grad, None


def of_leaf(leaf: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
    """The leaf itself, unless somebody assigned to its `.data` since."""
    return leaf if leaf.data_ptr() == contents.data_ptr() else Held.apply(leaf, contents)  # type: ignore[return-value]


def tied(
    saved: Sequence[torch.Tensor], results: Sequence[object], shares: Sequence[tuple[int, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Saved tensors that lie in the memory of results, so that whoever writes the result is seen to have written them.

    To autograd they are tensors of their own, since programs run below it. A detached tensor shares the count of writes
    and does not hold the result; further results are saved beside the others, only to be looked at.
    """
    saved, beside = list(saved), []
    for k, places in shares:
        one = saved[k]
        sharing = [t for i in places if isinstance(t := results[i], torch.Tensor) and _same_memory(t, one)]
        if sharing:
            saved[k] = _in_memory_of(sharing[0].detach(), one)
            beside += sharing[1:]
    return [*saved, *beside]


def _in_memory_of(result: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """A view of the result that is this tensor: of its type too, where it is the real part of complex numbers, say."""
    if result.dtype != one.dtype or _turned(result) or _turned(one):
        bare = _turn(result, _turned(result))
        memory = bare.as_strided((bare.untyped_storage().nbytes() // bare.itemsize,), (1,), 0).view(one.dtype)
        return _turn(memory.as_strided(one.size(), one.stride(), one.storage_offset()), _turned(one))
    return result.as_strided(one.size(), one.stride(), one.storage_offset())


def _turned(x: torch.Tensor) -> tuple[OpOverload, ...]:
    """What its readers do to each element of its memory."""
    return (torch.ops.aten._conj.default,) * x.is_conj() + (torch.ops.aten._neg_view.default,) * x.is_neg()


def _turn(x: torch.Tensor, how: Sequence[OpOverload]) -> torch.Tensor:
    for view in how:
        x = view(x)
    return x


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is not b and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def restoring(
    tensors: tuple[int, ...], numbers: tuple[int, ...], own: tuple[int, ...], proxies: bool = False
) -> Restore:
    """`restore(ctx)`: what forward saved, then the proxies. What saved nothing may run twice, as in eager.

    `restore(ctx, needed)` is for a caller that reads the values at these places alone: of the others, which may have
    been written, it learns the sizes.
    """
    in_order, count, whole = not numbers, len(tensors), len(tensors) + len(numbers)

    def restore(ctx: Context, needed: Collection[int] | None = None) -> list:
        try:
            saved = ctx.saved_tensors if count or proxies else ()  # type: ignore[attr-defined]
        except RuntimeError:
            if needed is None or not unpacks_one_by_one:
                raise
            saved = some(ctx, needed)
        if in_order:
            return list(saved)
        merged: list = [None] * whole
        for position, t in zip(tensors, saved[:count], strict=True):
            merged[position] = t
        for position, n in zip(numbers, ctx.numbers, strict=True):  # type: ignore[attr-defined]
            merged[position] = n
        return [*merged, *saved[count:]]

    def some(ctx: Context, needed: Collection[int]) -> list[torch.Tensor | None]:
        each = raw_saved(ctx)
        unpacked = [one.data if isinstance(one.data, torch.Tensor) else None for one in each]
        for k, (position, one) in enumerate(zip(tensors, each, strict=False)):
            if position in needed:
                unpacked[k] = one.unpack() if own[position] >= 0 else _computed(ctx, one.data)
        return unpacked

    return restore


def _computed(ctx: Context, data: torch.Tensor) -> torch.Tensor:
    """What the graph itself made, which it counts no writes of: any that are counted came later."""
    if version_of(data):
        return ctx.saved_tensors  # type: ignore[attr-defined]  # raises, and says what was written
    return data
