"""A graph of ONNX nodes that is being written.

In: calls of `op` with an operator's name, inputs and attributes. Out: a list of `Node`s, initializers, and for each
result a `Ref`, which knows its dtype and, where it stands for a value of the Trace, its shape. Equal constants are one
initializer; a symbolic size is computed once (`sizes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tessera.frontends.onnx.elements import Narrow
from tessera.ir.equation import NOWHERE, Source
from tessera.ir.types import SYMBOLIC, Size, TensorType, known, size_key
from tessera.util.names import names
from tessera.util.safetensors import flat_bytes

INT64_MAX = 2**63 - 1
UNCHOSEN = (torch.bool, torch.int8, torch.int16)  # what runtimes have no Where of
Content = torch.Tensor | Narrow  # what a file holds under a name
# Operators whose result has the shape that their inputs are brought to.
ELEMENTWISE = names(
    """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Cos Cosh Div Elu
    Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max
    Min Mod Mul Neg Not Or Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softmax Softplus Sqrt Sub Tan Tanh Where
    Xor
    """
)


@dataclass(frozen=True)
class Ref:
    """A value of the graph: its name, its dtype, and its shape where that is known."""

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...] | None = None

    @property
    def ndim(self) -> int:
        assert self.shape is not None, f"{self.name} has no known shape"
        return len(self.shape)

    @property
    def sizes(self) -> tuple[Size, ...]:
        assert self.shape is not None, f"{self.name} has no known shape"
        return self.shape

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point


@dataclass
class Node:
    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    domain: str = ""
    source: Source = NOWHERE
    inner: dict[str, Graph] = field(default_factory=dict)  # graphs among the attributes


class Graph:
    def __init__(self, opset: int, outer: Graph | None = None) -> None:
        self.opset, self.outer = opset, outer
        self.nodes: list[Node] = []
        self.inputs: list[Ref] = []
        self.outputs: list[Ref] = []
        self.initializers: dict[str, Content] = {} if outer is None else outer.initializers
        self.source = NOWHERE
        self.result: TensorType = None  # type: ignore[assignment]  # of the equation that is being written, the first
        self.results: list[TensorType | None] = []
        self.compute: Callable[[Any], Ref] = None  # type: ignore[assignment]  # a symbolic number, as one element
        self.transposed: Callable[[Ref], Ref] = None  # type: ignore[assignment]  # a matrix turned
        # A graph inside a node sees what was computed around it.
        self._once: dict[tuple, Ref] = {} if outer is None else dict(outer._once)
        self.sizes: dict[str, Ref] = {} if outer is None else dict(outer.sizes)  # symbolic numbers, by their text
        self._constants: dict[tuple, Ref] = {} if outer is None else outer._constants
        self._names: dict[str, int] = {} if outer is None else outer._names

    # --- names and nodes ---

    def fresh(self, hint: str) -> str:
        """The name itself, or `name_1`, … where it is taken."""
        count = self._names.get(hint, 0)
        self._names[hint] = count + 1
        return hint if not count else self.fresh(f"{hint}_{count}")

    def op(
        self,
        kind: str,
        *inputs: Ref | None,
        outputs: int = 0,
        dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        shape: Sequence[Size] | None = None,
        domain: str = "",
        **attributes: object,
    ) -> Any:
        """Write a node. Gives its result, or a list of them where `outputs` says how many. A result's dtype is that of
        the first input unless given."""
        if kind == "Where" and dtype in UNCHOSEN:
            test, *parts = inputs
            wide = [self.cast(x, torch.int32) for x in parts if x is not None]
            return self.cast(self.op("Where", test, *wide, dtype=torch.int32, shape=shape), dtype)
        given = [x.name if x is not None else "" for x in inputs]
        while given and not given[-1]:
            given.pop()
        own = dtype if dtype is not None else next(x.dtype for x in inputs if x is not None)
        module = self.source.module
        outs = [self.fresh(f"{module}.{kind}" if module else kind) for _ in range(outputs or 1)]
        kept = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(Node(kind, given, outs, kept, domain, self.source))
        if shape is None and kind in ELEMENTWISE and all(x is None or x.shape is not None for x in inputs):
            shape = broadcast([x.sizes for x in inputs if x is not None])
        dtypes = [own] * len(outs) if isinstance(own, torch.dtype) else list(own)
        refs = [Ref(n, d, None if shape is None else tuple(shape)) for n, d in zip(outs, dtypes, strict=True)]
        return refs if outputs else refs[0]

    def written(self) -> tuple[int, int, int]:
        """How much is written so far."""
        return len(self.nodes), len(self._once), len(self.sizes)

    def forget(self, before: tuple[int, int, int]) -> None:
        """Take back what was written since; constants stay, and are left out of the file where nothing reads them."""
        del self.nodes[before[0] :]
        for kept, count in ((self._once, before[1]), (self.sizes, before[2])):
            while len(kept) > count:
                kept.popitem()

    # --- constants ---

    def tensor(self, data: torch.Tensor, hint: str = "constant") -> Ref:
        """A constant tensor; of complex numbers the parts."""
        kind, shape = data.dtype, tuple(data.shape)
        data = as_real(data.detach().cpu()).contiguous()
        key = None
        if data.numel() <= 64:
            key = (kind, shape, flat_bytes(data).numpy().tobytes())
            if key in self._constants:
                return self._constants[key]
        name = self.fresh(hint)
        self.initializers[name] = data
        ref = Ref(name, kind, shape)
        if key is not None:
            self._constants[key] = ref
        return ref

    def narrow(self, data: torch.Tensor, code: int, hint: str) -> Ref:
        """A constant of a type that PyTorch has no dtype for."""
        name = self.fresh(hint)
        self.initializers[name] = Narrow(data, code)
        return Ref(name, data.dtype, tuple(data.shape))

    def small_constants(self) -> dict[str, torch.Tensor]:
        """Those that equal ones share; no weights."""
        shared = {ref.name: self.initializers[ref.name] for ref in self._constants.values()}
        return {name: data for name, data in shared.items() if isinstance(data, torch.Tensor)}

    def full(self, number: object, dtype: torch.dtype, shape: Sequence[int] = ()) -> Ref:
        """A number as a constant of no dimensions, or of these."""
        return self.tensor(torch.full(tuple(shape), number, dtype=dtype))  # type: ignore[arg-type]

    def scalar(self, x: object, dtype: torch.dtype) -> Ref:
        """A number of the program, constant or not, as a tensor without dimensions."""
        if isinstance(x, Ref):
            return self.cast(x, dtype)
        if isinstance(x, SYMBOLIC):
            return self.once(("number", str(x), dtype), lambda: self.number(x, dtype))
        return self.full(x, dtype)

    def number(self, x: object, dtype: torch.dtype) -> Ref:
        return self.cast(self.op("Squeeze", self.compute(x), shape=()), dtype)

    def ints(self, sizes: Sequence[object]) -> Ref:
        """Sizes as a vector of int64: a constant where all are numbers."""
        sizes = [known(s) if isinstance(s, torch.SymInt) else s for s in sizes]
        if all(isinstance(s, int) for s in sizes):
            return self.tensor(torch.tensor(sizes, dtype=torch.int64), "sizes")
        key = tuple(s.name if isinstance(s, Ref) else size_key(s) for s in sizes)
        return self.once(key, lambda: self.joined(sizes))

    def joined(self, sizes: Sequence[object]) -> Ref:
        """Sizes, of which some are computed, as a vector."""
        parts: list[Ref] = []
        run: list[int] = []
        for s in (*sizes, None):
            if isinstance(s, int):
                run.append(s)
                continue
            if run:
                parts.append(self.ints(run))
                run = []
            if s is not None:
                parts.append(self.one(s))
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0, shape=(len(sizes),))

    def one(self, size: object) -> Ref:
        """A size, or a number that the program computes, as a vector of one element."""
        if isinstance(size, Ref):
            return self.op("Reshape", self.cast(size, torch.int64), self.ints([1]), shape=(1,))
        return self.ints([size]) if isinstance(size, int) else self.compute(size)

    def once(self, key: tuple, write: Callable[[], Ref]) -> Ref:
        """What several readers want, written for the first of them; it belongs to no module."""
        if key not in self._once:
            with self.shared():
                self._once[key] = write()
        return self._once[key]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What is written inside serves the whole graph."""
        before, self.source = self.source, replace(self.source, module="")
        try:
            yield
        finally:
            self.source = before

    # --- what most forms need ---

    def cast(self, x: Ref, dtype: torch.dtype) -> Ref:
        return x if x.dtype == dtype else self.op("Cast", x, to=dtype, dtype=dtype, shape=x.shape)

    def reshape(self, x: Ref, shape: Sequence[Size]) -> Ref:
        """Reshape to sizes of the program. A size that stays at its place, or the only other one, is not computed."""
        target = [known(s) if isinstance(s, torch.SymInt) else s for s in shape]
        if x.shape is not None and [*map(size_key, x.shape)] == [*map(size_key, target)]:
            return x
        out = tuple(target)
        if not any(s == 0 for s in target if isinstance(s, int)):
            for i, s in enumerate(target):
                if not isinstance(s, int) and x.shape is not None and i < x.ndim and same(x.sizes[i], s):
                    target[i] = 0  # as in the input
            symbolic = [i for i, s in enumerate(target) if not isinstance(s, int)]
            if symbolic:
                target[symbolic[0]] = -1
            return self.op("Reshape", x, self.ints(target), shape=out)
        return self.op("Reshape", x, self.ints(target), allowzero=1, shape=out)

    def unsqueeze(self, x: Ref, *dims: int) -> Ref:
        shape = None
        if x.shape is not None:
            rank = x.ndim + len(dims)
            at, rest = {d % rank for d in dims}, iter(x.shape)
            shape = [1 if i in at else next(rest) for i in range(rank)]
        return self.op("Unsqueeze", x, self.ints(dims), shape=shape)

    def permute(self, x: Ref, order: Sequence[int]) -> Ref:
        if list(order) == list(range(len(order))):
            return x
        return self.op("Transpose", x, perm=list(order), shape=[x.sizes[d] for d in order])

    def expand(self, x: Ref, shape: Sequence[Size]) -> Ref:
        """Expand to a shape of the same rank or more; sizes that stay are not computed."""
        lead = len(shape) - x.ndim
        target = [1 if i >= lead and same(x.sizes[i - lead], s) else s for i, s in enumerate(shape)]
        if not lead and all(s == 1 for s in target if isinstance(s, int)) and all(isinstance(s, int) for s in target):
            return x
        return self.op("Expand", x, self.ints(target), shape=tuple(shape))

    def slice(self, x: Ref, dim: int, start: object, end: object, step: int = 1) -> Ref:
        return self.op("Slice", x, self.ints([start]), self.ints([end]), self.ints([dim]), self.ints([step]))

    def reduce(self, kind: str, x: Ref, dims: Sequence[int] | None, keepdim: bool) -> Ref:
        """Axes are an input since opset 18; of sums always."""
        axes = None if dims is None else list(dims)
        shape = None
        if x.shape is not None:
            gone = set(range(x.ndim)) if axes is None else {d % max(x.ndim, 1) for d in axes}
            shape = [1 if i in gone else s for i, s in enumerate(x.shape) if keepdim or i not in gone]
            if kind == "ReduceMean" and any(same(x.sizes[i], 0) for i in gone):  # runtimes differ in what they give
                return self.expand(self.full(math.nan, x.dtype), shape)
        if self.opset < 18 and kind != "ReduceSum":
            return self.op(kind, x, axes=axes, keepdims=int(keepdim), shape=shape)
        return self.op(kind, x, None if axes is None else self.ints(axes), keepdims=int(keepdim), shape=shape)


