"""Views and writes, made functional while a program is recorded.

Every tensor of the recorded program has a `Ref`. Tensors that share memory hang in one tree under a `Root`:
a view knows its parent and the operator that made it. A write gives the written tensor a new value and
carries it up to the root by scattering; the other views of that memory are made again from their parents
when they are next read. The trace itself therefore never writes anything.

Gradients follow eager's rules. A view belongs to the grad mode it was made in, whoever reads it later and in whatever
mode. A write under no_grad changes what tensors hold and leaves every gradient history as it was. `detach` begins a
history of its own: what is written on one side of it, the other side holds but does not differentiate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tessera.ir.builder import Builder, aten, emit
from tessera.ir.equation import NO_GRAD, VIEWED, Arg, Equation, Special, Value, values_in
from tessera.ir.fake import rule_of
from tessera.ir.schema import bind, schema_of
from tessera.ir.types import size_key
from tessera.ir.views import RESHAPES
from tessera.torch_internals import pytree
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.errors import CaptureError
from tessera.util.names import names


class Root:
    """One piece of memory; `version` counts the writes to it."""

    def __init__(self) -> None:
        self.version = 0


@dataclass(eq=False)
class View:
    """How a tensor was made from its parent: `op(parent, …)`, and which of its results."""

    parent: Ref
    op: OpOverload
    args: tuple[Arg, ...]  # the arguments after the parent
    kwargs: dict[str, Arg]
    index: int | None = None
    no_grad: bool = False  # it was made under no_grad

    @property
    def detaches(self) -> bool:
        return op_name(self.op) == "detach"


@dataclass(eq=False)
class Ref:
    tensor: torch.Tensor  # the fake tensor; also keeps its identity alive
    value: Value
    root: Root
    view: View | None = None
    version: int = 0
    own_history: bool = False  # a detached view that was written with gradients on, or one that a function gave
    given: bool = False  # the tensor is the caller's: an input, or closed over
    begun: Value = field(init=False)  # what it held before it was written

    def __post_init__(self) -> None:
        self.begun = self.value

    def read(self, builder: Builder) -> Value:
        """The value this tensor holds now."""
        view = self.view
        if self.version != self.root.version and view is not None:
            parent = view.parent.read(builder)
            with grad_mode(builder, not view.no_grad):
                out = builder.emit(view.op, parent, *view.args, **view.kwargs)
                current: Value = out if view.index is None else out[view.index]  # type: ignore[index,assignment]
                if self.own_history:
                    with builder:
                        current = keep_grad(self.value, current, tangent=True)
            self.value, self.version = current, self.root.version
        return self.value

    def write(self, new: Value, builder: Builder) -> None:
        """This tensor now holds `new`; so does the memory under it. A view shows that memory: where somebody may ask
        for gradients by its base, it is made again, of the base, even to be read as it was written."""
        keep = NO_GRAD in builder.tags and new.tensor.is_differentiable
        held: list[tuple[Ref, Value]] = []
        ref, detached = self, False
        while True:
            held.append((ref, ref.kept(new, builder) if keep else new))
            view = ref.view
            if view is None:
                break
            ref.own_history |= view.detaches and not keep and ref.value.tensor.is_differentiable
            old = view.parent.read(builder)
            new = scatter(builder, view, old, new)
            if detached and new.tensor.is_differentiable:  # above a detached view histories stay
                with grad_mode(builder, True), builder:
                    new = keep_grad(old, new, tangent=True)
            detached |= view.detaches
            ref = view.parent
        self.root.version += 1
        anew = builder.by_base and not keep and not detached and new.tensor.is_differentiable
        for ref, value in held:
            if ref.view is None or (value.tensor.bits == ref.begun.tensor.bits and not anew):
                ref.value, ref.version = value, self.root.version
            # else it shows conjugates or negatives of what was written: it is made again where it is read

    def kept(self, new: Value, builder: Builder) -> Value:
        """`new` with the gradient history that this tensor has."""
        old = self.read(builder)
        with grad_mode(builder, True), builder:
            return keep_grad(old, new)


@contextmanager
def grad_mode(builder: Builder, on: bool) -> Iterator[None]:
    before = builder.tags
    builder.tags = before - {NO_GRAD} if on else before | {NO_GRAD}
    try:
        yield
    finally:
        builder.tags = before


_OVERWRITES = names("copy_ fill_ zero_")


@contextmanager
def overwriting(builder: Builder, op: OpOverload, written: Iterable[Ref]) -> Iterator[None]:
    """Mark a write that leaves nothing of what a view showed."""
    before = builder.tags
    if op_name(op) in _OVERWRITES and any(ref.view is not None for ref in written):
        builder.tags = before | {VIEWED}
    try:
        yield
    finally:
        builder.tags = before


# --- putting a view's new contents back into its parent -------------------------------------------


def scatter(builder: Builder, view: View, parent: Value, new: Value) -> Value:
    """The parent with the part that `view` shows replaced by `new`."""
    name = op_name(view.op)
    rule = _SCATTER.get(name)
    with builder:
        if rule is None:
            if name in _RESHAPES:
                return _reshape(parent, new)
            raise CaptureError(
                f"a write through a view made by {view.op} cannot be made functional; "
                f"expected one of {', '.join(sorted([*_SCATTER, *_RESHAPES]))}"
            )
        positional, keyword = bind(view.op, (parent, *view.args), view.kwargs)
        return rule(view, parent, new, *positional[1:], **keyword)


_RESHAPES = RESHAPES | names(
    "alias contiguous to _to_copy lift_fresh pin_memory positive resolve_conj resolve_neg atleast_1d atleast_2d"
    " atleast_3d squeeze_ unsqueeze_"
)


def _reshape(parent: Value, new: Value) -> Value:
    return aten.reshape(new, list(parent.shape))


def _select(view: View, parent: Value, new: Value, dim: int, index: Arg) -> Value:
    return aten.select_scatter(parent, new, dim, index)


def _slice(view: View, parent: Value, new: Value, dim: int, start: Arg, end: Arg, step: Arg) -> Value:
    return aten.slice_scatter(parent, new, dim, start, end, step)


def _narrow(view: View, parent: Value, new: Value, dim: int, start: Arg, length: Arg) -> Value:
    return aten.slice_scatter(parent, new, dim, start, start + length)  # type: ignore[operator]


def _transpose(view: View, parent: Value, new: Value, dim0: int, dim1: int) -> Value:
    return aten.transpose(new, dim0, dim1)


def _t(view: View, parent: Value, new: Value) -> Value:
    return aten.t(new) if new.ndim == 2 else new


def _reverse_all(view: View, parent: Value, new: Value) -> Value:
    return aten.permute(new, list(range(new.ndim))[::-1])


def _swap_last(view: View, parent: Value, new: Value) -> Value:
    return aten.transpose(new, -1, -2)


def _permute(view: View, parent: Value, new: Value, dims: list[int]) -> Value:
    rank = len(dims)
    inverse = [0] * rank
    for to, source in enumerate(dims):
        inverse[source % rank] = to
    return aten.permute(new, inverse)


def _movedim(view: View, parent: Value, new: Value, source: Arg, destination: Arg) -> Value:
    return aten.movedim(new, destination, source)


def _diagonal(view: View, parent: Value, new: Value, offset: int, dim1: int, dim2: int) -> Value:
    return aten.diagonal_scatter(parent, new, offset, dim1, dim2)


def _unbind(view: View, parent: Value, new: Value, dim: int) -> Value:
    return aten.select_scatter(parent, new, dim, view.index)


def _pieces(view: View, parent: Value, new: Value, *args: Arg, **kwargs: Arg) -> Value:
    """split, chunk and their kin: the piece starts where the ones before it end."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if op_name(view.op) in ("hsplit", "vsplit", "dsplit"):
        dim = {"hsplit": 1 if parent.ndim > 1 else 0, "vsplit": 0, "dsplit": 2}[op_name(view.op)]
    with view.parent.tensor.fake_mode:  # type: ignore[attr-defined]
        pieces = rule_of(view.op)(view.parent.tensor, *view.args, **view.kwargs)
    start = sum(piece.shape[dim] for piece in pieces[: view.index])  # type: ignore[index]
    return aten.slice_scatter(parent, new, dim, start, start + pieces[view.index].shape[dim])  # type: ignore[index]


