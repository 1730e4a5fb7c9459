"""Runs that overlap: values and cycles are PyTorch's and the schedule's, and who judges one run with its interval
agrees with who judges all runs written out as one program."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from tessera.machines.spatial import SpatialMachine
from tessera.spatial.chain.api import ChainProgram
from tessera.spatial.listing import Program, parse, print_listing
from tessera.spatial.listing.chain import parse_chain, print_chain
from tessera.spatial.listing.types import CorePage, Listing, Ref
from tessera.spatial.map import map_onto
from tessera.spatial.program import SpatialProgram
from tessera.spatial.simulator.api import simulate
from tessera.spatial.simulator.chain import judge_chain
from tessera.spatial.simulator.judge import judge
from tessera.spatial.simulator.stepper import step
from tessera.spatial.simulator.violation import Violation
from tessera.util.errors import InputError, OptionError
from tests.spatial.nets import MLP, Llama
from tests.spatial.test_chain import mapped
from tests.spatial.test_chips import rack


def overlapping(
    model: nn.Module, *x: torch.Tensor, chips: int = 1, machine: SpatialMachine | None = None, **cut: int
) -> SpatialProgram:
    machine = machine or rack()
    program = map_onto(model, *x, machine=machine, chips=chips, cut=cut or None, effort="quick", aim="throughput")
    assert isinstance(program, SpatialProgram) and program.mapping is not None
    assert program.mapping.least_interval is not None
    assert program.mapping.least_interval.cycles <= program.interval < program.cycles
    return program


def written_out(listing: Listing, runs: int, align: int) -> Listing:
    """So many runs as one program, in which nothing overlaps but what is said."""
    assert listing.every is not None
    pages, inputs, outputs = [], [], []
    for run in range(runs):
        inputs += [(f"{name}__{run}", of) for name, of in listing.inputs]
        outputs += [(f"{name}__{run}", of) for name, of in listing.outputs]
    host = {name for name, _ in (*listing.inputs, *listing.outputs)}
    for page in listing.pages:
        buffers = [of for of in page.buffers if of.lifetime is None]
        steps = []
        for run in range(runs):
            later = run * listing.every
            names = {of.name: f"{of.name}__{run}" for of in page.buffers if of.lifetime is not None}
            names |= {name: f"{name}__{run}" for name in host}
            for of in page.buffers:
                if of.lifetime is not None:
                    begin, end = of.lifetime
                    place = of.address + run % of.turns * -(-of.size // align) * align
                    lives = begin + later, end + later
                    buffers.append(replace(of, name=names[of.name], address=place, lifetime=lives, turns=1))
            for i in page.instructions:
                steps.append(replace(i, start=i.start + later, action=_renamed(i.action, names)))
        steps.sort(key=lambda i: (i.start, i.units))
        pages.append(CorePage(page.core, tuple(buffers), tuple(steps)))
    end = listing.end + (runs - 1) * listing.every
    return replace(listing, inputs=tuple(inputs), outputs=tuple(outputs), pages=tuple(pages), end=end, every=None)


def _renamed(of: object, names: dict[str, str]) -> object:
    if isinstance(of, Ref):
        index = tuple(names.get(i, i) if isinstance(i, str) else i for i in of.index)
        return replace(of, name=names.get(of.name, of.name), index=index)
    if isinstance(of, tuple):
        return tuple(_renamed(each, names) for each in of)
    if is_dataclass(of) and not isinstance(of, type) and not isinstance(of, tuple):
        return replace(of, **{f.name: _renamed(getattr(of, f.name), names) for f in fields(of)})  # type: ignore[type-var]
    return of


def accepts(listing: Listing, machine: SpatialMachine) -> bool:
    try:
        judge(listing, machine)
    except Violation:
        return False
    return True


MODELS = [
    (MLP, (8, 64), 1, {}),
    (lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (8, 64), 4, {"pipeline": 4}),
    (lambda: nn.Sequential(MLP(), MLP()), (8, 64), 4, {"pipeline": 2, "tensor": 2}),
]  # fmt: skip


@pytest.mark.parametrize("make, shape, chips, cut", MODELS)
def test_runs_overlap(make, shape, chips, cut) -> None:
    torch.manual_seed(0)
    model, runs = make(), 3
    x = torch.randn(runs, *shape)
    program = overlapping(model, x[0], chips=chips, **cut)
    listing, machine = program.listing, program.machine
    run = simulate(program, x, runs=runs)
    assert run.cycles == program.cycles + (runs - 1) * program.interval
    torch.testing.assert_close(run.output, model(x), rtol=1e-5, atol=1e-5)
    whole = written_out(listing, runs, machine.sram.align)
    assert judge(whole, machine).report.cycles == run.cycles
    stepped, _ = step(Program(whole, machine, dict(program.data)), *x)
    assert all(one.equal(other) for one, other in zip(stepped, run.output, strict=True))
    assert parse(print_listing(listing)) == parse(print_listing(parse(print_listing(listing))))
    assert parse(print_listing(listing)).every == program.interval
    least = program.mapping.least_interval.cycles  # type: ignore[union-attr]
    for every in (1, least - 1, least, program.interval - 1, program.interval + 1, program.interval + 7):
        other = replace(listing, every=every)
        together = written_out(other, -(-listing.end // every) + 2, machine.sram.align) if every > 20 else None
        if accepts(other, machine):
            assert every >= least and together is not None and accepts(together, machine)
        elif together is not None and all(of.turns == 1 for page in listing.pages for of in page.buffers):
            assert not accepts(together, machine)


def test_a_cache_is_done_with_before_the_next_run() -> None:
    torch.manual_seed(0)
    model, runs = Llama(layers=1), 4
    words, at = torch.tensor([[3], [5], [7], [2]]), torch.arange(runs)[:, None]
    program = overlapping(model, words[0], at[0], chips=2, machine=rack(size='"128 KiB"'), pipeline=2)
    reference = copy.deepcopy(model)
    expected = torch.stack([reference(word, place) for word, place in zip(words, at, strict=True)])
    run = simulate(program, words, at, runs=runs)
    assert run.output.equal(expected)
    kept = {name: of for name, of in run.state.items() if "keys" in name}
    assert kept and all(of.count_nonzero(dim=-1).ne(0).sum() for of in kept.values())
    with pytest.raises(Violation, match="expected one user|done with|a lifetime of"):
        simulate(
            replace(program.program, listing=replace(program.listing, every=program.interval // 2)), words, at, runs=4
        )


def test_chains_overlap() -> None:
    """A stage works on the next thing as soon as it is done with one; a chain that says less is refused."""
    torch.manual_seed(0)
    model, runs = Llama(layers=4), 3
    program = mapped(model, 1, 4, "torus")
    assert isinstance(program, ChainProgram) and program.interval < program.cycles / 2
    words, at = torch.tensor([[3], [5], [7]]), torch.arange(runs)[:, None]
    reference = copy.deepcopy(model)
    expected = torch.stack([reference(word, place) for word, place in zip(words, at, strict=True)])
    run = simulate(program, words, at, runs=runs)
    assert run.output.equal(expected) and run.cycles == program.cycles + (runs - 1) * program.interval
    assert parse_chain(print_chain(program.chain)).every == program.interval
    for every in (program.interval - 1, 0):
        with pytest.raises(Violation, match="ready within"):
            judge_chain(replace(program.chain, every=every), program.machine)


def test_places_in_turn() -> None:
    """What lives longer than a run waits has several places; with fewer of them it is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP(32, 32) for _ in range(4)))
    x = torch.randn(4, 32)
    program = overlapping(model, x, chips=4, pipeline=4)
    turning = [(page, of) for page in program.listing.pages for of in page.buffers if of.turns > 1]
    assert turning and "turns 2" in str(program)
    page, buffer = turning[0]
    fewer = tuple(replace(of, turns=of.turns - 1) if of is buffer else of for of in page.buffers)
    pages = tuple(replace(p, buffers=fewer) if p is page else p for p in program.listing.pages)
    with pytest.raises(Violation, match="places for a lifetime"):
        judge(replace(program.listing, pages=pages), program.machine)
    whole = written_out(program.listing, 5, program.machine.sram.align)
    assert accepts(whole, program.machine)
    for page in whole.pages:
        assert all(a.start <= b.start for a, b in pairwise(page.instructions))


def test_what_cannot_be() -> None:
    x = torch.randn(4, 64)
    with pytest.raises(OptionError, match="aim: expected one of latency, throughput"):
        map_onto(MLP(), x, machine="toy", aim="speed")
    program = map_onto(MLP(), x, machine="toy", effort="quick")
    assert program.interval == program.cycles
    with pytest.raises(InputError, match=r"expected x to be \[2, …\], for 2 runs"):
        simulate(program, x, runs=2)
    with pytest.raises(OptionError, match="1 run or more"):
        simulate(program, x, runs=0)