def every(nodes: Iterable[Node]) -> list[Node]:
    """The nodes, and those of graphs inside them."""
    return [m for n in nodes for m in (n, *(i for inner in n.inner.values() for i in every(inner.nodes)))]


def needed(nodes: Sequence[Node], wanted: set[str]) -> list[Node]:
    """The nodes that these values are computed with."""
    live = set(wanted)
    kept = []
    for node in reversed(nodes):
        if any(o in live for o in node.outputs):
            kept.append(node)
            live.update(i for n in every([node]) for i in n.inputs)
            live.update(o.name for n in every([node]) for inner in n.inner.values() for o in inner.outputs)
    return kept[::-1]


def as_real(data: torch.Tensor) -> torch.Tensor:
    """Complex numbers as files have them: their parts, in a last dimension of two. Others as they are."""
    return torch.view_as_real(data.resolve_conj()) if data.is_complex() else data


def real_parts(x: Ref) -> Ref:
    """A value as the numbers that the file holds."""
    if not x.dtype.is_complex:
        return x
    return Ref(x.name, x.dtype.to_real(), None if x.shape is None else (*x.shape, 2))


def broadcast(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """The shape that several are brought to."""
    rank = max(map(len, shapes), default=0)
    out: list[Size] = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, rank - len(shape)):
            if not same(n, 1):
                out[i] = n
    return out


def same(a: Size, b: Size) -> bool:
    return size_key(a) == size_key(b)
