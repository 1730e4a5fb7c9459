"""Runs a function over a batch, as one program.

In: a function, its arguments, and trees that say at which dimension each argument and result carries the batch.
Out: the function's results with the batch where `out_dims` wants it. The function is traced once on the types of
one example; the trace is then batched and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tessera.frontends.functional.trace import Traced, trace_function
from tessera.ir import fake
from tessera.ir.aliased import Aliased
from tessera.ir.equation import Value
from tessera.ir.record import recording
from tessera.ir.replay import replay, sweep
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, type_of
from tessera.torch_internals import pytree
from tessera.transforms.vmap import RANDOMNESS, Batched, vmap
from tessera.util.errors import MapError, OptionError

Dim = int | None


def batched_call(
    func: Callable,
    args: tuple,
    kwargs: dict,
    in_dims: object = 0,
    out_dims: object = 0,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> object:
    if randomness not in RANDOMNESS:
        raise OptionError(f"vmap: expected randomness to be one of {', '.join(RANDOMNESS)}, got {randomness!r}")
    if not isinstance(in_dims, (int, tuple)):
        raise MapError(f"vmap: expected in_dims to be an int or a tuple of one entry an argument, got {in_dims!r}")
    leaves, spec = pytree.tree_flatten(args)
    dims = _wrapped(broadcast_dims(in_dims, spec, "in_dims", "arguments"), leaves)
    sizes = [x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None]
    if not sizes:
        raise MapError(f"vmap: expected at least one tensor to map over, got in_dims={in_dims!r} for {spec}")
    if any(s != sizes[0] for s in sizes[1:]):
        raise MapError(f"vmap: expected all mapped dimensions to have the same size, got {sizes}")
    if chunk_size is not None and chunk_size <= 0:
        raise MapError(f"vmap: expected a chunk_size of at least 1, got {chunk_size}")
    # A program that is being recorded has no state of a generator to go back to: there the whole shares one draw.
    if chunk_size is None or chunk_size >= sizes[0] or (randomness == "same" and recording() is not None):
        return _whole(func, leaves, spec, kwargs, dims, sizes[0], out_dims, randomness)
    parts = []
    for start in range(0, sizes[0], chunk_size):
        length = min(chunk_size, sizes[0] - start)
        rows = [x if d is None else x.narrow(d, start, length) for x, d in zip(leaves, dims, strict=True)]
        with _drawn_again(leaves) if randomness == "same" and start + length < sizes[0] else nullcontext():
            parts.append(_whole(func, rows, spec, kwargs, dims, length, out_dims, randomness))
    return _joined(parts, out_dims)


def _drawn_again(leaves: Sequence[object]) -> AbstractContextManager:
    """Whatever is drawn here is drawn again afterwards: generators go back to where they stood."""
    devices = {x.device for x in leaves if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta")}
    kind = next((d.type for d in devices), "cuda")
    return torch.random.fork_rng([d for d in devices if d.type == kind], device_type=kind)


def broadcast_dims(tree: object, spec: pytree.TreeSpec, name: str, of: str) -> list[Dim]:
    """One entry of a prefix tree of dimensions for every leaf of `spec`."""
    if tree is None or (isinstance(tree, int) and not isinstance(tree, bool)):
        return [tree] * spec.num_leaves
    children, own = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    theirs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    branches, shape = pytree.tree_flatten(theirs, is_leaf=lambda x: x is not theirs)
    if own != shape or (len(children) == 1 and children[0] is tree):
        raise MapError(
            f"vmap: {name}={tree!r} does not fit the structure of the {of}, {spec}; expected an int, None, or a tree "
            "of them with that structure"
        )
    dims: list[Dim] = []
    for child, branch in zip(children, branches, strict=True):
        dims += broadcast_dims(child, pytree.tree_structure(branch), name, of)
    return dims


def _wrapped(dims: list[Dim], leaves: Sequence[object]) -> list[Dim]:
    out: list[Dim] = []
    for d, x in zip(dims, leaves, strict=True):
        if d is not None and not isinstance(x, torch.Tensor):
            raise MapError(f"vmap: in_dims gives {d} for a {type(x).__name__}; only tensors are mapped, say None there")
        if d is not None and not -x.dim() <= d < x.dim():  # type: ignore[attr-defined]
            raise MapError(f"vmap: in_dims gives {d} for a tensor of {x.dim()} dimensions")  # type: ignore[attr-defined]
        out.append(None if d is None else d % x.dim())  # type: ignore[attr-defined]
    return out


def _whole(
    func: Callable,
    leaves: list,
    spec: pytree.TreeSpec,
    kwargs: dict,
    dims: list[Dim],
    size: int,
    out_dims: object,
    randomness: str,
) -> object:
    args = pytree.tree_unflatten(leaves, spec)
    mapped = {i: d for i, d in enumerate(dims) if d is not None}
    traced = trace_function(func, args, kwargs, {i: example_type(leaves[i], d) for i, d in mapped.items()})
    with fake.alone():
        rows = {traced.input(i): (type_of(leaves[i]), d) for i, d in mapped.items()}
        batched = vmap(traced.trace, rows, size, traced.mode, randomness)  # type: ignore[arg-type]
        batched = Batched(sweep(batched.trace), batched.on)
    with traced.grad_mode():
        outs, on = replay(batched.trace, traced.args), list(batched.on)
    for i, alias in traced.aliased.items():
        outs[i], on[i] = _view(alias, traced, mapped, size)
    if traced.out_spec.is_leaf() and isinstance(out_dims, tuple) and len(out_dims) == 1:
        out_dims = out_dims[0]  # torch.func takes (0,) for a single result
    places = broadcast_dims(out_dims, traced.out_spec, "out_dims", "results")
    placed = [_place(o, b, d, size) for o, b, d in zip(outs, on, places, strict=True)]
    given = {traced.input(i): i for i in mapped}
    for i, v in enumerate(traced.trace.outputs):
        if isinstance(v, Value) and v in given and mapped[given[v]] == places[i]:
            placed[i] = leaves[given[v]]  # an argument given back where it came is that very tensor
    return traced.pack(placed)


def _view(alias: Aliased, traced: Traced, mapped: dict[int, int], size: int) -> tuple[object, bool]:
    """A result that is a view of an argument, made of the argument as the function left it."""
    x = traced.args[alias.source]
    dim = mapped.get(traced.places[alias.source]) if alias.source < len(traced.places) else None
    if dim is None:
        return alias.make(x), False
    if not alias.steps:
        return x if dim == 0 else x.movedim(dim, 0), True
    return _whole(alias.make, [x], pytree.tree_structure((x,)), {}, [dim], size, 0, "error"), True


def _place(out: object, on: bool, dim: Dim, size: int) -> object:
    """A result with the batch at `dim`."""
    if dim is None:
        if on:
            raise MapError("vmap: out_dims says None for a result that differs between examples; give it a dimension")
        return out
    if not isinstance(out, torch.Tensor):
        raise MapError(f"vmap: expected the function to give tensors, got {out!r}; say None in out_dims there")
    rows = out if on else out.unsqueeze(0).expand(size, *out.shape)
    if not -rows.dim() <= dim < rows.dim():
        raise MapError(f"vmap: out_dims gives {dim} for a result of {rows.dim()} dimensions, the batch counted")
    return rows if dim == 0 else rows.movedim(0, dim)


def _joined(parts: list[object], out_dims: object) -> object:
    flat = [pytree.tree_flatten(p) for p in parts]
    spec = flat[0][1]
    if spec.is_leaf() and isinstance(out_dims, tuple):
        out_dims = out_dims[0]
    dims = broadcast_dims(out_dims, spec, "out_dims", "results")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [c[0] if d is None else torch.cat(c, d) for c, d in zip(columns, dims, strict=True)]
    return pytree.tree_unflatten(joined, spec)


def example_type(x: torch.Tensor, dim: int) -> TensorType:
    """The type of one example of a batch."""
    t = type_of(x)
    assert isinstance(t, TensorType)
    shape, stride = (tuple(s for i, s in enumerate(sizes) if i != dim) for sizes in (t.shape, t.stride))
    return TensorType(t.dtype, shape, stride, t.device, t.layout, 0, t.bits)


def map_inputs(trace: Trace, tensors: dict[int, torch.Tensor], size: int, randomness: str = "error") -> Batched:
    """A trace over tensors that replace some of its inputs, by number, with the batch at dimension 0."""
    rows = {trace.inputs[i]: (type_of(x), 0) for i, x in tensors.items()}
    batched = vmap(trace, rows, size, None, randomness)  # type: ignore[arg-type]
    return Batched(sweep(batched.trace), batched.on)
