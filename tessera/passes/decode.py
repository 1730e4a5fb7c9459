"""Finds the places for the operators of `ops/rows` in a program over few rows.

In: a functional trace without gradients. Out: the same program, where linear layers over at most sixteen rows are
`rows_linear` (those that read the same value together, with the rms norm before, the gate and the residual after them
as far as nothing else wants what is between), and attention of one query over a cache that this program writes is
`cache_write` and `decode_attention`, with the rotary embedding inside. Only where `runs(device)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.ir.alias import FUNCTIONAL
from tessera.ir.builder import Builder
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.mode import mode_of
from tessera.ir.schema import bind
from tessera.ir.trace import Trace
from tessera.passes.dce import dce

MOST_ROWS, MOST_WEIGHTS = 16, 3
DTYPES = (torch.bfloat16, torch.float16)
tessera = torch.ops.tessera


def decode(trace: Trace, runs: Callable[[torch.device], bool]) -> Trace:
    """Linear layers and attention over few rows, as operators that read their weights and caches once."""
    trace = _Attention(trace, runs).run()
    return _Linears(trace, runs).run()


class _Rewrite:
    """What both rewrites ask of a trace; `replaced` says by what an equation is replaced, at its place."""

    def __init__(self, trace: Trace, runs: Callable[[torch.device], bool]) -> None:
        self.trace, self.runs = trace, runs
        self.makers = {v: eqn for eqn in trace.equations for v in eqn.results()}
        self.users = trace.users()
        self.results = {*trace.results(), *(v for v, _ in trace.symbols.values())}
        self.builder = Builder(trace.name, mode_of(trace))
        self.builder.reserve(list(trace.values()))
        self.replaced: dict[Equation, Callable[[], None]] = {}

    def run(self) -> Trace:
        self.find()
        if not self.replaced:
            return self.trace
        for eqn in self.trace.equations:
            make = self.replaced.get(eqn)
            if make is None:
                self.builder.equations.append(eqn)
                continue
            with self.builder, self.builder.at(eqn):
                make()
        return dce(self.trace.with_(equations=tuple(self.builder.equations)))

    def find(self) -> None:
        raise NotImplementedError

    def emit(self, op: object, args: tuple[Arg, ...], results: list[Value]) -> None:
        """An equation whose results keep the names they had."""
        self.builder.emit(op, *args)  # type: ignore[arg-type]
        last = self.builder.equations[-1]
        assert [v.tensor.shape for v in last.results()] == [v.tensor.shape for v in results]
        self.builder.equations[-1] = last.with_(outputs=tuple(results))

    def made_by(self, v: Arg, *names: str) -> Equation | None:
        eqn = self.makers.get(v) if isinstance(v, Value) else None
        return eqn if eqn is not None and getattr(eqn.op, "_opname", "") in names else None

    def only(self, v: Value, *readers: Equation) -> bool:
        """Nothing but these equations wants a value."""
        return v not in self.results and set(self.users.get(v, ())) <= set(readers)

    def through(self, v: Arg, *names: str) -> Arg:
        """What a value is a view of, through views of these names."""
        while (eqn := self.made_by(v, *names)) is not None:
            v = eqn.args[0]
        return v


# --- linear layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A linear layer of the program, its weight plain or in fewer bits."""

    eqn: Equation
    x: Value
    weight: Value
    scale: Value | None
    bias: Value | None
    kind: str

    @staticmethod
    def of(eqn: Equation) -> Layer | None:
        name = getattr(eqn.op, "_opname", "")
        if name == "linear":
            (x, weight, bias), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
            return Layer(eqn, x, weight, None, bias, "")  # type: ignore[arg-type]
        if name == "quantized_linear":
            (x, weight, scale, bias, kind), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
            return Layer(eqn, x, weight, scale, bias, kind)  # type: ignore[arg-type]
        return None


