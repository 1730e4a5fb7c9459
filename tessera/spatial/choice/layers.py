"""What a program's layers would take on chips that share it in different ways: a rough account, before anything is
mapped.

In: a captured program, a machine, a number of chips. Out: a `Problem`, and its layers. A layer is what is cut together
or not at all: weights cut by columns with those cut by rows behind them, or the stacks of experts. It has all equations
from its first product to that of the next layer. Layers with the same numbers are of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.distributed.expert_parallel import stacks
from tessera.distributed.tensor_parallel import TURNED, Cuts, columns_and_rows
from tessera.ir.equation import Equation, Value
from tessera.machines.spatial import SpatialMachine
from tessera.spatial import durations
from tessera.spatial.capture import Captured
from tessera.spatial.chips import cycles
from tessera.spatial.choice.search import Problem, Shape, Way
from tessera.spatial.graph import Constant, Product
from tessera.spatial.stage import Sides, fits, stage_of

FILLED = 0.8  # of a chip's memory that weights may take


@dataclass
class Layer:
    weights: set[Value]  # that are cut together
    first: int  # equation
    experts: int = 0
    alone: set[Value] = field(default_factory=set)  # weights that nobody cuts
    products: list[Product] = field(default_factory=list)
    others: float = 0.0  # cycles of all else, on one core
    summed: int = 0  # bytes of what comes of parts


def layered(got: Captured, machine: SpatialMachine) -> list[Layer]:
    cuts = columns_and_rows(got.trace, got.weights, 2)
    layers = _groups(got, cuts)
    if not layers:
        layers = [Layer(set(), 0)]
    layers.sort(key=lambda layer: layer.first)
    of_equation: list[Layer] = []
    for i in range(len(got.trace.equations) + 1):
        behind = [layer for layer in layers if layer.first <= i]
        of_equation.append(behind[-1] if behind else layers[0])
    grouped = {w for layer in layers for w in layer.weights}
    for i, eqn in enumerate(got.trace.equations):
        layer = of_equation[i]
        layer.alone |= {v for v in eqn.inputs() if v in got.weights and v not in grouped}
        layer.summed += sum(int(v.nbytes()) for v in eqn.results() if v in cuts.summed or _is_experts(eqn))
    for layer in layers:
        if not layer.summed:  # columns that nobody sums up are put side by side
            layer.summed = sum(int(v.nbytes()) for w, v in cuts.made.items() if w in layer.weights)
    for node in got.graph.nodes:
        layer = of_equation[min(node.place.equation, len(of_equation) - 1)]
        if isinstance(node, Product):
            layer.products.append(node)
        elif not isinstance(node, Constant):
            layer.others += cycles(machine, node)
    return layers


def _is_experts(eqn: Equation) -> bool:
    return str(eqn.op) == "tessera.experts.default"


def _groups(got: Captured, cuts: Cuts) -> list[Layer]:
    """Weights that are cut together, each group with the first equation that multiplies by one."""
    origin: dict[Value, Value] = {w: w for w in got.weights}
    stacked = {stack for stack, _ in stacks(got.trace)}
    joined: list[tuple[set[Value], int, int]] = []
    for i, eqn in enumerate(got.trace.equations):
        if eqn.opname in TURNED or (len(eqn.inputs()) == 1 and any(v in stacked for v in eqn.results())):
            origin.update({out: origin[v] for v in eqn.inputs() if v in origin for out in eqn.results()})
            continue
        if _is_experts(eqn):
            own = {origin[v] for v in eqn.inputs() if v in stacked and v in origin}
            count = next(int(v.shape[0]) for v in eqn.inputs() if v in stacked)
        else:
            own, count = {origin[v] for v in eqn.inputs() if origin.get(v) in cuts.weights}, 0
            if own and any(v in cuts.summed for v in eqn.results()):
                own |= {w for v in eqn.inputs() for w in cuts.of.get(v, ())}
        if own:
            joined = _join(joined, (own, i, count))
    return [Layer(weights, first, experts) for weights, first, experts in joined]


def _join(
    groups: list[tuple[set[Value], int, int]], new: tuple[set[Value], int, int]
) -> list[tuple[set[Value], int, int]]:
    separate = [group for group in groups if not group[0] & new[0]]
    met = [group for group in groups if group[0] & new[0]] + [new]
    return [*separate, (set().union(*(g[0] for g in met)), min(g[1] for g in met), max(g[2] for g in met))]


# --- what they take ---


def problem(
    got: Captured, machine: SpatialMachine, chips: int, throughput: bool, blocks: int = 0
) -> tuple[Problem, list[Layer]]:
    """A layer may lie whole on every chip of a stage that shares others; but not in a chain of `blocks`, which has at
    most as many stages."""
    layers = layered(got, machine)
    hop = max((layer.summed for layer in layers), default=0)
    counts = [layer.experts for layer in layers if layer.experts]
    ways: dict[Shape, list[tuple[Way, ...]]] = {}
    for shape in _shapes(machine, chips, min(len(layers), blocks or chips), counts, hop):
        cuttable = columns_and_rows(got.trace, got.weights, shape.tensor).weights
        ways[shape] = [_ways(layer, machine, shape, cuttable, not blocks) for layer in layers]
    numbers: dict[tuple, int] = {}
    kinds = tuple(numbers.setdefault(tuple(of[i] for of in ways.values()), len(numbers)) for i in range(len(layers)))
    room = int(FILLED * machine.sram.size * len(machine.cores()))
    each = {shape: [of[kinds.index(kind)] for kind in range(len(numbers))] for shape, of in ways.items()}
    return Problem(kinds, each, room, throughput), layers


def _shapes(machine: SpatialMachine, chips: int, stages: int, experts: list[int], hop: int) -> list[Shape]:
    found = []
    for pipeline in range(1, min(chips, stages) + 1):
        for groups in range(1, chips + 1):
            if chips % (pipeline * groups) or (groups > 1 and (not experts or any(n % groups for n in experts))):
                continue
            tensor = chips // pipeline // groups
            if fits(machine, tensor, groups, pipeline):
                found.append(Shape(tensor, groups, pipeline, _travels(machine, hop)))
    return found


def _ways(
    layer: Layer, machine: SpatialMachine, shape: Shape, cuttable: dict[Value, int], may_be_whole: bool
) -> tuple[Way, ...]:
    stage = stage_of(machine, shape.tensor, shape.experts)
    held, alone = (sum(int(w.nbytes()) for w in ws) for ws in (layer.weights, layer.alone))
    whole = Way("whole", _time(layer, machine, 1), held + alone)
    share = shape.tensor * (shape.experts if layer.experts else 1)
    if share == 1 or not (layer.experts or layer.weights & cuttable.keys()):
        return (whole,)
    summed = _summed(machine, layer.summed, stage.sharing) if shape.tensor > 1 else 0.0
    if layer.experts:
        summed += _summed(machine, layer.summed, stage.groups)
    cut = Way("cut", _time(layer, machine, share) + summed, held // share + alone)
    return (cut, whole) if may_be_whole and not layer.experts else (cut,)


def _time(layer: Layer, machine: SpatialMachine, chips: int) -> float:
    cores = len(machine.cores())
    return layer.others / cores + sum(_product(node, machine, cores * chips) for node in layer.products)


def _product(node: Product, machine: SpatialMachine, cores: int) -> float:
    """Spread over cores in the best of three ways: by its batch, its columns, or what is summed."""
    batch, m, k = node.x.shape
    n = node.w.shape[2]
    durations.check_type(machine, node)
    each = [
        (-(-batch // cores), m, k, n), (batch, m, k, -(-n // cores)), (batch, m, -(-k // cores), n)
    ]  # fmt: skip
    return min(b * durations.product(machine, m, k, n, node.dtype) for b, m, k, n in each)


def _summed(machine: SpatialMachine, nbytes: int, sides: Sides) -> float:
    """A sum over chips, along one side after the other: scattered and gathered."""
    return sum(2 * nbytes * (side - 1) / side / _width(machine) + (side - 1) * _far(machine) for side in sides)


def _travels(machine: SpatialMachine, nbytes: int) -> float:
    return nbytes / _width(machine) + _far(machine)


def _width(machine: SpatialMachine) -> int:
    return machine.chips.width if machine.chips is not None else machine.link.width


def _far(machine: SpatialMachine) -> int:
    return machine.chips.latency + machine.chips.jitter if machine.chips is not None else 0
