"""What can be seen of a call: values, types, layouts, autograd's flags, gradients, and who shares memory with whom.

`Observer.see(name=thing, …)` notes all of it; two runs of a program are the same if their notes are (`difference`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .prelude import LOG

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-8, torch.complex128: 1e-8}

# What must be eager's beside the values. Kernels choose layouts; a transform's results are new tensors; a batch that a
# training step writes has no history of that step, whose graph is gone. A sum of gradients lies as the first that came.
ALL = ("dtype", "shape", "requires_grad", "leaf", "memory", "same", "stride", "offset", "signs")
EXACT = {"tile": ALL[:6], "second": (*ALL[:6], "signs"), "transform": ALL[:3], "train": ALL[:2]}


@dataclass
class Note:
    """One tensor as it was."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    leaf: bool
    value: Tensor
    grad: Tensor | None
    offset: int
    memory: str = ""  # the first thing seen that shares its memory
    same: str = ""  # the first thing seen that is the same object


@dataclass
class Sight:
    tensors: dict[str, Note] = field(default_factory=dict)
    others: dict[str, object] = field(default_factory=dict)
    hooks: list[tuple[str, Tensor]] = field(default_factory=list)


class Observer:
    def __init__(self) -> None:
        self.sights: list[Sight] = []
        LOG.clear()

    def see(self, **things: object) -> None:
        sight = Sight()
        memory: dict[int, str] = {}
        objects: dict[int, str] = {}
        for path, leaf in leaves(things):
            if isinstance(leaf, Tensor):
                note = noted(leaf)
                note.memory = memory.setdefault(leaf.untyped_storage()._cdata, path)
                note.same = objects.setdefault(id(leaf), path)
                sight.tensors[path] = note
            else:
                sight.others[path] = leaf
        first: dict[str, int] = {}
        for note in sight.tensors.values():
            first[note.memory] = min(first.get(note.memory, note.offset), note.offset)
        for note in sight.tensors.values():
            note.offset -= first[note.memory]  # where the first of those that share memory lies is nobody's business
        sight.hooks = list(LOG)
        LOG.clear()
        self.sights.append(sight)


def leaves(things: dict[str, object]) -> list[tuple[str, object]]:
    found = []
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            found += [(f"{name}.{path}", x) for path, x in held(thing)]
        else:
            for path, leaf in pytree.tree_flatten_with_path(thing)[0]:
                found.append((name + pytree.keystr(path), leaf))
    return found


def held(module: nn.Module) -> list[tuple[str, object]]:
    """Parameters, buffers and attributes."""
    found: list[tuple[str, object]] = [*module.named_parameters(), *module.named_buffers()]
    plain = (Tensor, int, float, bool)
    return found + [(k, v) for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("_")]


def noted(x: Tensor) -> Note:
    with torch.no_grad():
        # Of a view that no_grad made of a tensor with a history, eager says that it is a leaf.
        leaf = x.is_leaf and not (x.requires_grad and x._is_view())
        value, grad = x.detach().clone(), x.grad if leaf else None
        # A stride along one element says nothing, nor does where a tensor without elements begins.
        stride = tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) if x.numel() else ()
        return Note(
            x.dtype, tuple(x.shape), stride, x.requires_grad, leaf, value,
            None if grad is None else grad.detach().clone(), x.storage_offset() if x.numel() else 0,
        )  # fmt: skip


# --- are two runs the same? ---


def difference(want: list[Sight], got: list[Sight], grain: float, exact: tuple[str, ...]) -> str:
    """How the second differs from the first, in words; empty if it does not."""
    for k, (w, g) in enumerate(zip(want, got, strict=False)):
        where = f"see {k + 1}: "
        if list(w.tensors) != list(g.tensors):
            return f"{where}expected {list(w.tensors)}, got {list(g.tensors)}"
        for path, note in w.tensors.items():
            if reason := unlike(note, g.tensors[path], grain, exact):
                return f"{where}{path}: {reason}"
        if str(w.others) != str(g.others):
            return f"{where}expected {w.others}, got {g.others}"
        if [name for name, _ in w.hooks] != [name for name, _ in g.hooks]:
            return f"{where}hooks: expected {[n for n, _ in w.hooks]}, got {[n for n, _ in g.hooks]}"
        for (name, a), (_, b) in zip(w.hooks, g.hooks, strict=True):
            if reason := far(a, b, grain):
                return f"{where}hook {name}: {reason}"
    return ""


def unlike(want: Note, got: Note, grain: float, exact: tuple[str, ...]) -> str:
    for name in exact:
        if name != "signs" and getattr(want, name) != getattr(got, name):
            return f"{name}: expected {getattr(want, name)}, got {getattr(got, name)}"
    if reason := far(want.value, got.value, grain, signs="signs" in exact):
        return reason
    if (want.grad is None) != (got.grad is None):
        return f"grad: expected {want.grad}, got {got.grad}"
    if want.grad is not None and got.grad is not None and (reason := far(want.grad, got.grad, grain)):
        return f"grad: {reason}"
    return ""


def far(want: Tensor, got: Tensor, grain: float, signs: bool = False) -> str:
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"expected {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(want, got) else f"expected\n{want}\ngot\n{got}"
    grain = max(grain, TOLERANCE.get(want.dtype, 1e-8))
    same = torch.allclose(want, got, rtol=grain, atol=grain, equal_nan=True)
    if same and signs and want.is_floating_point():
        zeros = (want == 0) & (got == 0)
        same = bool((torch.signbit(want) == torch.signbit(got))[zeros].all())
    return "" if same else f"expected\n{want}\ngot\n{got}"