class _Linears(_Rewrite):
    def find(self) -> None:
        together: dict[tuple[Value, str, bool], list[Layer]] = {}
        for eqn in self.trace.equations:
            layer = Layer.of(eqn)
            if layer is not None and self.suits(layer):
                together.setdefault((layer.x, layer.kind, layer.bias is None), []).append(layer)
        for (x, _, _), layers in together.items():
            if not self.gated(x, layers):
                for start in range(0, len(layers), MOST_WEIGHTS):
                    self.side_by_side(x, layers[start : start + MOST_WEIGHTS])

    def suits(self, layer: Layer) -> bool:
        x, w = layer.x.tensor, layer.weight.tensor
        static = all(type(n) is int for n in (*x.shape, *w.shape))
        if not static or x.dtype not in DTYPES or not self.runs(x.device) or (not layer.kind and w.dtype != x.dtype):
            return False
        few = 0 < math.prod(x.shape[:-1]) <= MOST_ROWS
        return few and len(w.shape) == 2 and w.stride == (w.shape[1], 1) and x.shape[-1] % 64 == 0

    def norm(self, x: Value, layers: list[Layer]) -> tuple[Value, Value | None, float]:
        """What the layers read before it was normalised, with the norm's weight."""
        eqn = self.made_by(x, "rms_norm")
        if eqn is not None and self.only(x, *(layer.eqn for layer in layers)):
            (source, shape, weight, eps), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
            if len(shape) == 1 and weight is not None and eps is not None and weight.dtype == source.dtype:  # type: ignore[arg-type,union-attr]
                return source, weight, eps  # type: ignore[return-value]
        return x, None, 0.0

    def replace(
        self, at: Equation, x: Value, layers: list[Layer], outs: list[Value], residual: Value | None, gate: str
    ) -> None:  # noqa: E501
        """Layers that read x, at the place of one equation."""
        source, weight, eps = self.norm(x, layers)
        weights, scales = (
            [layer.weight for layer in layers],
            [layer.scale for layer in layers if layer.scale is not None],
        )
        biases = [layer.bias for layer in layers if layer.bias is not None]
        args = (source, weights, scales, biases, weight, eps, residual, gate, layers[0].kind)
        self.replaced[at] = lambda: self.emit(tessera.rows_linear.default, args, outs)

    def gated(self, x: Value, layers: list[Layer]) -> bool:
        """`silu(gate(x)) * up(x)` as one."""
        if len(layers) != 2:
            return False
        for gate, up in (layers, layers[::-1]):
            activation = self.reader(gate.eqn.out)
            name = getattr(activation.op, "_opname", "") if activation is not None else ""
            if (
                activation is None
                or name not in ("silu", "gelu")
                or activation.kwargs.get("approximate", "none") != "none"
            ):
                continue
            product = self.reader(activation.out)
            if product is None or getattr(product.op, "_opname", "") != "mul" or self.reader(up.eqn.out) is not product:
                continue
            inside = {activation.out, up.eqn.out} == set(product.inputs())
            if inside and gate.eqn.out.shape == up.eqn.out.shape and product.out.dtype == x.dtype:
                self.replace(product, x, [gate, up], [product.out], None, name)
                return True
        return False

    def reader(self, v: Value) -> Equation | None:
        """The only equation that wants a value."""
        users = self.users.get(v, [])
        return users[0] if len(users) == 1 and v not in self.results else None

    def side_by_side(self, x: Value, layers: list[Layer]) -> None:
        after = self.added(layers[0].eqn) if len(layers) == 1 else None
        if after is not None:
            total, residual = after
            self.replace(total, x, layers, [total.out], residual, "")
            return
        self.replace(layers[0].eqn, x, layers, [layer.eqn.out for layer in layers], None, "")
        for layer in layers[1:]:
            self.replaced[layer.eqn] = lambda: None

    def added(self, linear: Equation) -> tuple[Equation, Value] | None:
        """The residual that is added to a layer's result, and where."""
        total = self.reader(linear.out)
        if total is None or getattr(total.op, "_opname", "") != "add":
            return None
        others = [v for v in total.inputs() if v is not linear.out]
        if len(others) != 1 or len(total.args) != 2 or total.kwargs:
            return None
        same = others[0].type == linear.out.type == total.out.type
        return (total, others[0]) if same else None


# --- attention --------------------------------------------------------------------------------------------