def _as_strided(view: View, parent: Value, new: Value, size: Arg, stride: Arg, storage_offset: Arg) -> Value:
    return aten.as_strided_scatter(parent, new, size, stride, storage_offset)


def _view_as_real(view: View, parent: Value, new: Value) -> Value:
    return aten.view_as_complex(aten.contiguous(new))


def _view_as_complex(view: View, parent: Value, new: Value) -> Value:
    return aten.view_as_real(new)


def _real(view: View, parent: Value, new: Value) -> Value:
    return aten.complex(new, aten.imag(parent))


def _imag(view: View, parent: Value, new: Value) -> Value:
    return aten.complex(aten.real(parent), new)


def _conj(view: View, parent: Value, new: Value) -> Value:
    return aten.conj_physical(new)


def _neg_view(view: View, parent: Value, new: Value) -> Value:
    return aten.neg(new)


def _detach(view: View, parent: Value, new: Value) -> Value:
    return keep_grad(parent, new, tangent=True)


def _unfold(view: View, parent: Value, new: Value, dim: int, size: int, step: int) -> Value:
    if not parent.ndim:
        return _reshape(parent, new)
    dim %= parent.ndim
    count = new.shape[dim]
    if step < size and count != 1:
        raise CaptureError("a write through overlapping windows (unfold) has no single meaning; copy the windows first")
    for place in range(size):  # of each window
        part = aten.select(new, -1, place)
        parent = aten.slice_scatter(parent, part, dim, place, place + (count - 1) * step + 1, step)
    return parent


