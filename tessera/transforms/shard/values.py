"""The values of a program on their way to one rank: which copies of each there are, and how another is made.

In: a global value and where it is wanted. Out: a local value that lies there. A copy that was made once serves
everyone; where there is none, collectives are emitted that lead to it from the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.dist import on
from tessera.ir.equation import Equation, Operator, Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.types import TensorType, contiguous_strides, size_hint, size_key
from tessera.transforms.shard.marked import exchanged, is_marked
from tessera.transforms.shard.paths import Step, cost, path
from tessera.util.errors import RuleError

SUMS = ("reduce_scatter", "all_reduce")
HEAVY = 1e6  # how much dearer it is to move what shall stay


class Values:
    def __init__(self, builder: Builder, mesh: Mesh, stays: Mapping[str, str], wide: Collection[Value] = ()) -> None:
        """`wide` are values whose summands are added in float32, if they have fewer bits."""
        self.builder, self.mesh, self.stays, self.wide = builder, mesh, stays, wide
        self.dist = on(mesh)
        self.held: dict[Value, list[Value]] = {}  # of a global value, its copies; its own place first
        self.kinds: dict[Value, str] = {}  # "weights", "activations", or "" for neither
        self.paths: dict[tuple[Placement, Placement], list[Step]] = {}
        self.make: Callable[[Value, Placement], Value | None] = lambda v, to: None  # a copy made rather than moved

    def place(self, v: Value) -> Placement:
        return placement_of(self.held[v][0])

    def whole(self, v: Value) -> Placement:
        return Placement.whole(self.mesh, v.shape)

    def price(self, v: Value, step: Step) -> float:
        stays = self.stays.get(step.axis) == self.kinds[v] != "" and step.name in ("all_gather", "all_to_all")
        return HEAVY if stays else 1.0

    def path(self, a: Placement, b: Placement) -> list[Step]:
        """Of those that were walked before, as before."""
        if (a, b) not in self.paths:
            self.paths[a, b] = path(a, b)
        return self.paths[a, b]

    def moving(self, v: Value, a: Placement, b: Placement) -> float:
        """What it costs to bring a value from one place to another."""
        return cost(self.path(a, b), v.dtype.itemsize, lambda step: self.price(v, step))

    def nearest(self, v: Value, to: Placement) -> tuple[float, Value]:
        """The copy from which a value comes to a place most cheaply."""
        ways = []
        for copy in self.held[v]:
            steps = self.path(placement_of(copy), to)
            ways.append((cost(steps, v.dtype.itemsize, lambda step: self.price(v, step)), len(steps), copy))
        price, _, copy = min(ways, key=lambda way: way[:2])
        return price, copy

    def bring(self, v: Value, to: Placement) -> Value:
        """A copy of a value that lies there."""
        for copy in self.held[v]:
            if copy.tensor.placement == to:
                return copy
        if (direct := self.make(v, to)) is not None:
            self.held[v].append(direct)
            return direct
        _, copy = self.nearest(v, to)
        for step in self.path(placement_of(copy), to):
            there = next((c for c in self.held[v] if c.tensor.placement == step.after), None)
            if there is None:
                there = self.stepped(v, copy, step)
                self.held[v].append(there)
            copy = there
        return copy

    def stepped(self, v: Value, copy: Value, step: Step) -> Value:
        """One collective; sums of 16 bits are made in float32 where that was asked for."""
        wide = v in self.wide and step.name in SUMS and v.tensor.is_float and v.dtype.itemsize < 4
        given = self.cast(copy, torch.float32) if wide else copy
        op = getattr(self.dist, step.name)
        if is_marked(step):
            there = self.named(lambda: exchanged(given, op, step), v.name, step.after)
        else:
            (there,) = self.emit(op, (given, *step.args), {}, [step.after], [v.name])
        assert there is not None
        return self.cast(there, v.dtype) if wide else there

    def named(self, emit: Callable[[], Value], hint: str, placement: Placement) -> Value:
        """What equations give in the end, under a name and at a place."""
        first = len(self.builder.equations)
        last = emit()
        check(self.builder.equations[-1].op, last.tensor, placement)
        there = self.builder.value(hint, last.tensor.placed(placement))
        self.builder.equations[first:] = [e.renamed({last: there}) for e in self.builder.equations[first:]]
        return there

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        to_copy = torch.ops.aten._to_copy.default
        (there,) = self.emit(to_copy, (x,), {"dtype": dtype}, [placement_of(x)], [x.name])
        assert there is not None
        return there

    def emit(
        self,
        op: Operator,
        args: tuple,
        kwargs: dict,
        placements: Sequence[Placement | None],
        hints: Sequence[str],
        many: bool = False,
    ) -> list[Value | None]:
        """Write an equation whose results lie there, and check that they have the sizes that says."""
        try:
            types = fake.infer(op, args, kwargs, self.builder.mode)
        except Exception as error:
            raise RuleError(f"{op} does not take a rank's part of its arguments {args}: {error}") from error
        listed = types if isinstance(types, list) else [types]
        outputs: list[Value | None] = []
        for type_, placement, hint in zip(listed, placements, hints, strict=True):
            if placement is None or not isinstance(type_, TensorType):
                outputs.append(None)
                continue
            check(op, type_, placement)
            outputs.append(self.builder.value(hint, type_.placed(placement)))
        source, tags = self.builder.source, self.builder.tags
        self.builder.equations.append(Equation(op, args, kwargs, tuple(outputs), many, source, tags))
        return outputs

    def agreed(self, drawn: Value) -> Value:
        """What the first rank drew counts for all, so that ranks need not be seeded alike. Masks are left alone: those
        of a size worth cutting are computed from a seed (`passes/decompose/random`)."""
        if drawn.dtype == torch.bool:
            return drawn
        place = placement_of(drawn)
        for axis in (axis for axis, ranks in self.mesh.axes if ranks > 1):  # a stage of a pipeline is alone along it
            for op, args, after in (("once", (axis,), place.with_part(axis)), ("all_reduce", (axis,), place)):
                (agreed,) = self.emit(getattr(self.dist, op), (drawn, *args), {}, [after], [drawn.name])
                assert agreed is not None
                drawn = agreed
        return drawn


def placement_of(local: Value) -> Placement:
    placement = local.tensor.placement
    assert placement is not None
    return placement


def check(op: Operator, type_: TensorType, placement: Placement) -> None:
    """What a rank gets has the size of its part."""
    here, there = type_.shape, placement.local_shape
    same = here == there if not type_.is_symbolic else tuple(map(size_key, here)) == tuple(map(size_key, there))
    if not same:
        raise RuleError(f"the sharding rule of {op} says {placement}, but a rank gets {type_}")


def local_type(type_: TensorType, placement: Placement) -> TensorType:
    """The type of a rank's part, whose dimensions lie in the same order as those of the whole."""
    if placement.is_whole:
        return type_.placed(placement)
    shape = placement.local_shape
    order = sorted(range(len(shape)), key=lambda d: -size_hint(type_.stride[d])) if not type_.is_row_major else None
    return TensorType(type_.dtype, shape, contiguous_strides(shape, order), type_.device).placed(placement)
