"""`cut="best"`: the cut that a rough account of a program and an integer program choose.

In: a captured program, a machine, chips, and what is aimed at. Out: `Cut`s worth mapping, the most hopeful first, and
in words what was chosen. The last one is the cut that a program gets without a word: the account is rough, and a
mapping is not. Without highspy it is the only one, and the words say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.capture import Captured
from tessera.spatial.chips import Cut
from tessera.spatial.choice.layers import problem
from tessera.spatial.choice.search import best
from tessera.spatial.errors import SpaceError
from tessera.spatial.solvers import missing


@dataclass(frozen=True)
class Choice:
    cut: Cut
    words: str = ""


def chosen_cuts(got: Captured, machine: SpatialMachine, chips: int, throughput: bool, blocks: int = 0) -> list[Choice]:
    """With `blocks` the program is a chain of them, in which every layer is cut."""
    plain, said = Cut(blocks=blocks) if blocks else Cut.of(None, chips), "every tensor is cut"
    said = "stages are as even as can be" if blocks else said
    if chips == 1:
        return [Choice(plain)]
    if why := missing("highspy"):
        return [Choice(plain, f"{said}: {why}")]
    asked, layers = problem(got, machine, chips, throughput, blocks)
    found = best(asked)
    if found is None:
        raise SpaceError(
            f"cut: weights of {got.trace.name} fit {chips} chips of {machine.key} in no way; more would do"
        )
    shape, ways = found.shape, [found.ways[kind] for kind in asked.layers]
    whole = {w for layer, way in zip(layers, ways, strict=True) if way.name == "whole" for w in layer.weights}
    names = frozenset(got.weights[w][0] for w in whole)
    is_cut = any(way.name == "cut" for way in ways)
    cut = Cut(
        tensor=shape.tensor if is_cut or blocks else 1, experts=shape.experts, pipeline=shape.pipeline, blocks=blocks,
        whole=names if is_cut else frozenset(),
    )  # fmt: skip
    counts = f"{sum(way.name == 'cut' for way in ways)} of {len(ways)} layers cut"
    of = "an interval" if throughput else "a run"
    proven = "" if found.proven else ", not proven the best"
    words = f"{shape}, {counts}, for {of} of about {found.cost:,.0f} cycles{proven}"
    return [Choice(cut, words), Choice(plain, f"{said}, which is faster than {words}")]
