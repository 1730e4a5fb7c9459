"""Attention masks that fused kernels can do without, or can read.

In: a trace. Out: the same program. A mask that depends on no argument is told from what makes it (`mask_places`), or
computed here. One that allows everything is left out, and one that allows each query the keys up to its own place
becomes `is_causal`. Models make such masks where nobody gave them one. On a GPU any other mask is laid out along the
keys: no fused kernel of PyTorch's takes one whose last dimension is expanded or strided, and plain attention, in single
precision, takes several times as long. One of truth values that several layers read becomes numbers to add, once:
PyTorch makes these of it in every layer.

Another kernel may lay its result out otherwise (`Relayout`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value, map_values, symbols_in
from tessera.ir.relayout import Relayout
from tessera.ir.schema import has_effect, is_view
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_key
from tessera.passes.clean.fold import UNINITIALISED
from tessera.passes.patterns.mask_places import Affine, conditions
from tessera.torch_internals.fake import unset_fake_temporarily
from tessera.torch_internals.operators import OpOverload, aten_name, op_name

NAME = "scaled_dot_product_attention"
LARGEST = 2**26  # elements of a mask that is computed to see what it is: 8192 tokens, half a second
FUSED = (torch.float16, torch.bfloat16, torch.float32)  # what PyTorch has fused kernels for
EVERYTHING, CAUSAL = "everything", "causal"


def attention_mask(trace: Trace) -> Trace:
    """Leave out masks that say nothing, name those that are causal, and lay the others out for fused kernels."""
    if not any(_mask(eqn) for eqn in trace.equations):
        return trace
    return _Masks(trace).run()


def _mask(eqn: Equation) -> Value | None:
    """The mask of an attention that has one."""
    if aten_name(eqn.op) != NAME:
        return None
    mask = eqn.bound()[0][3]
    return mask if isinstance(mask, Value) else None


class _Masks:
    def __init__(self, trace: Trace) -> None:
        self.rewrite = Relayout(trace)
        self.kinds: dict[Value, str | None] = {}
        self.readers = Counter(mask for eqn in trace.equations if (mask := _mask(eqn)) is not None)
        self.made: dict[tuple, Value] = {}  # by mask, dtype and tags: the mask that fused kernels read

    def run(self) -> Trace:
        for eqn in self.rewrite:
            mask = _mask(eqn)
            rule = self.plainer(eqn, mask) if mask is not None else None
            if rule is not None:
                self.rewrite.write(eqn, rule)
            elif self.rewrite.moved(eqn):
                self.rewrite.type_again(eqn)
        return self.rewrite.finish()

    def plainer(self, eqn: Equation, mask: Value) -> Callable[[], object] | None:
        """What emits the same attention with another mask or none; None where this mask is as good as any."""
        if mask not in self.kinds:
            self.kinds[mask] = _kind(mask, self.rewrite.makers)
        (query, key, value, _, dropout, causal), options = eqn.bound()
        assert isinstance(query, Value) and isinstance(key, Value)
        square = size_key(query.shape[-2]) == size_key(key.shape[-2])
        if self.kinds[mask] == EVERYTHING:
            return lambda: emit(eqn.op, query, key, value, None, dropout, causal, **options)
        if self.kinds[mask] == CAUSAL and square and not causal:
            return lambda: emit(eqn.op, query, key, value, None, dropout, True, **options)
        if not self.worse(mask, query):
            return None
        other = self.other(eqn, mask, query.dtype)
        return lambda: emit(eqn.op, query, key, value, other, dropout, causal, **options)

    def worse(self, mask: Value, query: Value) -> bool:
        """Fused kernels do not take it, or every layer makes the same of it first."""
        if query.tensor.device.type != "cuda" or query.dtype not in FUSED or not mask.ndim:
            return False
        return _unreadable(mask) or (mask.dtype is torch.bool and self.readers[mask] > 1)

    def other(self, eqn: Equation, mask: Value, dtype: torch.dtype) -> Value:
        """The mask that fused kernels read in its place; layers with the same one share it."""
        own = (mask, dtype, eqn.tags)
        if own not in self.made:
            with self.rewrite.at(eqn):
                self.made[own] = _along_keys(mask, dtype if self.readers[mask] > 1 else None)
        return self.made[own]


def _unreadable(mask: Value) -> bool:
    """No fused kernel takes it: its last dimension is no run in memory."""
    return size_key(mask.shape[-1]) != 1 and size_key(mask.tensor.stride[-1]) != 1


def _along_keys(mask: Value, added: torch.dtype | None) -> Value:
    """The mask with its keys side by side in memory, as numbers that are `added` if it says what is allowed. What it
    repeats over batches and heads is not written out."""
    repeated = [d for d in range(mask.ndim - 2) if size_key(mask.tensor.stride[d]) == 0]
    once = mask
    for d in repeated:
        once = aten.slice(once, d, 0, 1)
    if added is not None and mask.dtype is torch.bool:
        allowed, not_allowed = (
            aten.full([], number, dtype=added, device=mask.tensor.device) for number in (0.0, -math.inf)
        )
        once = aten.where(once, allowed, not_allowed)
    if once is mask or not once.tensor.is_row_major:
        once = aten.clone(once, memory_format=torch.contiguous_format)
    return aten.expand(once, list(mask.shape)) if repeated else once


# --- masks that no argument changes ---


def _kind(mask: Value, makers: dict[Value, Equation]) -> str | None:
    """What a mask allows, where that is known now."""
    told = conditions(mask, makers) if mask.ndim >= 2 else None
    if told is not None:
        later = Affine(0, (*(0,) * (mask.ndim - 2), 1, -1))  # the query's place is not before the key's
        return EVERYTHING if not told else CAUSAL if told == {later} else None
    with unset_fake_temporarily(), torch.no_grad():
        tensor = _computed(mask, makers, {})
        return None if tensor is None or tensor.ndim < 2 or not tensor.numel() else _seen(tensor)


def _seen(mask: torch.Tensor) -> str | None:
    """The same, of the mask itself."""
    mask = mask[(*(slice(0, 1) if step == 0 else slice(None) for step in mask.stride()[:-2]), ...)]
    if mask.numel() > LARGEST:
        return None
    allowed = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool and not bool((allowed | (mask == -torch.inf)).all()):
        return None
    if bool(allowed.all()):
        return EVERYTHING
    rows, columns = mask.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return CAUSAL if rows == columns and bool((allowed == triangle).all()) else None


def _computed(v: Value, makers: dict[Value, Equation], known: dict[Value, torch.Tensor | None]) -> torch.Tensor | None:
    """The tensor, on the CPU; None where it hangs on an argument, on chance or on a size, or is too large."""
    if v not in known:
        known[v] = None
        eqn = makers.get(v)
        if eqn is not None and _constant(eqn):
            read = {u: _computed(u, makers, known) for u in eqn.inputs()}
            if all(tensor is not None for tensor in read.values()):
                args, kwargs = _on_cpu(map_values((eqn.args, eqn.kwargs), read.__getitem__))  # type: ignore[misc]
                known[v] = eqn.op(*args, **kwargs)  # type: ignore[operator]
    return known[v]


def _constant(eqn: Equation) -> bool:
    """May this be computed now, if its arguments may?"""
    op = eqn.op
    if not isinstance(op, OpOverload) or op.namespace != "aten" or eqn.many or len(eqn.outputs) != 1:
        return False
    if op_name(op) in UNINITIALISED:
        return False
    type_ = eqn.out.type
    if not isinstance(type_, TensorType) or type_.is_symbolic or symbols_in((eqn.args, eqn.kwargs)):
        return False
    return (is_view(op) or type_.numel() <= LARGEST) and not has_effect(eqn)


def _on_cpu(a: object) -> object:
    if isinstance(a, torch.device):
        return torch.device("cpu")
    if isinstance(a, (list, tuple)):
        return type(a)(map(_on_cpu, a))
    return {k: _on_cpu(v) for k, v in a.items()} if isinstance(a, dict) else a
