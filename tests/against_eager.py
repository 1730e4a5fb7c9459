"""A program beside eager's: values, strides, gradients, `requires_grad`, None against zeros, what inputs hold after.

`assert_like_eager(fn, make)` runs `fn(*make())` and `tessera.jit(fn)(*make())`, each with inputs of its own, gives
every result that asks for gradients a cotangent, and compares all that a caller can see.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor
from torch.utils import _pytree as pytree

import tessera

Seen = list[tuple[str, object]]

# How a program is compiled: by every test of this kind in each of these ways.
WAYS: dict[str, dict] = {
    "dynamo": {},
    "functional": {"frontend": "functional", "executors": ["aten"]},
}


class Programs(dict[str, Callable]):
    """Programs by their names; a decorator enters them."""

    def __call__(self, fn: Callable) -> Callable:
        self[fn.__name__] = fn
        return fn


def assert_like_eager(fn: Callable, make: Callable[[], list], **options: object) -> Callable:
    """Gives the compiled function."""
    torch._dynamo.reset()
    fast = tessera.jit(fn, **{"strict": True, **options})
    for (what, want), (_, got) in zip(seen(fn, make()), seen(fast, make()), strict=True):
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text, what=what: f"{what}: {text}")
        else:
            assert got == want, f"{what}: {got}, eager gives {want}"
    return fast


def seen(fn: Callable, inputs: list) -> Seen:
    """What a caller sees of a call and of the backward after it."""
    given = [x.clone() if isinstance(x, Tensor) else x for x in inputs]  # so that inputs may be written
    torch.manual_seed(1)
    results = [x for x in pytree.tree_leaves(fn(*given)) if isinstance(x, Tensor)]
    inside = [x for x in given if isinstance(x, Tensor)]
    found: Seen = []
    for kind, tensors in (("result", results), ("input", inside)):
        for i, x in enumerate(tensors):
            found += [(f"{kind} {i}", x.detach().clone()), (f"requires_grad of {kind} {i}", x.requires_grad)]
            found += [(f"strides of {kind} {i}", x.stride())]
    heads = [x for x in (*results, *inside) if x.requires_grad]
    if heads:
        torch.manual_seed(2)
        sum((x * torch.rand_like(x)).sum().abs() for x in heads).backward()  # type: ignore[union-attr]
    leaves = [x for x in inputs if isinstance(x, Tensor)]
    return found + [(f"gradient of input {i}", x.grad) for i, x in enumerate(leaves)]
