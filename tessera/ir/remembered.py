"""What operators gave while programs were recorded: asked again with arguments of the same types, PyTorch's rules are
not run again.

In: a call on fake tensors. Out: its results. What was found out of programs over symbols is kept with their symbols,
since conditions on them came with it: they hold for the program from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera.ir import fake
from tessera.ir.types import SYMBOLIC, TensorType, size_key, type_of
from tessera.torch_internals import pytree, shapes
from tessera.torch_internals.dispatch import no_python_dispatcher
from tessera.torch_internals.fake import FakeTensor, shown_as
from tessera.torch_internals.memory import memory_of
from tessera.torch_internals.operators import OpOverload, op_schema

# The library chooses their kernels by flags, which no argument tells.
_BY_SETTINGS = {torch.ops.aten.scaled_dot_product_attention.default}
_outcomes: dict[tuple, Outcome] = {}  # of sizes that are numbers


@dataclass(frozen=True)
class Outcome:
    kind: type | None  # of sequence, if it is one
    types: list[TensorType]
    shows: bool  # the memory of the only argument; otherwise each has its own

    def again(self, tensors: Sequence[torch.Tensor]) -> object:
        x: Any = tensors[0]
        with no_python_dispatcher():
            if self.shows:
                results = [shown_as(x, t.shape, t.stride, t.offset) for t in self.types]
            else:
                results = fake.fakes_of(self.types, x.fake_mode)
        return results[0] if self.kind is None else self.kind(results)


def remembered(rule: Callable, op: OpOverload, tensors: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> object:
    """`rule(*args, **kwargs)` on fake tensors, which are `tensors`."""
    types: tuple = pytree.tree_map_only(torch.Tensor, type_of, (args, kwargs))  # type: ignore[assignment]
    if not tensors or not _told_by_types(op):
        return rule(*args, **kwargs)
    memory: dict = _outcomes
    symbolic = fake.mentions_symbols(types)
    if symbolic:
        env = getattr(tensors[0], "fake_mode").shape_env  # noqa: B009 - no attribute of a plain tensor
        if env is None or shapes.suppresses_guards(env) or not all(map(_has_hints, pytree.tree_leaves(types))):
            return rule(*args, **kwargs)
        memory = shapes.notes(env, "outcomes")
    # A type does not say where a tensor begins in its memory, and views of it lie there too.
    key = (*fake.call_key(op, *types), symbolic and tuple(map(_begin, tensors)))
    if (known := memory.get(key)) is not None:
        return known.again(tensors)
    out = rule(*args, **kwargs)
    if (found := _outcome(out, tensors, symbolic)) is not None:
        memory[key] = found
    return out


def _has_hints(x: object) -> bool:
    """Sizes that nobody knows yet bring claims of their own, which belong where the operator stands."""
    sizes = (*x.shape, *x.stride) if isinstance(x, TensorType) else (x,)
    return all(n.node.has_hint() for n in sizes if isinstance(n, SYMBOLIC))


def _begin(x: torch.Tensor) -> object:
    return size_key(x.storage_offset()) if x.layout is torch.strided else None


def _outcome(out: object, tensors: Sequence[torch.Tensor], symbolic: bool) -> Outcome | None:
    """What is kept of results; None of those that only the rule gives. Its views of known sizes are as quick."""
    kind = type(out) if type(out) in (tuple, list) else None
    results = list(out) if kind is not None else [out]  # type: ignore[call-overload]
    if not all(isinstance(x, FakeTensor) for x in results):
        return None
    types: list[TensorType] = [type_of(x) for x in results]  # type: ignore[misc]
    memory, given = set(map(memory_of, results)), set(map(memory_of, tensors))
    if len(memory) == len(results) and memory.isdisjoint(given):
        kept = not any(t.offset or (t.is_symbolic and not symbolic) for t in types)
        return Outcome(kind, types, shows=False) if kept else None
    if not symbolic or len(tensors) > 1 or memory != given or tensors[0].layout is not torch.strided:
        return None
    plain = all(t.dtype == tensors[0].dtype and t.bits == type_of(tensors[0]).bits for t in types)  # type: ignore[union-attr]
    same = any(x is tensors[0] for x in results)
    return Outcome(kind, types, shows=True) if plain and not same else None


@functools.cache
def _told_by_types(op: OpOverload) -> bool:
    """Types of results follow from those of arguments alone. Where data has a part in it, sizes are symbols, of which a
    program may learn what they are: another one has not. A user's operator may do as it likes."""
    by_data = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return op.namespace == "aten" and not (by_data or op_schema(op).is_mutable or op in _BY_SETTINGS)
