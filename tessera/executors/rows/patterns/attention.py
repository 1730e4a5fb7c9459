"""Attention of one query over a cache as `decode_attention`, and what the program writes to the cache as `cache_write`.

The norm of the query's and the new key's heads, their rotary embedding and the views between rows and heads go inside;
keys repeated for the heads that share them are not made. A mask that says "up to this position" becomes the position,
one for all sequences or one for each. A cache may have its length before its heads: then it is read transposed.
"""

from __future__ import annotations

import math

import torch

from tessera.executors.rows.patterns.cache import counts, is_position, update_of
from tessera.executors.rows.patterns.heads import heads_of
from tessera.executors.rows.patterns.match import Pattern
from tessera.ir.alias import FUNCTIONAL
from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.schema import bind
from tessera.ir.trace import Trace
from tessera.ir.types import Size, size_key
from tessera.ops.rows import limits

tessera = torch.ops.tessera


class Attention(Pattern):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.flat: dict[Value, Value] = {}  # positions of one dimension: one value for all who read them

    def find(self) -> None:
        for eqn in self.trace.equations:
            if eqn.opname == "scaled_dot_product_attention" and limits.runs(eqn.out.tensor.device):
                self.attention(eqn)

    def attention(self, eqn: Equation) -> None:
        positional, keyword = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        q, k, v, mask, dropout, causal = positional[:6]
        if dropout or causal or not limits.attention(q.tensor, k.tensor, v.tensor):
            return
        batch, scale = q.shape[0], keyword.get("scale")
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        positions = self.positions(mask, batch, k.shape[2])
        shown = None if positions is not None else mask
        caches = [self.cache(x) for x in (k, v)]
        for cache, _ in caches:
            self.written(cache, batch)
        out = self.passed_on(eqn.out)
        heads, prepare = heads_of(self, q, batch)

        def make() -> None:
            rows = heads if heads.shape == out.shape else aten.reshape(heads, list(out.shape))
            keys, values = (cache if dim == 2 else aten.transpose(cache, 1, 2) for cache, dim in caches)
            limit = None if positions is None else self.flattened(positions)
            args = (rows, keys, values, limit, shown, *prepare, scale)
            self.emit(tessera.decode_attention.default, args, [out])  # type: ignore[arg-type]

        self.replaced[self.makers[out]] = make

    # --- the cache ---

    def cache(self, x: Value) -> tuple[Value, int]:
        """What attention reads its keys or values from, and where that has its length: through a transposition, and
        before they were repeated for the heads that share them."""
        x = self.unrepeated(x, 1)
        eqn = self.maker(x, "transpose", "permute")
        swaps = eqn is not None and list(self.order(eqn)) == [0, 2, 1, 3]
        return (self.unrepeated(eqn.inputs()[0], 2), 1) if swaps else (x, 2)  # type: ignore[union-attr]

    def unrepeated(self, x: Value, dim: int) -> Value:
        """Heads at `dim`, each once."""
        flat = self.maker(x, "reshape", "view", "_unsafe_view", "flatten")
        copied = self.maker(flat.args[0], "clone", "contiguous") if flat is not None else None
        grown = self.maker((copied or flat).args[0], "expand") if flat is not None else None  # type: ignore[union-attr]
        unsqueezed = self.maker(grown.args[0], "unsqueeze") if grown is not None else None
        source = unsqueezed.args[0] if unsqueezed is not None and unsqueezed.args[1] == dim + 1 else None
        if grown is None or not isinstance(source, Value) or source.ndim != 4 or source.tensor.stride[-1] != 1:
            return x
        repeated = list(source.shape)
        repeated[dim] *= grown.out.shape[dim + 1]
        return source if repeated == list(x.shape) else x

    def written(self, v: Value, batch: int) -> None:
        """A cache's new contents as a write of its own."""
        eqn = self.makers.get(v)
        update = update_of(self, eqn) if eqn is not None and eqn not in self.replaced else None
        if update is None:
            return
        heads, prepare = heads_of(self, update.new, batch)

        def make() -> None:
            cache, _, positions, dim = update
            args = (tessera.cache_write.default, cache, heads, self.flattened(positions), dim, *prepare)
            self.emit(FUNCTIONAL, args, [v])

        self.replaced[eqn] = make  # type: ignore[index]

    # --- positions ---

    def positions(self, mask: Arg, batch: int, length: Size) -> Value | None:
        """The positions up to which a mask lets queries see: `arange(length) <= positions`, or `< positions + 1`."""
        if not isinstance(mask, Value) or mask.ndim > 4:
            return None
        sequences, *between, last = (*[1] * (4 - mask.ndim), *mask.shape)
        compares = self.maker(self.in_order(mask), "le", "ge", "lt", "gt")
        if compares is None or between != [1, 1] or sequences not in (1, batch) or size_key(last) != size_key(length):
            return None
        name = compares.opname
        numbers, where = compares.args if name in ("le", "lt") else compares.args[::-1]
        if not isinstance(numbers, Value) or not isinstance(where, Value) or not counts(self, numbers):
            return None
        if size_key(numbers.shape[-1]) != size_key(length) or (where.ndim and where.shape[-1] != 1):
            return None
        where = self.in_order(where)
        if name in ("lt", "gt"):
            after = self.maker(where, "add")
            if after is None or after.args[1:] != (1,) or after.kwargs or not isinstance(after.args[0], Value):
                return None
            where = self.in_order(after.args[0])
        return where if is_position(where, batch) else None

    def flattened(self, positions: Value) -> Value:
        if positions.ndim == 1:
            return positions
        if positions not in self.flat:
            self.flat[positions] = aten.reshape(positions, [-1])
        return self.flat[positions]
