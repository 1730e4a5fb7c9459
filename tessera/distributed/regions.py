"""Functions that speak of one rank's parts, inside a program over whole values.

In: a function that `local_map` wrapped, or a model that calls collectives itself, and whole tensors. Out: whole
tensors. The function is traced on the sizes of a part; then its program is run over all ranks' parts at once
(`transforms/over_ranks`). What comes out must be as it is said to lie: a result that is promised to be the same on all
ranks must have been made so, by an all-reduce or a gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tessera.distributed.own_rank import own_rank
from tessera.frontends.functional import collectives  # noqa: F401 - tracing needs what it enters
from tessera.frontends.functional.trace import Traced, trace_function
from tessera.ir import fake
from tessera.ir.equation import Equation, Source, Value
from tessera.ir.mesh import Mesh
from tessera.ir.record import user_line
from tessera.ir.replay import replay
from tessera.ir.types import TensorType, contiguous_strides
from tessera.torch_internals import pytree
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.distributed import StridedShard, group_of
from tessera.transforms.over_ranks import over_ranks
from tessera.util.errors import BatchError, CaptureError

Words = Mapping[str, object]  # of axes of the mesh, DTensor's word for where a value lies along it; none: Replicate


class Regions:
    def __init__(self, device_mesh: DeviceMesh, mesh: Mesh, data: Sequence[str]) -> None:
        """`mesh` are the axes along which a program's values may lie, `data` those that split the batch."""
        self.device_mesh, self.mesh, self.data = device_mesh, mesh, tuple(data)
        self.big = [axis for axis, ranks in mesh.axes if ranks > 1]
        self.groups = self._groups()

    # --- what speaks of parts ---

    def local_map(
        self,
        func: Callable,
        out_placements: object,
        in_placements: object = None,
        device_mesh: DeviceMesh | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        **others: object,
    ) -> object:
        """A call of what `local_map` gave. Placements of gradients follow from those of values."""
        line = user_line()
        if in_placements is None:
            raise CaptureError(f"{line}: expected a local_map with in_placements, since values here lie nowhere yet")
        flat, spec = pytree.tree_flatten(args)
        places = list(in_placements)  # type: ignore[call-overload]
        if len(places) != len(flat):
            raise CaptureError(
                f"{line}: local_map: expected in_placements for {len(flat)} arguments, got {len(places)}"
            )
        names = self._names(device_mesh or self.device_mesh, line)
        words = [{} if p is None or not isinstance(x, Tensor) else self._words(names, p, line)
                 for x, p in zip(flat, places, strict=True)]  # fmt: skip
        outs = out_placements if isinstance(out_placements, tuple) else (out_placements,)

        def lies(i: int, count: int, out: Tensor, varies: Sequence[str]) -> Words:
            if count != len(outs):
                raise CaptureError(f"{line}: local_map: expected out_placements for {count} results, got {len(outs)}")
            return {} if outs[i] is None else self._words(names, outs[i], line)

        return self._run(func, pytree.tree_unflatten(flat, spec), kwargs or {}, words, lies, line)

    def over_rows(self, call: Callable, held: list[Tensor], rows: object, why: Equation) -> Callable:
        """A model's call, `call(held, args, kwargs)`, which sees a rank's rows of the batch; of such are its results
        that differ between ranks. `held` are its weights and buffers, the same on all of them."""
        ranks, words = prod(map(self.mesh.size, self.data)), {axis: Shard(0) for axis in self.data}

        def lies(i: int, count: int, out: Tensor, varies: Sequence[str]) -> Words:
            if not varies:
                return {}
            local = out.shape[len(varies)] if out.dim() > len(varies) else None
            if tuple(varies) != self.data or str(local) != str(rows // ranks):  # type: ignore[operator]
                raise CaptureError(
                    f"{why.source}: a model that calls {why.op} sees its rank's rows alone; expected results with as "
                    f"many rows, or such as are the same on all ranks, got result {i}, which is of shape "
                    f"{tuple(out.shape[len(varies) :])} and differs along {', '.join(varies)}: compute it outside of "
                    "the model, or all_reduce it"
                )
            return words

        def called(*args: object, **kwargs: object) -> object:
            leaves = pytree.tree_leaves((args, kwargs))
            has = [isinstance(x, Tensor) and x.dim() and str(x.shape[0]) == str(rows) for x in leaves]
            given = [*({} for _ in held), *(words if h else {} for h in has)]
            return self._run(call, (held, args, kwargs), {}, given, lies, why.source)

        return called

    # --- running it ---

    def _run(
        self, func: Callable, args: object, kwargs: dict, words: Sequence[Words], lies: Callable, line: Source
    ) -> object:
        leaves = pytree.tree_leaves((args, kwargs))
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        own = {axis: torch.arange(self.mesh.size(axis), device=device) for axis in self.big}
        given: dict[int, Tensor] = dict(enumerate(own.values()))  # what has all ranks' parts
        varies: dict[int, tuple[str, ...]] = {i: (axis,) for i, axis in enumerate(own)}  # along which axes
        for i, (x, word) in enumerate(zip(leaves, words, strict=False), len(own)):
            if any(not isinstance(w, Replicate) for w in word.values()):
                given[i], varies[i] = self._apart(x, word, line)

        def called(places: list[Tensor], args: tuple, kwargs: dict) -> object:
            with own_rank(dict(zip(own, places, strict=True)), self.mesh, self.axes_of):
                return func(*args, **kwargs)

        types = {i: _part_type(x, len(varies[i])) for i, x in given.items()}
        traced = trace_function(called, (list(own.values()), args, kwargs), types=types)
        inputs = {traced.input(i): axes for i, axes in varies.items()}
        if written := next((v for v in inputs if v in traced.trace.mutations), None):
            raise CaptureError(f"{line}: expected a function of parts that writes none of its arguments, not {written}")
        with fake.alone():
            try:
                over = over_ranks(traced.trace, inputs, self.mesh, self.axes_of)
            except BatchError as error:
                raise CaptureError(f"{line}: ranks have different values for what is one: {error}") from error
        outs = replay(over.trace, [*(given.get(i, traced.leaves[i]) for i in traced.places), *traced.captured])
        for i, (out, axes) in enumerate(zip(outs, over.varies, strict=True)):
            if isinstance(out, Tensor):
                outs[i] = self._placed(i, out, axes, lies(i, len(outs), out, axes), _line(traced, i) or line)
        return traced.pack(outs)

    def _apart(self, x: Tensor, words: Words, line: Source) -> tuple[Tensor, tuple[str, ...]]:
        """All ranks' parts of a tensor, with a leading dimension for each axis along which they differ."""
        splits = {axis: word.dim % x.dim() for axis, word in words.items() if isinstance(word, Shard)}
        sizes: list = []
        at: dict[str, int] = {}
        for dim, size in enumerate(x.shape):
            axes = [axis for axis in self.big if splits.get(axis) == dim]
            ranks = prod(map(self.mesh.size, axes))
            if isinstance(size, int) and size % ranks:
                raise CaptureError(
                    f"{line}: expected a dimension {dim} that {ranks} ranks divide, got a size of {size}"
                )
            at |= {axis: len(sizes) + i for i, axis in enumerate(axes)}
            sizes += [*map(self.mesh.size, axes), size // ranks if axes else size]
        axes = [axis for axis in self.big if axis in at]
        rest = [d for d in range(len(sizes)) if d not in at.values()]
        x = x.reshape(sizes).permute([*(at[axis] for axis in axes), *rest])
        for axis, word in words.items():
            if isinstance(word, Partial) and word.reduce_op == "sum":  # the first rank has all of it
                dim = sum(self.big.index(a) < self.big.index(axis) for a in axes)
                axes.insert(dim, axis)
                zeros = x.new_zeros([*x.shape[:dim], self.mesh.size(axis) - 1, *x.shape[dim:]])
                x = torch.cat([x.unsqueeze(dim), zeros], dim)
        return x, tuple(axes)

    def _placed(self, i: int, out: Tensor, varies: Sequence[str], words: Words, line: Source) -> Tensor:
        """The whole tensor, of ranks' parts that lie so."""
        axes = list(varies)
        for axis in self.big:
            word = words.get(axis, Replicate())
            if isinstance(word, Replicate) and axis in axes:
                raise CaptureError(
                    f"{line}: result {i} differs between ranks along {axis}; expected one that is the same on all of "
                    "them, as its placement says: all_reduce or all_gather it, or say that it is split"
                )
            if isinstance(word, Partial):
                out = _total(out, axes.index(axis) if axis in axes else None, word.reduce_op, self.mesh.size(axis))
                axes = [a for a in axes if a != axis]
            elif isinstance(word, Shard) and axis not in axes:
                dim = sum(self.big.index(a) < self.big.index(axis) for a in axes)
                axes.insert(dim, axis)
                out = out.unsqueeze(dim).expand(*out.shape[:dim], self.mesh.size(axis), *out.shape[dim:])
        lead, order, sizes = len(axes), [], []
        for dim in range(out.dim() - lead):
            split = [at for at, a in enumerate(axes) if words[a].dim % (out.dim() - lead) == dim]  # type: ignore[attr-defined]
            order += [*split, lead + dim]
            sizes.append(prod(self.mesh.size(axes[at]) for at in split) * out.shape[lead + dim])
        return out.permute(order).reshape(sizes) if lead else out

    # --- words and groups ---

    def _names(self, device_mesh: DeviceMesh, line: Source) -> tuple[str, ...]:
        names = device_mesh.mesh_dim_names or ()
        with disable_current_modes():  # a mesh is a tensor too
            if not names and device_mesh.mesh.tolist() == self.device_mesh.mesh.tolist():
                names = self.device_mesh.mesh_dim_names or ()
        if not names or not set(names) <= set(self.mesh.names):
            raise CaptureError(f"{line}: expected a mesh with axes of {self.mesh}, got {device_mesh}")
        return tuple(names)

    def _words(self, names: Sequence[str], placements: object, line: Source) -> Words:
        listed = list(placements)  # type: ignore[call-overload]
        if len(listed) != len(names):
            raise CaptureError(f"{line}: expected a placement for each of the axes {names}, got {listed}")
        for word in listed:
            if isinstance(word, StridedShard) or not isinstance(word, (Shard, Replicate, Partial)):
                raise CaptureError(f"{line}: expected Shard, Replicate or Partial, got {word}")
        return {axis: word for axis, word in zip(names, listed, strict=True) if self.mesh.size(axis) > 1}

    def axes_of(self, group: object) -> tuple[str, ...] | None:
        """The axes along which a group of ranks lies, outermost first."""
        process_group = group_of(group) if isinstance(group, str) else group
        return self.groups.get(tuple(dist.get_process_group_ranks(process_group)))  # type: ignore[arg-type]

    def _groups(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Of the ranks along some axes through this one, those axes."""
        names, ranks = self.device_mesh.mesh_dim_names or (), self.device_mesh.mesh
        here, axes_by_ranks = self.device_mesh.get_coordinate() or [0] * ranks.dim(), {}
        for count in range(len(self.big) + 1):
            for axes in itertools.combinations(self.big, count):
                index = tuple(slice(None) if name in axes else here[d] for d, name in enumerate(names))
                axes_by_ranks[tuple(ranks[index].flatten().tolist())] = axes
        return axes_by_ranks


def _part_type(stacked: Tensor, lead: int) -> TensorType:
    shape = tuple(stacked.shape[lead:])
    return TensorType(stacked.dtype, shape, contiguous_strides(shape), stacked.device)


def _total(x: Tensor, dim: int | None, how: str, ranks: int) -> Tensor:
    """Parts along a dimension, or equal ones, put together."""
    if dim is None:
        return x * ranks if how == "sum" else x
    if how == "avg":
        return x.mean(dim)
    return x.sum(dim, dtype=x.dtype) if how == "sum" else (x.amax(dim) if how == "max" else x.amin(dim))


def _line(traced: Traced, i: int) -> Source | None:
    """Where a result was made; None where it was given."""
    v = traced.trace.outputs[i]
    sources = (eqn.source for eqn in traced.trace.equations if isinstance(v, Value) and v in eqn.results())
    return next(sources, None)
