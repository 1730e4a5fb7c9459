"""Chains run on data, or refused.

In: a chain, the machine, and for data the tensors of each run. Out: outputs, what is left in memory, and a `Report`;
or one `Violation`. A part is judged once, wherever it runs. Then of the runs is asked: that chips stand where the
part's own stand to each other, that no two runs have a chip at the same time, and that what a run leaves in a core's
memory is not where another one writes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from tessera.machines.spatial import Core, SpatialMachine
from tessera.spatial.listing.chain import COMMON, Chain, Run
from tessera.spatial.listing.container import ChainedProgram
from tessera.spatial.listing.types import Buffer, Listing
from tessera.spatial.simulator.judge import judge, judged
from tessera.spatial.simulator.report import Report
from tessera.spatial.simulator.run import Run as DataRun
from tessera.spatial.simulator.run import check_input
from tessera.spatial.simulator.violation import Violation, buffer_text

Tensors = Mapping[str, torch.Tensor]


def judge_chain(chain: Chain, machine: SpatialMachine, jitter: int | None = None) -> Report:
    """What a chain costs, or what is wrong with it; without its data."""
    reports = {name: judge(listing, machine, jitter).report for name, listing in chain.parts.items()}
    _check(chain, machine)
    return _report(chain, machine, reports)


def _check(chain: Chain, machine: SpatialMachine) -> None:
    """That runs of parts, each of which is right, fit together."""
    used = {run.part for run in chain.runs}
    for name, listing in chain.parts.items():
        if name not in used:
            raise Violation("core", None, 0, f"expected a run of each part; {name} has none")
        if unknown := {of for of, _ in listing.inputs} - set(chain.inputs):
            raise Violation("bounds", None, 0, f"expected inputs of the chain in {name}, got {', '.join(unknown)}")
    for run in chain.runs:
        _check_run(chain, run, machine)
    _check_windows(chain)
    _check_memory(chain)
    name, times = max(Counter(run.name for run in chain.runs).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise Violation("core", None, 0, f"expected runs with names of their own; {name} is there {times} times")
    end = max((run.start + chain.parts[run.part].end for run in chain.runs), default=0)
    if end != chain.end:
        raise Violation("end", None, end, f"expected the chain to end at {end}; it says {chain.end}")


def _report(chain: Chain, machine: SpatialMachine, parts: Mapping[str, Report]) -> Report:
    """The sum over runs; busy are chips, as long as runs have them."""
    macs, moved, busy, energy = Counter(), Counter(), Counter(), Counter()
    host: dict[str, Counter[str]] = {}
    for run in chain.runs:
        of = parts[run.part]
        macs.update(of.macs)
        moved.update(of.bytes)
        energy.update(of.energy or {})
        for op, asked in of.host.items():
            host.setdefault(op, Counter()).update(asked)
        busy.update({f"chip {chip}": of.cycles for _, chip in run.chips})
    instructions = sum(parts[run.part].instructions for run in chain.runs)
    unknown = list(dict.fromkeys(name for of in parts.values() for name in of.unknown))
    return Report(
        chain.end, chain.end / machine.chip.clock, instructions, dict(busy), dict(macs), dict(moved),
        None if machine.energy is None else dict(energy), unknown,
        {op: dict(asked) for op, asked in host.items()},
    )  # fmt: skip


def _check_run(chain: Chain, run: Run, machine: SpatialMachine) -> None:
    """Chips that stand to each other as those of the part do, with the same cores alive."""
    if run.part not in chain.parts:
        raise Violation("core", None, run.start, f"expected a part of the chain, got {run.part}", str(run))
    listing, chips = chain.parts[run.part], dict(run.chips)
    hops = {hop for page in listing.pages for i in page.instructions for r in i.routes for hop in itertools.pairwise(r)}
    for used in {page.core for page in listing.pages} | {core for hop in hops for core in hop}:
        if used.chip not in chips:
            raise Violation("core", used, run.start, f"expected a chip for chip {used.chip} of {run.part}", str(run))
        at = used._replace(chip=chips[used.chip])
        if not machine.network.alive(at):
            raise Violation("core", at, run.start, f"expected a live core of {machine.key}", str(run))
    if len(set(chips.values())) != len(chips):
        raise Violation("core", None, run.start, "expected as many chips as the part names", str(run))
    for a, b in hops:
        there = a._replace(chip=chips[a.chip]), b._replace(chip=chips[b.chip])
        if machine.edge(a, b) != machine.edge(*there):
            why = f"expected a link like {a}>{b} from {there[0]} to {there[1]}"
            raise Violation("route", there[0], run.start, why, str(run))


def _check_windows(chain: Chain) -> None:
    busy: dict[int, list[tuple[int, int, Run]]] = {}
    for run in chain.runs:
        for _, chip in run.chips:
            busy.setdefault(chip, []).append((run.start, run.start + chain.parts[run.part].end, run))
    for chip, windows in busy.items():
        windows.sort(key=lambda window: window[:2])
        took = max(end for _, end, _ in windows) - windows[0][0]
        if chain.every is not None and took > chain.every:
            why = (
                f"expected chip {chip} to be ready within {chain.every} cycles, when all begins again; it takes {took}"
            )
            raise Violation(
                "unit", None, windows[-1][0], why, f"run {windows[0][2].name}", f"run {windows[-1][2].name}"
            )
        for (_, end, one), (start, _, other) in itertools.pairwise(windows):
            if start < end:
                why = f"expected one run at a time on chip {chip}"
                raise Violation("unit", None, start, why, f"run {one.name}", f"run {other.name}")


def _check_memory(chain: Chain) -> None:
    """What runs leave on a core lies apart from what others use there. Chips with the same runs are looked at once."""
    of_chip: dict[int, list[tuple[str, int, str]]] = {}
    for run in chain.runs:
        for own, chip in run.chips:
            of_chip.setdefault(chip, []).append((run.part, own, run.name))
    pages = {(name, page.core): page for name, listing in chain.parts.items() for page in listing.pages}
    cores: dict[tuple[str, int], list[Core]] = {}
    for name, core in pages:
        cores.setdefault((name, core.chip), []).append(core)
    seen = set()
    for chip, runs in of_chip.items():
        if (kind := tuple((part, own) for part, own, _ in runs)) in seen:
            continue
        seen.add(kind)
        places = {core[1:] for part, own, _ in runs for core in cores.get((part, own), ())}
        for row, column in places:
            held = []
            for part, own, name in runs:
                page = pages.get((part, Core(own, row, column)))
                held += [(name, buffer) for buffer in page.buffers] if page is not None else []
            _check_core(Core(chip, row, column), held)


def _check_core(core: Core, held: list[tuple[str, Buffer]]) -> None:
    """A buffer that is always there has its bytes for itself, but for what runs hand on or have in common."""
    held.sort(key=lambda pair: pair[1].address)
    for i, (run, buffer) in enumerate(held):
        for other_run, other in held[i + 1 :]:
            if other.address >= buffer.address + buffer.size:
                break
            if run == other_run or (buffer.lifetime is not None and other.lifetime is not None):
                continue
            left = buffer.state and other.state and buffer.source is None
            common = buffer.source is not None and buffer.source.name.startswith(f"{COMMON}_")
            if (left or common) and _alike(buffer, other):
                continue
            parties = f"run {run}: {buffer_text(core, buffer)}", f"run {other_run}: {buffer_text(core, other)}"
            raise Violation("overlap", core, 0, "expected bytes of its own", *parties)


def _alike(one: Buffer, other: Buffer) -> bool:
    named = one.name, one.type, one.address, one.lifetime, one.state, one.source
    return named == (other.name, other.type, other.address, other.lifetime, other.state, other.source)


def simulate_chain(
    program: ChainedProgram, inputs: Sequence[Tensors], state: Tensors, jitter: int | None = None
) -> tuple[list[tuple[torch.Tensor, ...]], Tensors, Report]:
    """Run a chain on data, once for each of the inputs: while a later stage works on one, earlier stages work on the
    next. Out: its outputs; its state by the run's name and the tensor's, or by core and buffer; what it cost."""
    chain, machine = program.chain, program.machine
    for listing in chain.parts.values():
        for name, of in listing.inputs:
            for given in inputs:
                if name in given:
                    check_input(name, of, given[name])
    parts = {name: judged(listing, machine, jitter) for name, listing in chain.parts.items()}
    _check(chain, machine)
    kept: dict[str, torch.Tensor] = dict(state)
    outputs: list[dict[str, torch.Tensor]] = [{} for _ in inputs]
    common: dict[tuple[str, str], torch.Tensor] = {}
    every = chain.every or chain.end
    turns = [(turn * every + run.start, turn, run) for turn in range(len(inputs)) for run in chain.runs]
    for _, turn, run in sorted(turns, key=lambda of: of[:2]):
        listing = chain.parts[run.part]
        names = _names(run, listing)
        before = {own: kept[name] for own, name in names.items() if name in kept}
        tensors = program.data(run.name)
        _check_common(run, tensors, common)
        ran = DataRun(machine, listing, tensors, inputs[turn], before)
        ran.run(parts[run.part].works, parts[run.part].flows)
        outputs[turn] |= {name: value for (name, _), value in zip(listing.outputs, ran.results(), strict=True)}
        kept |= {names[own]: value for own, value in ran.state().items()}
    cost = _report(chain, machine, {name: of.report for name, of in parts.items()})
    return [tuple(of.values()) for of in outputs], kept, cost.of_runs(len(inputs), every)


def _check_common(run: Run, tensors: Tensors, common: dict[tuple[str, str], torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.startswith(f"{COMMON}_"):
            known = common.setdefault((run.part, name), tensor)
            if known is not tensor and not torch.equal(known, tensor):
                raise Violation("data", None, run.start, f"expected {name} to be the same in all runs", str(run))


def _names(run: Run, listing: Listing) -> dict[str, str]:
    """What a part calls a state, and what the chain calls it: by the core that it is on, or by the run's name."""
    names: dict[str, str] = {}
    chips = dict(run.chips)
    for page in listing.pages:
        for of in page.buffers:
            if of.state and of.source is None:
                there = page.core._replace(chip=chips[page.core.chip])
                names[f"{page.core} {of.name}"] = f"{there} {of.name}"
            elif of.state and of.source is not None:
                names[of.source.name] = f"{run.name}/{of.source.name}"
    return names
