"""What the text of a random program may name: tensors made from a seed, functions with derivatives of their own, hooks.

`NAMES` is the scope that a program runs in. Everything here is deterministic: a program is its text alone.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from types import CellType, FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "i32": torch.int32,
    "b": torch.bool, "c128": torch.complex128,
}  # fmt: skip


def t(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, special: bool = False) -> Tensor:
    """A tensor of this shape whose numbers follow from the seed; `special`: some are ±0.0, ±inf or NaN."""
    source = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=source) < 0.6
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-3, 4, shape, generator=source).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, generator=source, dtype=wide).to(dtype)
    if special and x.numel():
        odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0]).to(dtype)
        picked = odd[torch.randint(0, 6, shape, generator=source)]
        x = torch.where(torch.rand(shape, generator=source) < 0.3, picked, x)
    return x


def floats(out: object) -> list[Tensor]:
    """The tensors of a result that a gradient can begin at."""
    found = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    return list({id(x): x for x in found}.values())


def loss(out: object, *places: int) -> Tensor:
    """A number made of all, or of some, of the tensors of a result that have a gradient."""
    found = floats(out)
    chosen = [found[i % len(found)] for i in places] if places and found else found
    parts = [((x.abs() if x.is_complex() else x).double() * (i + 1.5)).sum() for i, x in enumerate(chosen)]
    return sum(parts, torch.zeros((), dtype=torch.float64))  # type: ignore[return-value]


def backward(out: object, *places: int, keep: bool = False) -> None:
    """Gradients of all, or of some, of what a call gave."""
    if floats(out):
        loss(out, *places).backward(retain_graph=keep)


def apart(out: object, *given: object) -> list[Tensor]:
    """Tensors of a result, and arguments that are no views, that have a history and share memory with no other one."""
    theirs = [x for x in given if isinstance(x, Tensor)]
    found = [*floats(out), *(x for x in floats(given) if not x._is_view())]
    count = Counter(x.untyped_storage().data_ptr() for x in {id(x): x for x in [*found, *theirs]}.values())
    own = {id(x): x for x in found if not x.is_leaf and count[x.untyped_storage().data_ptr()] == 1}
    return list(own.values())


def retain(own: list[Tensor]) -> None:
    for x in own:
        x.retain_grad()


def kept(own: list[Tensor]) -> list[Tensor | None]:
    return [None if x.grad is None else x.grad.clone() for x in own]


def by_each(out: object, own: list[Tensor], *places: int, keep: bool = False) -> object:
    """The gradient of what a call gave by these of its results."""
    return torch.autograd.grad(loss(out, *places), own, allow_unused=True, retain_graph=keep) if own else None


def hook(own: list[Tensor], fn: Callable) -> None:
    for x in own:
        x.register_hook(fn)


def outs(out: object) -> tuple[Tensor, ...]:
    """The tensors of a result that float."""
    return tuple(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())


def total(out: object) -> Tensor:
    """One number made of all tensors that float."""
    parts = [(x.double() * (i + 1.5)).sum() for i, x in enumerate(outs(out))]
    return sum(parts, torch.zeros((), dtype=torch.float64))  # type: ignore[return-value]


class Scale(torch.autograd.Function):
    """Its gradient is not its derivative, so that one can tell whose formula ran."""

    @staticmethod
    def forward(ctx, x: Tensor, k: float) -> Tensor:  # noqa: ANN001
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple:  # noqa: ANN001
        return g * (ctx.k + 1), None

    @staticmethod
    def plain(x: Tensor, k: float) -> Tensor:
        return x * k


class Gate(torch.autograd.Function):
    """Saves tensors, gives two results of which one has no gradient, and asks what is needed."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        ctx.save_for_backward(x, y)
        sign = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(sign)
        return x * torch.sigmoid(y), sign

    @staticmethod
    def backward(ctx, g: Tensor, _: object) -> tuple:  # noqa: ANN001
        x, y = ctx.saved_tensors
        s = torch.sigmoid(y)
        return (g * s if ctx.needs_input_grad[0] else None), (g * x * s * (1 - s) if ctx.needs_input_grad[1] else None)

    @staticmethod
    def plain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * torch.sigmoid(y), (x > 0).to(x.dtype)


class Cube(torch.autograd.Function):
    """As torch.func wants one: saves its argument and its result, and may be mapped and differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3, x * 2

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:  # noqa: ANN001
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, g: Tensor, h: Tensor) -> Tensor:  # noqa: ANN001
        x, twice = ctx.saved_tensors
        return g * x * twice + h

    @staticmethod
    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        return x**3, x * 2


class Over(torch.autograd.Function):
    """Writes its argument, and makes no zeros of a gradient that did not come."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x.mul_(2), y * (3 if torch.is_grad_enabled() else 5)

    @staticmethod
    def backward(ctx, g: Tensor | None, h: Tensor | None) -> tuple:  # noqa: ANN001
        (y,) = ctx.saved_tensors
        return (None if g is None else g * 3), (None if h is None else h * y)


class Filled(Over):
    """The same with zeros for a gradient that did not come."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        out = Over.forward(ctx, x, y)
        ctx.set_materialize_grads(True)
        return out


def called(fn: Callable, *args: object, use_reentrant: bool) -> object:  # noqa: ARG001
    """What a checkpoint computes, without one."""
    return fn(*args)


def on_copies(fn: Callable, *args: object, use_reentrant: bool) -> object:
    """A checkpoint on copies of all that it reads, which nobody can write later."""

    def copied(x: object) -> object:
        return x.clone() if isinstance(x, Tensor) else x

    cells = tuple(CellType(copied(cell.cell_contents)) for cell in fn.__closure__ or ())
    again = FunctionType(fn.__code__, fn.__globals__, closure=cells)
    return checkpoint(again, *map(copied, args), use_reentrant=use_reentrant)


LOG: list[tuple[str, Tensor]] = []  # what hooks were called with

# A compiled graph is one node to autograd, which tells what lies before it of a gradient that did not come: None.


def note(g: Tensor | None) -> None:
    if g is not None:
        LOG.append(("note", g.detach().clone()))


def note_half(g: Tensor | None) -> Tensor | None:
    note(g)
    return None if g is None else g * 0.5


def double(g: Tensor | None) -> Tensor | None:
    return None if g is None else g * 2


def note_module(_: object, given: object, got: object) -> None:
    LOG.extend(("module", x.detach().clone()) for x in pytree.tree_leaves((given, got)) if isinstance(x, Tensor))


def add_one(_: object, given: object, got: object) -> object:
    return pytree.tree_map_only(Tensor, lambda x: x + 1 if x.is_floating_point() else x, got)


def note_parameter(p: Tensor) -> None:
    if p.grad is not None:
        LOG.append(("parameter", p.grad.detach().clone()))


NAMES: dict[str, object] = {
    "torch": torch, "F": F, "nn": nn, "math": math, "copy": copy, "nan": math.nan, "inf": math.inf,
    "checkpoint": checkpoint, **DTYPES,
    **{f.__name__: f for f in (
        t, floats, loss, backward, apart, retain, kept, by_each, hook,
        outs, total, Scale, Gate, Cube, Over, Filled, called, on_copies, note, note_half,
        double, note_module, add_one, note_parameter,
    )},
}  # fmt: skip
