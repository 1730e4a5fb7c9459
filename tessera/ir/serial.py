"""A Trace as data: lists, dicts, texts and numbers that JSON holds, and back.

In: traces, and whatever of `Arg` stands beside them. Out: tables (`Writer.tables`) in which every value, type, operator
and sub-trace stands once and is referred to by its number, so that what was one object is one object again when a
`Reader` reads it. Nothing stored is ever executed or unpickled. What has no form here (a user's function among the
arguments, an operator that is not PyTorch's or Tessera's) is refused with `Unserial`.

Lines of the user's files and tensors that a program closes over are not written but numbered: `places` and `held`
belong to whoever reads. So two captures of one program are the same text although the file around it has changed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from tessera.ir.aliased import Result
from tessera.ir.dist import Collective, on
from tessera.ir.equation import SPECIALS, Arg, Equation, Operator, Source, Special, Value
from tessera.ir.formula import Formulas
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Mark, Placement
from tessera.ir.serial_size import Sizes, write_number, write_size
from tessera.ir.trace import Trace
from tessera.ir.types import OpaqueType, ScalarType, Size, TensorType, Type
from tessera.torch_internals.fake import FakeTensor, unset_fake_temporarily
from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.errors import Unserial

VERSION = 1  # of the form; whoever stores tables stores it too
NAMESPACES = ("aten", "prims", "prim", "tessera")  # operators that mean the same in every process
SMALL = 1 << 16  # bytes of a tensor that is written whole
KINDS = {"int": int, "float": float, "bool": bool}
Place = tuple[str, int]  # file and line
Data = object


class Writer:
    """Turns traces into tables. `claimed` writes operators that an executor made; `runtime`: whether whoever reads can
    hold sizes that are known only when the program runs."""

    def __init__(
        self,
        places: Sequence[Place] = (),
        held: Sequence[torch.Tensor] = (),
        claimed: Callable[[Special, Writer], Data] | None = None,
        runtime: bool = False,
    ) -> None:
        self.places: dict[Place, int] = {p: i for i, p in enumerate(places)}
        self.known = len(self.places)  # those that a reader brings
        self.held = list(held)
        self.claimed, self.runtime = claimed, runtime
        self._tables: dict[str, list[Data]] = {n: [] for n in ("types", "values", "sources", "tags", "ops", "traces")}
        self._numbers: dict[object, int] = {}

    def tables(self) -> dict[str, Data]:
        return {**self._tables, "places": [list(p) for p in self.places][self.known :]}

    def _number(self, table: str, key: object, write: Callable[[], Data]) -> int:
        number = self._numbers.get(key)
        if number is None:
            data = write()  # may fill the same table
            self._tables[table].append(data)
            number = self._numbers[key] = len(self._tables[table]) - 1
        return number

    # --- values and types ---

    def value(self, v: Value) -> int:
        number = self._numbers.get(v)
        return self._number("values", v, lambda: [v.name, self.type(v.type)]) if number is None else number

    def type(self, t: Type) -> int:
        if isinstance(t, TensorType):
            sizes = (*t.shape, *t.stride, t.offset)
            key: object = (t.key(), str(t.offset)) if any(type(s) is not int for s in sizes) else (t.key(), t.offset)
            return self._number("types", ("type", key, t.placement), lambda: self._tensor(t))
        if isinstance(t, ScalarType):
            return self._number("types", t, lambda: ["scalar", t.kind.__name__])
        if isinstance(t, OpaqueType):
            return self._number("types", t, lambda: ["opaque", t.name])
        raise Unserial(f"a type of another kind: {t!r}")

    def _tensor(self, t: TensorType) -> Data:
        shape, stride = (list(map(self.size, part)) for part in (t.shape, t.stride))
        return [
            "tensor",
            _name(t.dtype),
            shape,
            stride,
            str(t.device),
            _name(t.layout),
            self.size(t.offset),
            list(t.bits),
            *([] if t.placement is None else [_write_placement(t.placement)]),
        ]

    def size(self, size: object) -> Data:
        return write_size(size, self.runtime)

    # --- programs ---

    def trace(self, t: Trace) -> int:
        if type(t) is not Trace:
            raise Unserial(f"expected a Trace, got {type(t).__name__}")
        return self._number("traces", t, lambda: self._trace(t))

    def _trace(self, t: Trace) -> Data:
        return {
            "name": t.name,
            "inputs": [self.value(v) for v in t.inputs],
            "equations": [self.equation(e) for e in t.equations],
            "outputs": [self.arg(o) for o in t.outputs],
            "mutations": [[self.value(a), self.value(b)] for a, b in t.mutations.items()],
            "constants": [[self.value(v), self.tensor(x)] for v, x in t.constants.items()],
            "symbols": [[s, self.value(v), dim] for s, (v, dim) in t.symbols.items()],
        }

    def equation(self, e: Equation) -> Data:
        return [
            self.operator(e.op),
            [self.arg(a) for a in e.args],
            [[k, self.arg(a)] for k, a in e.kwargs.items()],
            [-1 if v is None else self.value(v) for v in e.outputs],
            int(e.many),
            self.source(e.source),
            self._number("tags", ("tags", e.tags), lambda: sorted(e.tags)),
        ]

    def source(self, s: Source) -> int:
        return self._number("sources", s, lambda: [self._place(s), s.module, s.note])

    def _place(self, s: Source) -> int:
        return self.places.setdefault((s.file, s.line), len(self.places))

    def operator(self, op: Operator) -> int:
        return self._number("ops", op, lambda: self._operator(op))

    def _operator(self, op: Operator) -> Data:
        if isinstance(op, OpOverload):
            return self._overload(op)
        if op.namespace == "tessera" and SPECIALS.get(op.name) is op:
            return ["special", op.name]
        if isinstance(op, Collective):
            return ["dist", op.name, op.mesh.axes]
        if self.claimed is None:
            raise Unserial(f"the operator {op!r}, which was made for one program")
        return self.claimed(op, self)

    def _overload(self, op: OpOverload) -> Data:
        if op.namespace not in NAMESPACES:
            raise Unserial(f"the operator {op}, which is another library's")
        return ["op", op.namespace, op_name(op), overload_name(op)]

    # --- arguments ---

    def arg(self, a: Arg) -> Data:
        kind = type(a)
        if kind is Value:
            return ["v", self.value(a)]  # type: ignore[arg-type]
        if a is None or kind in (int, float, bool, str):
            return a
        if kind is list or kind is tuple:
            return ["l" if kind is list else "t", *map(self.arg, a)]  # type: ignore[call-overload]
        if kind is dict:
            return ["d", *([self.arg(k), self.arg(v)] for k, v in a.items())]  # type: ignore[attr-defined]
        if kind is slice:
            return ["slice", *map(self.arg, (a.start, a.stop, a.step))]  # type: ignore[attr-defined]
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return ["torch", _name(a)]
        if kind is torch.device:
            return ["device", str(a)]
        if kind is torch.SymInt:
            return ["size", self.size(a)]
        if kind is torch.SymFloat:
            return ["number", write_number(a, self.runtime)]  # type: ignore[arg-type]
        if kind is complex:
            return ["complex", a.real, a.imag]  # type: ignore[attr-defined]
        if kind is Trace:
            return ["trace", self.trace(a)]  # type: ignore[arg-type]
        if kind is Result:
            return ["result", a.place]  # type: ignore[attr-defined]
        if isinstance(a, OpOverload):
            return self._overload(a)
        raise Unserial(f"an argument of type {kind.__name__}")

    def tensor(self, x: torch.Tensor) -> Data:
        """A constant: one of the reader's own by its number, a small one by its bytes."""
        for i, known in enumerate(self.held):
            if known is x:
                return i
        if isinstance(x, FakeTensor) or type(x) is not torch.Tensor or x.layout is not torch.strided:
            raise Unserial(f"a constant of type {type(x).__name__}")
        if x.numel() * x.element_size() > SMALL or x.requires_grad or x.is_conj() or x.is_neg():
            raise Unserial(f"a constant of {x.numel()} elements")
        return [_name(x.dtype), list(x.shape), list(x.stride()), str(x.device), base64.b64encode(content(x)).decode()]


