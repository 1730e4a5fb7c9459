"""What the literals of a program hold while it is recorded.

In: a call on fake tensors. Out: its result, whose `constant` is known where those of all its tensors are.

A fake tensor's `constant` is a real one: what a literal, or a result made of literals alone, holds now. Constants share
memory as the fake tensors do, so that a write through one reaches the others. A write of what only a run will tell
takes the constants of that memory away. PyTorch runs a call on constants beside the fake tensors, and gives new ones
that share nothing: it never sees constants where a result may share memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir.remembered import remembered
from tessera.ir.schema import schema_of
from tessera.torch_internals import pytree
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.operators import OpOverload

LARGEST = 1  # elements of a constant


def hold(tensor: torch.Tensor, constant: torch.Tensor) -> None:
    """`tensor` holds this, if it is small."""
    if constant.numel() <= LARGEST and isinstance(tensor, FakeTensor):
        tensor.constant = constant
        tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def forget(tensor: torch.Tensor) -> None:
    """Nobody knows what lies in the memory of `tensor` any more."""
    if (constant := constant_of(tensor)) is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(constant)  # type: ignore[attr-defined]


def constant_of(tensor: object) -> torch.Tensor | None:
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def call(rule: Callable, op: OpOverload, args: tuple, kwargs: dict) -> tuple[object, bool]:
    """`rule(*args, **kwargs)` on fake tensors, and whether the constants were computed too, by `op`."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    constants = [constant_of(x) for x in tensors]
    if all(c is None for c in constants):
        return remembered(rule, op, tensors, args, kwargs), False
    if _tells(op):
        return rule(*args, **kwargs), False
    known = dict(zip(map(id, tensors), constants, strict=True))
    for x in tensors:
        x.constant = None  # type: ignore[attr-defined]
    try:
        out = rule(*args, **kwargs)
    finally:
        for x in tensors:
            x.constant = known[id(x)]  # type: ignore[attr-defined]
    if any(c is None for c in constants) or schema_of(op).random:
        return out, False
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: known[id(x)], (args, kwargs))
    with disable_current_modes():
        real = op(*args, **kwargs)
    for tensor, constant in zip(pytree.tree_leaves(out), pytree.tree_leaves(real), strict=True):
        if isinstance(constant, torch.Tensor):
            hold(tensor, constant)
    return out, True


def _tells(op: OpOverload) -> bool:
    """Its result is a number, or has a shape, that only constants tell; it shares no memory."""
    asks = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return asks or not any("Tensor" in kind for kind in schema_of(op).returns)
