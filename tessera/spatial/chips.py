"""Over chips: what each of them holds, and which stage of a pipeline it runs.

In: a clean Trace, its weights, a machine, and a cut: how many chips share every tensor, how many have other experts,
how many stages stand behind each other, how many batches go through them. Out: a graph whose nodes know their chips.
Weights are cut by distribution's own rules, and `transforms/shard` partitions the program. Stages are consecutive
equations; the slowest is as fast as it can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from tessera.distributed.expert_parallel import stacks
from tessera.distributed.tensor_parallel import columns_and_rows
from tessera.ir.equation import Value
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial import durations
from tessera.spatial.capture import Captured
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Constant, Expression, Graph, Input, Node, Product, Scatter
from tessera.spatial.importer.together import together
from tessera.spatial.stage import PATCH, SPARE, Stage, patch, stage_of, stages_on
from tessera.transforms.shard.partition import shard
from tessera.util.errors import OptionError

WORDS = ("tensor", "experts", "pipeline", "batches", "slots", "blocks")
LARGE = 8  # a weight is large that takes more than this part of a chip's memory


@dataclass(frozen=True)
class Cut:
    """How a program is spread over chips; with all ones, tiles go to the cores of any of them."""

    tensor: int = 1
    experts: int = 1
    pipeline: int = 1
    batches: int = 1
    slots: int = 0  # of an expert, for tokens; 0: as many as the program says
    blocks: int = 0  # equal ones, each kind of which is mapped once; 0: the model is mapped whole
    whole: frozenset[str] = frozenset()  # weights that are not cut where others are
    demanded: bool = False  # that tensors or experts are cut: where none can be, chips are not just more cores

    @classmethod
    def of(cls, words: Mapping[str, int] | None, chips: int) -> Cut:
        """What was asked for, checked; without a word every tensor is cut."""
        if words is None:
            return cls(tensor=chips)
        if not isinstance(words, Mapping):
            raise OptionError(f'cut: expected words and counts, such as {{"tensor": 2}}; got {words!r}')
        for word, count in words.items():
            if word not in WORDS:
                raise OptionError(f"cut: expected {', '.join(WORDS)}, got {word!r}")
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise OptionError(f"cut: expected {word} to be 1 or more, got {count!r}")
        cut = cls(**words, demanded=max(words.get("tensor", 1), words.get("experts", 1)) > 1)  # type: ignore[arg-type]
        if cut.chips not in (1, chips):
            product = "tensor times pipeline" if cut.experts == 1 else "tensor times experts times pipeline"
            raise OptionError(f"cut: expected {product} to be {chips} chips, or 1; got {cut.chips}")
        return cut

    @property
    def chips(self) -> int:
        return self.tensor * self.experts * self.pipeline


def cut_over_chips(got: Captured, machine: SpatialMachine, chips: int, cut: Cut) -> tuple[Graph, tuple[Core, ...]]:
    """The graph of all chips, and their cores."""
    stage = stage_of(machine, cut.tensor, cut.experts)
    local = got.trace if stage.mesh.ranks == 1 else partitioned(got, stage, machine, cut.whole)
    if local is None and (cut.demanded or cut.pipeline * cut.batches > 1):
        sizes = sorted({str(list(v.shape)) for v in got.weights if len(v.shape) > 1})
        raise MapError(
            f"cut: no weight of {got.trace.name} can be cut in {cut.tensor}: expected matrices of products, or experts "
            "of tessera.experts, with sizes that it divides and readers that take parts; got "
            f"{', '.join(sizes[:5]) or 'none'}"
        )
    if cut.pipeline == cut.batches == 1 and (local is None or stage.mesh.ranks == 1):  # tiles go to any chip
        wanted = PATCH + SPARE * sum(n.nbytes for n in got.graph.nodes if isinstance(n, Constant)) // machine.sram.size
        return got.graph, tuple(core for chip in range(chips) for core in patch(machine, chip, wanted // chips))
    assert local is not None
    held = dict(zip(got.trace.inputs, local.inputs, strict=True))
    weights = {held[v]: of for v, of in got.weights.items()}
    twice = lambda nbytes, ranks: pays_twice(machine, nbytes, ranks)  # noqa: E731
    graph = together(local, got.mode, weights, stage.mesh, twice, cut.batches)
    stages = stages_on(machine, stage, cut.pipeline)
    put(graph, machine, stages)
    return graph, tuple(core for stage in stages for chip in stage for core in machine.cores(chip))


def partitioned(got: Captured, stage: Stage, machine: SpatialMachine, whole: Collection[str] = ()) -> Trace | None:
    """The program of one rank; None where nothing can be cut. Some weights shall be `whole`. Of the others, a cut that
    some reader must undo pays for weights that take much of a chip alone."""
    mesh, large = stage.mesh, machine.sram.size * len(machine.cores()) // LARGE
    lies = {v: Placement.whole(mesh, v.shape) for v, (name, _) in got.weights.items() if name not in whole}
    before = 1
    for axis in stage.sharing_axes:
        ranks = mesh.size(axis)
        before *= ranks
        cuts, lost = columns_and_rows(got.trace, lies, ranks), columns_and_rows(got.trace, lies, before).lost
        states = {v: after for v, after in got.trace.mutations.items() if not lost & cuts.of.get(after, lost)}
        dims = {v: dim for v, dim in cuts.weights.items() if v not in lost or int(v.nbytes()) > large}
        for v, dim in (dims | {v: cuts.split[after] for v, after in states.items() if after in cuts.split}).items():
            if ranks > 1 and lies[v].local(dim) % ranks == 0:
                lies[v] = lies[v].with_axis(dim, axis)
    lies |= experts_apart(got.trace, stage)
    if all(placement.is_whole for placement in lies.values()):
        return None
    return shard(got.trace, mesh, lies, set(got.weights), dict.fromkeys(mesh.names, "weights")).trace


def experts_apart(trace: Trace, stage: Stage) -> dict[Value, Placement]:
    """Where stacks of experts lie: whole experts on the groups of a stage, and on the chips of a group slices of each,
    from between its layers."""
    lies: dict[Value, Placement] = {}
    for stack, between in stacks(trace):
        lies[stack] = Placement.whole(stage.mesh, stack.shape)
        for axes, dim in ((stage.group_axes, 0), (stage.sharing_axes, between)):
            for axis in axes:
                if lies[stack].local(dim) % stage.mesh.size(axis) == 0:
                    lies[stack] = lies[stack].with_axis(dim, axis)
                elif dim == 0:
                    count, groups = stack.shape[0], math.prod(stage.groups)
                    raise MapError(f"cut: expected a number of experts that {groups} divides, got {count}")
    return lies


def one_batch(args: tuple, kwargs: dict, batches: int) -> tuple[tuple, dict]:
    """What a model is captured with: the first of so many parts of each input."""

    def first(x: object) -> object:
        if not isinstance(x, torch.Tensor) or batches == 1:
            return x
        if x.ndim < 2 or x.shape[0] % batches:
            raise OptionError(
                f"cut: expected inputs of [n, …] with n a multiple of {batches} batches, got {list(x.shape)}"
            )
        return x[: x.shape[0] // batches]

    return tuple(map(first, args)), {name: first(x) for name, x in kwargs.items()}


def pays_twice(machine: SpatialMachine, size: int, ranks: int) -> bool:
    """A sum over ranks in a row: is it faster to scatter it and gather the parts than to send all to everyone?"""
    assert machine.chips is not None
    far = (ranks - 1) * (machine.chips.latency + machine.chips.jitter)
    return size * (ranks - 1) * (1 - 2 / ranks) / machine.chips.width > far


# --- stages ---


def put(graph: Graph, machine: SpatialMachine, chips: list[list[int]]) -> None:
    """Say of each node on which chip it runs."""
    last = 1 + max((node.place.equation for node in graph.nodes), default=0)
    costs = [0.0] * (last + 1)
    for node in graph.nodes:
        if node.place.rank == node.place.batch == 0:
            costs[node.place.equation] += cycles(machine, node)
    stage_of = stages(costs, len(chips))
    readers: dict[object, Node] = {}
    for node in reversed(graph.nodes):
        if not isinstance(node, (Input, Constant)):
            node.chip = chips[stage_of[node.place.equation]][node.place.rank]
            readers.update({home: node for m in node.maps for home in m.homes})
            if isinstance(node, Scatter):
                readers[node.state] = node
        else:  # where it is first read
            node.chip = readers[node.home].chip if node.home in readers else chips[0][node.place.rank]


def cycles(machine: SpatialMachine, node: Node) -> float:
    """What a node takes of a chip, roughly."""
    match node:
        case Product():
            durations.check_type(machine, node)
            batch, m, k = node.x.shape
            return batch * durations.product(machine, m, k, node.w.shape[2], node.dtype)
        case Expression():
            return durations.expression(machine, node.tree, node.home.rows * node.columns)
    return 0.0


def stages(costs: list[float], count: int) -> list[int]:
    """The stage of each of a row of costs, such that the most of a stage is least."""
    ends = list(itertools.accumulate(costs))
    low, high = max(costs), ends[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(costs, middle)[-1] < count else (middle, high)
    return _filled(costs, high)


def _filled(costs: list[float], room: float) -> list[int]:
    """Stages filled one after the other, each with no more than `room`."""
    stages, stage, used = [], 0, 0.0
    for cost in costs:
        if used and used + cost > room:
            stage, used = stage + 1, 0.0
        used += cost
        stages.append(stage)
    return stages