class Reader:
    """Turns tables into traces. `claimed` makes the operators that an executor made, for an equation of theirs."""

    def __init__(
        self,
        tables: dict,
        places: Sequence[Place] = (),
        held: Sequence[torch.Tensor] = (),
        sizes: Sizes | Formulas | None = None,
        claimed: Callable[[list, Equation, Reader], Special] | None = None,
    ) -> None:
        self.sizes, self.held, self.claimed = sizes or Sizes(), list(held), claimed
        self.types = [self._type(t) for t in tables["types"]]
        self.values = [Value(name, self.types[t]) for name, t in tables["values"]]
        places = [*places, *((file, line) for file, line in tables["places"])]
        self.sources = [Source(places[at][0], places[at][1], module, note) for at, module, note in tables["sources"]]
        self.tags = [frozenset(tags) for tags in tables["tags"]]
        self._ops: list[list] = tables["ops"]
        self._made: dict[int, Operator] = {}
        self._texts: list[dict] = tables["traces"]
        self._traces: dict[int, Trace] = {}

    def _type(self, t: list) -> Type:
        if t[0] == "scalar":
            return ScalarType(KINDS[t[1]])
        if t[0] == "opaque":
            return OpaqueType(t[1])
        _, dtype, shape, stride, device, layout, offset, bits, *placed = t
        sizes, steps = (tuple(cast(Size, self.sizes.read(n)) for n in part) for part in (shape, stride))
        start = cast(Size, self.sizes.read(offset))
        kind, laid = _attribute(dtype, torch.dtype), _attribute(layout, torch.layout)
        placement = self._placement(*placed[0]) if placed else None
        return TensorType(kind, sizes, steps, torch.device(device), laid, start, (bits[0], bits[1]), placement)

    def _placement(self, axes: list, shape: list, splits: list, parts: list, marks: list) -> Placement:
        mesh = _mesh(axes)
        sizes = tuple(cast(Size, self.sizes.read(n)) for n in shape)
        read = tuple((axis, Mark(blocks, zigzag)) for axis, blocks, zigzag in marks)
        return Placement(mesh, sizes, tuple(map(tuple, splits)), tuple(map(tuple, parts)), read)

    def trace(self, number: int) -> Trace:
        if number not in self._traces:
            t, values = self._texts[number], self.values
            self._traces[number] = Trace(
                t["name"],
                tuple(values[i] for i in t["inputs"]),
                tuple(map(self.equation, t["equations"])),
                tuple(map(self.arg, t["outputs"])),
                {values[a]: values[b] for a, b in t["mutations"]},
                {values[v]: self.tensor(x) for v, x in t["constants"]},
                {s: (values[v], dim) for s, v, dim in t["symbols"]},
            )
        return self._traces[number]

    def equation(self, e: list) -> Equation:
        number, args, kwargs, outputs, many, source, tags = e
        op = self._made.get(number)
        eqn = Equation(
            op or self._plain(number),
            tuple(map(self.arg, args)),
            {k: self.arg(a) for k, a in kwargs},
            tuple(None if i < 0 else self.values[i] for i in outputs),
            bool(many),
            self.sources[source],
            self.tags[tags],
        )
        return eqn if number in self._made else eqn.with_(op=self._claim(number, eqn))

    def _plain(self, number: int) -> Operator:
        """The operator itself, or where an executor made it what it runs."""
        data = self._ops[number]
        if data[0] == "op":
            self._made[number] = _overload(data)
        elif data[0] == "special":
            self._made[number] = SPECIALS[data[1]]
        elif data[0] == "dist":
            self._made[number] = getattr(on(_mesh(data[2])), data[1])
        else:
            return SPECIALS["number"]  # stands there until `_claim` has looked at the equation
        return self._made[number]

    def _claim(self, number: int, eqn: Equation) -> Operator:
        if self.claimed is None:
            raise Unserial(f"an operator that an executor made: {self._ops[number][1]}")
        self._made[number] = self.claimed(self._ops[number], eqn, self)
        return self._made[number]

    def arg(self, a: Data) -> Arg:
        if type(a) is not list:
            return a
        match a[0]:
            case "v":
                return self.values[a[1]]
            case "l":
                return [self.arg(x) for x in a[1:]]
            case "t":
                return tuple(self.arg(x) for x in a[1:])
            case "d":
                return {self.arg(k): self.arg(v) for k, v in a[1:]}
            case "slice":
                return slice(*map(self.arg, a[1:]))
            case "torch":
                return _attribute(a[1], (torch.dtype, torch.layout, torch.memory_format))
            case "device":
                return torch.device(a[1])
            case "size":
                return self.sizes.read(a[1])
            case "number":
                return self.sizes.number(a[1])
            case "complex":
                return complex(a[1], a[2])
            case "trace":
                return self.trace(a[1])
            case "result":
                return Result(a[1])
            case "op":
                return _overload(a)
        raise Unserial(f"an argument of a kind that is not known: {a[0]!r}")

    def tensor(self, x: Data) -> torch.Tensor:
        if isinstance(x, int):
            return self.held[x]
        dtype, shape, stride, device, text = x  # type: ignore[misc]
        kind = _attribute(dtype, torch.dtype)
        data = bytearray(base64.b64decode(text))
        with unset_fake_temporarily(), torch.no_grad():
            flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
            once = [1 if step == 0 and n > 1 else n for n, step in zip(shape, stride, strict=True)]
            x = torch.empty_strided(once, stride, dtype=kind, device=device)
            return x.copy_(flat.view(once)).expand(shape)