def _expand(view: View, parent: Value, new: Value, *args: Arg, **kwargs: Arg) -> Value:
    added = new.ndim - parent.ndim
    if list(map(size_key, new.shape)) == [size_key(1)] * added + list(map(size_key, parent.shape)):
        return _reshape(parent, new)
    raise CaptureError("a write through an expanded tensor writes one element several times; copy it first")


def _index(view: View, parent: Value, new: Value, indices: Arg) -> Value:
    """Places that a tensor names; the recorder is told where such a result counts as a view."""
    return aten.index_put(parent, indices, new)


def _view_dtype(view: View, parent: Value, new: Value, dtype: torch.dtype | list) -> Value:
    if isinstance(dtype, torch.dtype):
        return aten.view(new, parent.dtype)
    return _reshape(parent, new)


_SCATTER: dict[str, Callable] = {
    "select": _select, "slice": _slice, "narrow": _narrow, "transpose": _transpose, "swapaxes": _transpose,
    "swapdims": _transpose, "t": _t, "numpy_T": _reverse_all, "mT": _swap_last, "matrix_H": _swap_last,
    "adjoint": _swap_last, "permute": _permute, "movedim": _movedim, "moveaxis": _movedim,
    "diagonal": _diagonal, "unbind": _unbind, "split": _pieces, "split_with_sizes": _pieces, "chunk": _pieces,
    "tensor_split": _pieces, "hsplit": _pieces, "vsplit": _pieces, "dsplit": _pieces, "unsafe_chunk": _pieces,
    "unsafe_split": _pieces, "unsafe_split_with_sizes": _pieces,
    "as_strided": _as_strided, "view_as_real": _view_as_real, "view_as_complex": _view_as_complex,
    "real": _real, "imag": _imag, "_conj": _conj, "conj": _conj, "_neg_view": _neg_view, "detach": _detach,
    "unfold": _unfold, "expand": _expand, "expand_as": _expand, "view": _view_dtype, "index": _index,
}  # fmt: skip


# --- two operators PyTorch has no functional word for ---------------------------------------------


def _keep_grad(old: torch.Tensor, new: torch.Tensor, tangent: bool = False) -> torch.Tensor:
    """A copy that lies as `new` does, gaps and all: views are made of it in place of the tensor that was written."""
    if any(type(step) is int and step == 0 for step in new.stride()):  # expanded
        return new.clone()
    return torch.empty_strided(new.shape, new.stride(), dtype=new.dtype, device=new.device).copy_(new)


KEEP_GRAD = Special("keep_grad", _keep_grad)


def followed(eqn: Equation) -> list[Value]:
    """The operands whose history the results have."""
    return values_in(eqn.args[:1]) if eqn.op is KEEP_GRAD else eqn.inputs()


def keep_grad(old: Value, new: Value, tangent: bool = False) -> Value:
    """The value of `new` with the gradient history of `old`: what a write under no_grad leaves behind.

    Forward mode does not heed no_grad, only detach: with `tangent`, the tangent too stays that of `old`.
    """
    more = (True,) if tangent else ()
    return emit(KEEP_GRAD, old, new, *more)


def _functional(op: OpOverload, *args: object, **kwargs: object) -> object:
    """Run an operator that writes its arguments on copies; give (its result, what the written ones hold)."""
    return _functional_over(op, (), *args, **kwargs)


def _functional_over(op: OpOverload, over: Sequence[int], *args: object, **kwargs: object) -> object:
    """The same, where the written tensors of these numbers are written themselves, not copies of them."""
    return on_copies(op, op, over, args, kwargs)


def on_copies(call: Callable, op: OpOverload, over: Sequence[int], args: tuple, kwargs: dict) -> object:
    """`call` does what the operator does: itself, or its decomposition."""
    positional, keyword = bind(op, args, kwargs)
    number = itertools.count()
    written: list[torch.Tensor] = []

    def target(x: torch.Tensor) -> torch.Tensor:
        written.append(x if next(number) in over else x.clone())
        return written[-1]

    for index, param in enumerate(schema_of(op).params):
        if param.writes and param.keyword:
            keyword[param.name] = pytree.tree_map_only(torch.Tensor, target, keyword[param.name])
        elif param.writes:
            positional[index] = pytree.tree_map_only(torch.Tensor, target, positional[index])
    out = call(*positional, **keyword)
    fresh = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return [t for t in fresh if all(t is not w for w in written)] + written


def written_by(op: OpOverload, args: Sequence[Arg], kwargs: dict[str, Arg]) -> list[Value]:
    """The tensors that a call of an operator writes, as `functional` numbers and gives them."""
    positional, keyword = bind(op, tuple(args), kwargs)
    params = schema_of(op).params
    return values_in([keyword[p.name] if p.keyword else positional[i] for i, p in enumerate(params) if p.writes])


FUNCTIONAL = Special("functional", _functional)
FUNCTIONAL_OVER = Special("functional_over", _functional_over, pure=False)  # functional(op, …) in a final program