class _Attention(_Rewrite):
    def find(self) -> None:
        for eqn in self.trace.equations:
            if getattr(eqn.op, "_opname", "") == "scaled_dot_product_attention" and self.runs(eqn.out.tensor.device):
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
        plain, turn = self.turned(q)
        self.cached(k)
        self.cached(v)
        shown = None if positions is not None else mask
        args = (plain, k, v, positions, shown, turn, scale)
        self.replaced[eqn] = lambda: self.emit(tessera.decode_attention.default, args, [eqn.out])

    def takes(self, q: Value, k: Value, v: Value) -> bool:
        tensors = [x.tensor for x in (q, k, v)]
        static = all(type(n) is int for t in tensors for n in t.shape)
        head = tensors[0].shape[-1]
        plain = static and all(t.dtype in DTYPES and len(t.shape) == 4 and t.shape[-1] == head for t in tensors)
        fits = plain and tensors[0].shape[2] == 1 and int(tensors[0].shape[1]) % int(tensors[1].shape[1]) == 0
        return fits and head in (32, 64, 128, 256) and all(t.stride[-1] == 1 for t in tensors)

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
        tensor = self.trace.constants.get(self.through(v, "detach", "alias"))  # type: ignore[call-overload]
        if tensor is not None:
            with torch._C._DisableTorchDispatch():
                return torch.equal(tensor, torch.arange(len(tensor), device=tensor.device))
        eqn = self.made_by(v, "arange")
        return eqn is not None and len(eqn.args) == 1

    def turned(self, v: Arg) -> tuple[Arg, Value | None]:
        """`x * cos + cat(-second half, first half) * sin` -> x and the stack of cos and sin."""
        total = self.made_by(v, "add")
        if total is None or len(total.args) != 2 or total.kwargs:
            return v, None
        for first, second in (total.args, total.args[::-1]):
            found = self.rotary(self.made_by(first, "mul"), self.made_by(second, "mul"))
            if found is not None:
                return found
        return v, None

    def rotary(self, straight: Equation | None, crossed: Equation | None) -> tuple[Value, Value] | None:
        if straight is None or crossed is None:
            return None
        x, cosine = straight.args[:2]
        joined, sine = self.made_by(crossed.args[0], "cat"), crossed.args[1]
        if joined is None or not isinstance(x, Value) or not self.last(joined, x.ndim):
            return None
        parts = joined.args[0]
        negative = self.made_by(parts[0], "neg") if len(parts) == 2 else None  # type: ignore[index,arg-type]
        if negative is None or not self.halves(x, parts[1], negative.args[0]):  # type: ignore[index]
            return None
        turn = self.stack(cosine, sine)
        return None if turn is None or turn.dtype != x.dtype else (x, turn)

    @staticmethod
    def last(cat: Equation, rank: int) -> bool:
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        return dim in (-1, rank - 1)

    def halves(self, x: Value, low: Arg, high: Arg) -> bool:
        """The two halves of x along its last dimension."""
        eqn = self.made_by(low, "chunk", "split")
        if eqn is not None:
            size = x.shape[-1] // 2
            whole = eqn.args[0] is x and eqn.args[1] == (2 if eqn.op._opname == "chunk" else size)  # type: ignore[union-attr]
            return whole and list(eqn.outputs) == [low, high] and self.last(eqn.with_(args=eqn.args[1:]), x.ndim)
        return self.slice_of(low, x) == (0, x.shape[-1] // 2) and self.slice_of(high, x) == (
            x.shape[-1] // 2,
            x.shape[-1],
        )

    def slice_of(self, v: Arg, x: Value) -> tuple[int, int] | None:
        eqn = self.made_by(v, "slice")
        if eqn is None or eqn.args[0] is not x:
            return None
        (_, dim, start, end, step), _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        if dim not in (-1, x.ndim - 1) or step != 1:
            return None
        size = x.shape[-1]
        return (start or 0, size if end is None or end > size else end)  # type: ignore[return-value,operator]

    def stack(self, cosine: Arg, sine: Arg) -> Value | None:
        """One tensor `(2, 1, head)` that holds both, where the program has it."""
        first, second = self.made_by(cosine, "select"), self.made_by(sine, "select")
        if first is None or second is None or first.args[0] is not second.args[0]:
            return None
        both = first.args[0]
        places = first.args[1:] == (0, 0) and second.args[1:] == (0, 1)
        fits = isinstance(both, Value) and both.ndim == 3 and both.shape[:2] == (2, 1) and both.tensor.stride[-1] == 1
        return both if places and fits else None  # type: ignore[return-value]

    def cached(self, v: Arg) -> None:
        """A cache's new contents as a write of its own."""
        eqn = self.made_by(v, "index_copy")
        if eqn is None or eqn in self.replaced:
            return
        cache, dim, positions, new = eqn.args
        if dim not in (2, -2) or positions.shape != (1,) or new.tensor.stride[-1] != 1 or cache.tensor.stride[-1] != 1:  # type: ignore[union-attr]
            return
        if new.dtype != cache.dtype or new.shape[2] != 1:  # type: ignore[union-attr]
            return
        plain, turn = self.turned(new)
        args = (tessera.cache_write.default, cache, plain, positions, turn)
        self.replaced[eqn] = lambda: self.emit(FUNCTIONAL, args, [eqn.out])
