"""`map_onto`: a model as a program for every core of a spatial machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.export import ExportedProgram

from tessera.ir.trace import Trace
from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.spatial.bounds import limit
from tessera.spatial.capture import captured
from tessera.spatial.chain.api import ChainProgram, chained
from tessera.spatial.chain.blocks import equal_blocks
from tessera.spatial.chips import Cut, cut_over_chips, one_batch
from tessera.spatial.choice.cut import Choice, chosen_cuts
from tessera.spatial.errors import SpaceError
from tessera.spatial.mapping import best, check_space, least_chips
from tessera.spatial.program import SpatialProgram, program
from tessera.spatial.slots import in_slots
from tessera.spatial.solvers import missing
from tessera.util.errors import OptionError
from tessera.util.garbage import collection_paused

EFFORTS = {"quick": 1, "normal": 3, "thorough": 10}
AIMS = ("latency", "throughput")
BEST = "best"
TOGETHER = 16  # more chips than these are stages of equal blocks, where there are such


@collection_paused()
def map_onto(
    model: Callable | ExportedProgram | Trace,
    *args: object,
    machine: str | Path | SpatialMachine,
    chips: int = 1,
    cut: Mapping[str, int] | str | None = None,
    aim: str = "latency",
    effort: str = "normal",
    seed: int = 0,
    like: str | Path | SpatialMachine | None = None,
    **kwargs: object,
) -> SpatialProgram | ChainProgram:
    """Compile a model, for arguments like these, to a listing for each core of a spatial machine.

    machine  a name, a TOML file, or what `tessera.machine` gives
    chips    how many to use
    cut      how chips share the work: so many hold parts of every tensor (`tensor`), so many have other experts
             (`experts`), so many stages stand behind each other (`pipeline`), and the first dimension of all inputs
             goes through in so many parts (`batches`). An expert takes at most so many tokens (`slots`). A model of so
             many equal `blocks` is mapped by the block, and the program is a chain of them; without another word,
             stages are as even as can be. None: all chips hold parts of every tensor, or where they are more than 16
             and blocks repeat, the chain; "best": chosen for the aim by an integer program (`pip install
             tessera[plan]`); {}: tiles go to the cores of any chip
    aim      "latency": a run is short; "throughput": runs overlap, and begin as often as they can
    effort   how many mappings are tried: quick, normal or thorough
    seed     of the search; the same seed gives the same listing
    like     a machine with the same cores, such as the one that this one improves: its tiles are tried too, where the
             model is mapped whole
    """
    onto = machine if isinstance(machine, SpatialMachine) else spatial_machine(machine)
    other = like if like is None or isinstance(like, SpatialMachine) else spatial_machine(like)
    if effort not in EFFORTS:
        raise OptionError(f"effort: expected one of {', '.join(EFFORTS)}, got {effort!r}")
    if aim not in AIMS:
        raise OptionError(f"aim: expected one of {', '.join(AIMS)}, got {aim!r}")
    if type(chips) is not int or not 1 <= chips <= onto.chip_count:
        has = f"1 to {onto.chip_count}" if onto.chip_count > 1 else "1"
        raise OptionError(f"chips: expected {has}, as many as {onto.key} has; got {chips!r}")
    if type(seed) is not int:
        raise OptionError(f"seed: expected a whole number, got {seed!r}")
    if other is not None and not other.has_cores_of(onto):
        raise OptionError(f"like: expected a machine with the same cores as {onto.key}, got {other.key}")
    if isinstance(cut, str) and cut != BEST:
        raise OptionError(f"cut: expected words and counts, {BEST!r} or None, got {cut!r}")
    ways = Cut.of(None if isinstance(cut, str) else cut, chips)
    got = captured(model, *one_batch(args, kwargs, ways.batches))
    if got.trace.mutations and ways.batches > 1:
        raise OptionError("cut: expected a program that keeps nothing between runs where there are batches")
    got = in_slots(got, ways.slots, ways.experts > 1 or ways.slots > 0)
    if onto.dram is None:  # no cut takes less than every weight once
        check_space(got.graph, onto, tuple(core for chip in range(chips) for core in onto.cores(chip)))
    blocks = equal_blocks(got) if cut in (None, BEST) and chips > TOGETHER else 0
    if cut != BEST:
        choices = [Choice(Cut(blocks=blocks) if blocks else ways)]
    else:
        choices = chosen_cuts(got, onto, chips, aim == "throughput", blocks)[: 1 if effort == "quick" else None]
    if choices[0].cut.blocks:
        try:
            return chained(got, onto, chips, choices[0].cut, seed, choices[0].words)
        except SpaceError as error:
            raise SpaceError(f"{error}; {least_chips(got.graph, onto, chips)}") from error
    found: list[SpatialProgram] = []
    why = missing("ortools") if effort == "thorough" else ""
    left = f"windows of the schedule are not solved: {why}" if why else ""
    refused: SpaceError | None = None
    for choice, plan in itertools.product(choices, (onto,) if other is None else (onto, other)):
        graph, cores = cut_over_chips(got, plan, chips, choice.cut)
        try:
            chosen = best(graph, onto, cores, EFFORTS[effort], seed, aim == "throughput", plan)
        except SpaceError as error:
            refused = refused or error
            continue
        least = limit(got.graph, onto, cores, choice.cut.batches)
        found.append(program(chosen, onto, least, got.trace, choice.words, left))
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda mapped: (mapped.interval, mapped.cycles))
