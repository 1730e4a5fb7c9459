"""`map_onto`: a model as a program for every core of a spatial machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch.export import ExportedProgram

from tessera.ir.trace import Trace
from tessera.machines.find import spatial_machine
from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.bounds import limit
from tessera.spatial.capture import captured
from tessera.spatial.chain.api import ChainProgram, chained
from tessera.spatial.chain.blocks import equal_blocks
from tessera.spatial.chips import Cut, one_batch, spread
from tessera.spatial.errors import SpaceError
from tessera.spatial.mapping import Mapping as Mapped
from tessera.spatial.mapping import best
from tessera.spatial.program import SpatialProgram, program
from tessera.util.errors import OptionError

EFFORTS = {"quick": 1, "normal": 3, "thorough": 10}
TOGETHER = 16  # more chips than these are stages of equal blocks, where there are such


def map_onto(
    model: Callable | ExportedProgram | Trace,
    *args: object,
    machine: str | Path | SpatialMachine,
    chips: int = 1,
    cut: Mapping[str, int] | None = None,
    effort: str = "normal",
    seed: int = 0,
    like: str | Path | SpatialMachine | None = None,
    **kwargs: object,
) -> SpatialProgram | ChainProgram:
    """Compile a model, for arguments like these, to a listing for each core of a spatial machine.

    machine  a name, a TOML file, or what `tessera.machine` gives
    chips    how many to use
    cut      how chips share the work: so many hold parts of every tensor (`tensor`), so many stages stand behind each
             other (`pipeline`), and the first dimension of all inputs goes through in so many parts (`batches`).
             A model of so many equal `blocks` is mapped by the block, and the program is a chain of them; without
             another word, stages are as even as can be. None: all chips hold parts of every tensor, or where they are
             more than 16 and blocks repeat, the chain; {}: tiles go to the cores of any chip
    effort   how many mappings are tried: quick, normal or thorough
    seed     of the search; the same seed gives the same listing
    like     a machine with the same cores, such as the one that this one improves: its tiles are tried too, where the
             model is mapped whole
    """
    onto = machine if isinstance(machine, SpatialMachine) else spatial_machine(machine)
    other = like if like is None or isinstance(like, SpatialMachine) else spatial_machine(like)
    if effort not in EFFORTS:
        raise OptionError(f"effort: expected one of {', '.join(EFFORTS)}, got {effort!r}")
    if type(chips) is not int or not 1 <= chips <= onto.chip_count:
        has = f"1 to {onto.chip_count}" if onto.chip_count > 1 else "1"
        raise OptionError(f"chips: expected {has}, as many as {onto.key} has; got {chips!r}")
    if type(seed) is not int:
        raise OptionError(f"seed: expected a whole number, got {seed!r}")
    if other is not None and not other.has_cores_of(onto):
        raise OptionError(f"like: expected a machine with the same cores as {onto.key}, got {other.key}")
    ways = Cut.of(cut, chips)
    got = captured(model, *one_batch(args, kwargs, ways.batches))
    if cut is None and chips > TOGETHER and (blocks := equal_blocks(got)):
        ways = Cut(blocks=blocks)
    if ways.blocks:
        return chained(got, onto, chips, ways, seed)
    found: list[tuple[Mapped, tuple[Core, ...]]] = []
    refused: SpaceError | None = None
    for plan in (onto,) if other is None else (onto, other):
        graph, cores = spread(got, plan, chips, ways)
        try:
            found.append((best(graph, onto, cores, EFFORTS[effort], seed, plan), cores))
        except SpaceError as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    chosen, cores = min(found, key=lambda pair: pair[0].cycles)
    return program(chosen, onto, limit(got.graph, onto, cores, ways.batches), got.trace)
