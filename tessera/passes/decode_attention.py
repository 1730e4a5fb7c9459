"""Attention of one query over a cache as `decode_attention`, and what the program writes to the cache as `cache_write`.

The norm of the query's and the new key's heads, their rotary embedding and the views between rows and heads go inside;
keys repeated for the heads that share them are not made. A mask that says "up to this position" becomes the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tessera.ir.alias import FUNCTIONAL
from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.schema import bind
from tessera.passes.decode_match import DTYPES, Rewrite, pairs
from tessera.torch_internals.dispatch import DisableTorchDispatch
from tessera.torch_internals.operators import aten_name, op_name

HEADS = (32, 64, 128, 256)
tessera = torch.ops.tessera


@dataclass(frozen=True)
class Heads:
    """Heads before they were normalised and turned, as rows; with what the operators need to do both."""

    rows: Value
    norm: Value | None
    eps: float
    shift: float
    cosine: Value | None
    sine: Value | None

    @property
    def how(self) -> tuple[Arg, ...]:
        return (self.norm, self.eps, self.shift, self.cosine, self.sine)


class Attention(Rewrite):
    def find(self) -> None:
        for eqn in self.trace.equations:
            if aten_name(eqn.op) == "scaled_dot_product_attention" and self.runs(eqn.out.tensor.device):
                self.attention(eqn)

    def attention(self, eqn: Equation) -> None:
        positional, keyword = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        q, k, v, mask, dropout, causal = positional[:6]
        if dropout or causal or not self.takes(q, k, v):  # type: ignore[arg-type]
            return
        scale = keyword.get("scale")
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale  # type: ignore[union-attr,index]
        k, v = (self.through_repeats(x, q) for x in (k, v))  # type: ignore[arg-type]
        positions = self.positions(mask)
        shown = None if positions is not None else mask
        self.cached(k)
        self.cached(v)
        out = self.passed_on(eqn.out)
        heads = self.heads(q)  # type: ignore[arg-type]

        def make() -> None:
            rows = heads.rows if heads.rows.shape == out.shape else aten.reshape(heads.rows, list(out.shape))
            args = (rows, k, v, positions, shown, *heads.how, scale)
            self.emit(tessera.decode_attention.default, args, [out])  # type: ignore[arg-type]

        self.replaced[self.makers[out]] = make

    def takes(self, q: Value, k: Value, v: Value) -> bool:
        """One query a head; the cache may be of any length."""
        tensors = [x.tensor for x in (q, k, v)]
        head = tensors[0].shape[-1]
        if not all(t.dtype in DTYPES and len(t.shape) == 4 and t.shape[-1] == head for t in tensors):
            return False
        static = (*tensors[0].shape, *tensors[1].shape[:2], *tensors[2].shape[:2])
        if not all(type(n) is int for n in static) or tensors[0].shape[2] != 1 or head not in HEADS:
            return False
        shared = int(tensors[0].shape[1]) % int(tensors[1].shape[1]) == 0
        return shared and all(t.stride[-1] == 1 for t in tensors)

    def through_repeats(self, x: Value, q: Value) -> Value:
        """Keys before they were repeated for the heads that share them."""
        flat = self.made_by(x, "reshape", "view", "_unsafe_view", "flatten")
        copied = self.made_by(flat.args[0], "clone", "contiguous") if flat is not None else None
        grown = self.made_by((copied or flat).args[0], "expand") if flat is not None else None  # type: ignore[union-attr]
        given = self.made_by(grown.args[0], "unsqueeze") if grown is not None else None
        source = given.args[0] if given is not None and given.args[1] == 2 else None
        if not isinstance(source, Value) or source.ndim != 4 or source.shape[2:] != x.shape[2:]:
            return x
        heads = grown.out.shape[2] * source.shape[1]  # type: ignore[union-attr]
        return source if source.tensor.stride[-1] == 1 and heads == x.shape[1] == q.shape[1] else x

    # --- masks ---

    def positions(self, mask: Arg) -> Value | None:
        """The position up to which a mask lets the only query see: `arange(length) <= positions[:, None]`."""
        seen = self.made_by(mask, "le")
        if seen is None or not isinstance(mask, Value) or mask.ndim != 2:
            return None
        numbers, where = seen.args
        column = self.made_by(where, "unsqueeze")
        if column is None or column.args[1] not in (1, -1) or not self.counts(numbers):
            return None
        found = column.args[0]
        return found if isinstance(found, Value) and found.shape == (1,) and found.dtype == torch.int64 else None

    def counts(self, v: Arg) -> bool:
        """0, 1, 2, …"""
        if not isinstance(v, Value) or v.ndim != 1:
            return False
        while (eqn := self.made_by(v, "detach", "alias")) is not None:
            v = eqn.inputs()[0]
        tensor = self.trace.constants.get(v)
        if tensor is not None:
            with DisableTorchDispatch():
                return torch.equal(tensor, torch.arange(len(tensor), device=tensor.device))
        eqn = self.made_by(v, "arange")
        return eqn is not None and len(eqn.args) == 1

    # --- what happens to heads before they are used ---

    def heads(self, v: Value) -> Heads:
        """`(batch, heads, 1, head)`: its rotary embedding and its norm undone, as far as there are any."""
        plain, cosine, sine = self.turned(v) or (v, None, None)
        norm = self.norm(self.in_order(plain)) or self.norm(plain)
        if norm is None or norm.source.shape[-1] != v.shape[-1]:
            return Heads(self.in_order(plain), None, 0.0, 0.0, cosine, sine)
        return Heads(self.in_order(norm.source), norm.weight, norm.eps, norm.shift, cosine, sine)

    def turned(self, v: Value) -> tuple[Value, Value, Value] | None:
        """`x * cos + cat(-second half, first half) * sin` -> x, cos and sin."""
        for first, second in pairs(self.made_by(v, "add")):
            for x, cosine in pairs(self.made_by(first, "mul")):
                for crossed, sine in pairs(self.made_by(second, "mul")):
                    if isinstance(x, Value) and x.dtype == v.dtype and self.crosses(crossed, x):
                        angles = [self.angle(a, x) for a in (cosine, sine)]
                        return None if None in angles else (x, *angles)  # type: ignore[return-value]
        return None

    def angle(self, v: Arg, x: Value) -> Value | None:
        """Cosines or sines of one position, the same for all heads of a sequence."""
        if not isinstance(v, Value) or v.ndim == 0 or v.ndim > 4 or not v.dtype.is_floating_point:
            return None
        batch, heads, _, head = (*[1] * (4 - v.ndim), *v.shape)
        shared = head == x.shape[-1] and heads == 1 and batch in (1, x.shape[0])
        rows = self.in_order(v)
        return rows if shared and rows.shape[-1] == head and rows.tensor.stride[-1] == 1 else None

    def crosses(self, v: Arg, x: Value) -> bool:
        """`cat(-second half, first half)` of x."""
        joined = self.made_by(v, "cat")
        if joined is None or not self.last(joined, x.ndim):
            return False
        parts = joined.args[0]
        negative = self.made_by(parts[0], "neg") if len(parts) == 2 else None  # type: ignore[index,arg-type]
        return negative is not None and self.halves(x, parts[1], negative.args[0])  # type: ignore[index]

    @staticmethod
    def last(cat: Equation, rank: int) -> bool:
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        return dim in (-1, rank - 1)

    def halves(self, x: Value, low: Arg, high: Arg) -> bool:
        """The two halves of x along its last dimension."""
        eqn = self.made_by(low, "chunk", "split")
        size = x.shape[-1]
        if eqn is not None:
            whole = eqn.args[0] is x and eqn.args[1] == (2 if op_name(eqn.op) == "chunk" else size // 2)  # type: ignore[union-attr]
            return whole and list(eqn.outputs) == [low, high] and self.last(eqn.with_(args=eqn.args[1:]), x.ndim)
        return self.slice_of(low, x) == (0, size // 2) and self.slice_of(high, x) == (size // 2, size)

    def slice_of(self, v: Arg, x: Value) -> tuple[int, int] | None:
        eqn = self.made_by(v, "slice")
        if eqn is None or eqn.args[0] is not x:
            return None
        (_, dim, start, end, step), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        if dim not in (-1, x.ndim - 1) or step != 1:
            return None
        size = x.shape[-1]
        return (start or 0, size if end is None or end > size else end)  # type: ignore[return-value,operator]

    # --- the cache ---

    def cached(self, v: Arg) -> None:
        """A cache's new contents as a write of its own."""
        eqn = self.made_by(v, "index_copy")
        if eqn is None or eqn in self.replaced:
            return
        cache, dim, positions, new = eqn.args
        if dim not in (2, -2) or positions.shape != (1,) or cache.tensor.stride[-1] != 1:  # type: ignore[union-attr]
            return
        if new.dtype != cache.dtype or new.shape[2] != 1:  # type: ignore[union-attr]
            return
        heads = self.heads(new)  # type: ignore[arg-type]
        args = (tessera.cache_write.default, cache, heads.rows, positions, *heads.how)
        self.replaced[eqn] = lambda: self.emit(FUNCTIONAL, args, [eqn.out])