def content(x: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, those of an expanded dimension once."""
    with unset_fake_temporarily(), torch.no_grad():
        layout = zip(x.shape, x.stride(), strict=True)
        once = x.detach()[tuple(slice(0, 1) if step == 0 and n > 1 else slice(None) for n, step in layout)]
        flat = torch.empty(once.numel(), dtype=x.dtype).copy_(once.reshape(-1))  # strides of one element may be any
        return flat.view(torch.uint8).numpy().tobytes()


def _write_placement(p: Placement) -> list:
    marks = [[axis, mark.blocks, mark.zigzag] for axis, mark in p.marks]
    return [p.mesh.axes, [write_size(n) for n in p.shape], p.splits, p.parts, marks]


def _mesh(axes: list) -> Mesh:
    return Mesh(tuple((name, size) for name, size in axes))


def _name(x: object) -> str:
    return str(x).removeprefix("torch.")


def _attribute(name: str, kind: type | tuple[type, ...]) -> Any:
    attribute = getattr(torch, name, None)
    if not isinstance(attribute, kind):
        raise Unserial(f"torch has no {name!r} of the kind that was stored")
    return attribute


def _overload(data: list) -> OpOverload:
    _, namespace, name, overload = data
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace in NAMESPACES else None
    op = getattr(packet, overload, None)
    if not isinstance(op, OpOverload):
        raise Unserial(f"there is no operator {namespace}.{name}.{overload}")
    return op
