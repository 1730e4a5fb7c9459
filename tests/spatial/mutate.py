"""Single mutations of listings. Every one is refused by both judges, or both accept it and the values are still right;
of a few kinds (`OTHER_MEANING`) it may be a lawful program of another meaning, on which both judges agree.

python tests/spatial/mutate.py 10000     20 listings; prints how many were refused, by kind of mutation and of violation
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from listings import CASES, Case, toy  # noqa: E402

import tessera  # noqa: E402
from tessera.spatial.listing import types as t  # noqa: E402
from tessera.spatial.listing.host import OPERATORS  # noqa: E402
from tessera.spatial.simulator import Violation, simulate  # noqa: E402
from tessera.spatial.simulator.stepper import step  # noqa: E402

Random = random.Random
InstructionMutation = Callable[[Random, t.Instruction, t.CorePage, t.Listing], t.Instruction | None]
BufferMutation = Callable[[Random, t.Buffer], t.Buffer | None]


def _other(rng: Random, options: list, now: object) -> object | None:
    rest = [option for option in options if option != now]
    return rng.choice(rest) if rest else None


def _first(action: t.Action) -> str:
    """The first field of an action that is a reference: what it writes, or what it sends."""
    return "value" if isinstance(action, t.Send | t.ToHost | t.Store) else "target"


def start(rng, of, page, listing):
    return replace(of, start=max(0, of.start + rng.choice((-1, 1))))


def far(rng, of, page, listing):
    return replace(of, start=rng.randrange(listing.end))


def duration(rng, of, page, listing):
    return replace(of, duration=max(1, of.duration + rng.choice((-1, 1))), times=1)


def unit(rng, of, page, listing):
    names = ["matrix", "vector", "copy0", "north", "east", "south", "west", "host", "dram", "call"]
    return replace(of, units=(_other(rng, names, of.units[0]),))


def port(rng, of, page, listing):
    if not (ports := list(of.ports)):
        return None
    ports[rng.randrange(len(ports))] = f"sram.{rng.choice('rw')}{rng.randrange(3)}"
    return replace(of, ports=tuple(ports)) if tuple(ports) != of.ports else None


def port_more(rng, of, page, listing):
    return replace(of, ports=(*of.ports, rng.choice(("sram.r0", "sram.r1", "sram.w0", "sram.w1"))))


def port_less(rng, of, page, listing):
    return replace(of, ports=of.ports[1:]) if len(of.ports) > 1 else None


def hop(rng, of, page, listing):
    if not of.routes:
        return None
    core = page.core._replace(row=rng.randrange(2), column=rng.randrange(2))
    routes = [list(route) for route in of.routes]
    route = rng.choice(routes)
    if rng.random() < 0.5 and len(route) > 1:
        route[rng.randrange(len(route))] = core
    else:
        route.insert(rng.randrange(1, len(route) + 1), core)
    new = tuple(map(tuple, routes))
    return replace(of, routes=new) if new != of.routes else None


def target_core(rng, of, page, listing):
    core = page.core._replace(row=rng.randrange(2), column=rng.randrange(2))
    match of.action:
        case t.Send(value, targets):
            new = tuple(core if i == 0 else target for i, target in enumerate(targets))
            return replace(of, action=t.Send(value, new)) if new != targets else None
        case t.Recv(target, source, add) if source != core:
            return replace(of, action=t.Recv(target, core, add))
    return None


def adds(rng, of, page, listing):
    match of.action:
        case t.Product(target, x, w, add):
            return replace(of, action=t.Product(target, x, w, not add))
        case t.Recv(target, source, add):
            return replace(of, action=t.Recv(target, source, not add))
    return None


def swapped_operands(rng, of, page, listing):
    match of.action:
        case t.Product(target, x, w, add):
            return replace(of, action=t.Product(target, w, x, add))
        case t.Copy(target, source):
            return replace(of, action=t.Copy(source, target))
    return None


def name(rng, of, page, listing):
    if isinstance(of.action, t.Hosted):
        return None
    field = _first(of.action)
    ref = getattr(of.action, field)
    other = _other(rng, [buffer.name for buffer in page.buffers], ref.name)
    return replace(of, action=replace(of.action, **{field: replace(ref, name=other)})) if other else None


def _index(of: t.Instruction, page: t.CorePage) -> tuple[str, t.Ref, list[t.Span | int]] | None:
    """What an action writes or sends, with a span or a place for every dimension."""
    if isinstance(of.action, t.Hosted):
        return None
    field = _first(of.action)
    ref = getattr(of.action, field)
    buffer = next((buffer for buffer in page.buffers if buffer.name == ref.name), None)
    if buffer is None or any(isinstance(index, str) for index in ref.index):
        return None
    full = [t.Span(0, size) for size in buffer.type.shape]
    index = [of if isinstance(of, t.Span | int) else all_ for of, all_ in zip(ref.index, full, strict=False)]
    return field, ref, index + full[len(index) :]


def part(rng, of, page, listing):
    """One row more or one less; of what is written, also one further."""
    if (found := _index(of, page)) is None:
        return None
    field, ref, index = found
    place = rng.randrange(len(index))
    if isinstance(span := index[place], int):
        index[place] = max(0, span + rng.choice((-1, 1)))
        same = True
    else:
        low, high = max(0, span.start + rng.choice((-1, 0, 1))), span.stop + rng.choice((-1, 0, 1))
        index[place] = t.Span(low, max(low + 1, high), span.step)
        same = high - low == span.stop - span.start
    if field == "value" and same:
        return None  # that is `elsewhere`
    return replace(of, action=replace(of.action, **{field: replace(ref, index=tuple(index))}))


def elsewhere(rng, of, page, listing):
    """What is sent comes from a part of the same size that begins one further or one before."""
    if (found := _index(of, page)) is None or found[0] != "value":
        return None
    field, ref, index = found
    place, by = rng.randrange(len(index)), rng.choice((-1, 1))
    match index[place]:
        case int(at):
            index[place] = max(0, at + by)
        case t.Span(low, high, each):
            index[place] = t.Span(low + by, high + by, each) if low + by >= 0 else t.Span(low, high, each)
    return replace(of, action=replace(of.action, **{field: replace(ref, index=tuple(index))}))


def called(rng, of, page, listing):
    """Another operator at the host, another tensor there, or an argument less."""
    if not isinstance(action := of.action, t.Hosted):
        return None
    names = [name for name, _ in listing.hosted]
    match rng.randrange(4):
        case 0:
            return replace(of, action=replace(action, op=rng.choice(sorted(OPERATORS))))
        case 1:
            results = [rng.choice((*names, "_")) if rng.random() < 0.5 else name for name in action.results]
            return replace(of, action=replace(action, results=tuple(results)))
        case 2:
            return replace(of, action=replace(action, arguments=action.arguments[:-1]))
    arguments = (("", t.Ref(rng.choice(names))), *action.arguments[1:])
    return replace(of, action=replace(action, arguments=arguments))


def turned(rng, of, page, listing):
    if isinstance(of.action, t.Hosted):
        return None
    field = {t.Product: "w", t.Copy: "source"}.get(type(of.action), _first(of.action))
    ref = getattr(of.action, field)
    return replace(of, action=replace(of.action, **{field: replace(ref, transposed=not ref.transposed)}))


def dropped(rng, of, page, listing):
    return ()


def doubled(rng, of, page, listing):
    return (of, replace(of, start=of.start + rng.choice((0, of.duration, 1))))


def address(rng, of):
    return replace(of, address=max(0, of.address + rng.choice((-64, -32, -8, -1, 1, 8, 32, 64, 1 << 14, 1 << 16))))


def size(rng, of):
    return replace(of, size=max(1, of.size + rng.choice((-32, -1, 1, 32))))


def row_short(rng, of):
    shape = (of.type.shape[0] - 1, *of.type.shape[1:])
    if not shape[0]:
        return None
    kind = t.TensorType(of.type.dtype, shape)
    return replace(of, type=kind, size=kind.bytes)


def dtype(rng, of):
    return replace(
        of, type=t.TensorType(_other(rng, ["int8", "int32", "bfloat16", "float32"], of.type.dtype), of.type.shape)
    )


def lifetime(rng, of):
    if of.lifetime is None:
        return replace(of, lifetime=(0, 10), state=False, source=None)
    begin, end = of.lifetime
    move = rng.choice(((1, 0), (-1, 0), (0, 1), (0, -1), (0, 40), (-40, 0)))
    return replace(of, lifetime=(max(0, begin + move[0]), max(0, end + move[1])))


def source(rng, of):
    return replace(of, source=t.Ref(of.source.name, (t.Span(1, 2),))) if of.source else None


INSTRUCTIONS = [
    start, far, duration, unit, port, port_more, port_less, hop, target_core, adds, swapped_operands, name, part,
    elsewhere, turned, called, dropped, doubled,
]  # fmt: skip
BUFFERS = [address, size, row_short, dtype, lifetime, source]
# These may give another program that is as good as the first and means something else: the judges must agree, no more.
# Another type between two expressions is another rounding; sending columns 15 to 31 of a tile that is all written
# breaks no rule where columns 16 to 32 were meant.
OTHER_MEANING = ("called", "turned", "swapped_operands", "name", "dtype", "elsewhere")
KINDS = [of.__name__ for of in (*INSTRUCTIONS, *BUFFERS)] + ["end", "swapped times", "page dropped", "machine"]


def mutated(rng: Random, listing: t.Listing) -> tuple[str, t.Listing] | None:
    """One mutation, and its kind; None where there is nothing of that kind to change."""
    kind = rng.choice(KINDS)
    number = rng.randrange(len(listing.pages))
    page = listing.pages[number]
    if kind == "end":
        return kind, replace(listing, end=listing.end + rng.choice((-1, 1)))
    if kind == "machine":
        return kind, replace(listing, sha256="0" * 64)
    if kind == "page dropped":
        return kind, replace(listing, pages=listing.pages[:number] + listing.pages[number + 1 :])
    if kind == "swapped times":
        if len(page.instructions) < 2:
            return None
        i, j = sorted(rng.sample(range(len(page.instructions)), 2))
        steps = list(page.instructions)
        steps[i], steps[j] = replace(steps[i], start=steps[j].start), replace(steps[j], start=steps[i].start)
        new = replace(page, instructions=tuple(steps))
    elif change := next((of for of in INSTRUCTIONS if of.__name__ == kind), None):
        at = rng.randrange(len(page.instructions))
        one = change(rng, page.instructions[at], page, listing)
        if one is None or one == page.instructions[at]:
            return None
        steps = one if isinstance(one, tuple) else (one,)
        new = replace(page, instructions=page.instructions[:at] + steps + page.instructions[at + 1 :])
    else:
        change = next(of for of in BUFFERS if of.__name__ == kind)
        at = rng.randrange(len(page.buffers))
        buffer = change(rng, page.buffers[at])
        if buffer is None or buffer == page.buffers[at]:
            return None
        new = replace(page, buffers=page.buffers[:at] + (buffer,) + page.buffers[at + 1 :])
    return kind, replace(listing, pages=listing.pages[:number] + (new,) + listing.pages[number + 1 :])


def right(case: Case, outputs: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(outputs, case.expected, strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=case.tolerance, atol=10 * case.tolerance) for a, b in pairs)


def judged(case: Case, listing: t.Listing) -> tuple[str, str]:
    """What both judges say: "refused" and the kind, or "accepted"; anything else is a fault of the judges."""
    program = replace(case.program, listing=listing)
    first = second = None
    try:
        ran = simulate(program, *case.inputs)
    except Violation as violation:
        first = violation
    try:
        stepped, cycles = step(program, *case.inputs)
    except Violation as violation:
        second = violation
    if (first is None) != (second is None):
        return "torn", f"simulator: {first}\nstepper: {second}"
    if first is not None:
        named = first.kind in ("machine", "end", "output", "data") or (first.core is not None and first.parties)
        return ("refused", first.kind) if named else ("unnamed", str(first))
    same = all(torch.equal(a, b) for a, b in zip(ran.outputs, stepped, strict=True)) and ran.cycles == cycles
    if not same:
        return "torn", "both accept it; values or cycles differ"
    return ("accepted", "") if right(case, ran.outputs) else ("wrong", "the values are others")


def mapped() -> list[Case]:
    """What the compiler makes of two models on six machines."""
    machines = [
        toy(chip__grid=[1, 1]),
        toy(),
        toy(sram__banks=8, sram__read_ports=4, sram__write_ports=4),
        toy(chip__grid=[3, 3], link__topology="torus", dead__cores=[[1, 1]], link__jitter=2),
        toy(matrix__stationary="output"),
        toy(matrix__stationary="input", matrix__loading="overlapped"),
    ]
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 17))
    norm = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 24), torch.nn.Softmax(-1))
    cases = []
    for model, x in ((mlp, torch.randn(9, 24)), (norm, torch.randn(12, 16))):
        with torch.no_grad():
            programs = [tessera.map_onto(model, x, machine=machine) for machine in machines]
            cases += [Case(program.program, (x,), (model(x),), 1e-5) for program in programs]
    return cases


def campaign(count: int, seed: int = 0, more: list[Case] | None = None) -> tuple[Counter, list[str]]:
    """So many mutations: how often each kind was refused for what, and what the judges got wrong."""
    rng, seen, faults = Random(seed), Counter(), []
    cases = [*(case() for case in CASES.values()), *(more or [])]
    while sum(seen.values()) < count:
        case = rng.choice(cases)
        if (mutation := mutated(rng, case.program.listing)) is None:
            continue
        verdict, why = judged(case, mutation[1])
        seen[mutation[0], verdict, why if verdict == "refused" else ""] += 1
        legal = verdict == "wrong" and mutation[0] in OTHER_MEANING
        if verdict not in ("refused", "accepted") and not legal:
            faults.append(f"{mutation[0]}: {verdict}: {why}")
    return seen, faults


if __name__ == "__main__":
    seen, faults = campaign(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, mapped())
    for key, number in sorted(seen.items()):
        print(f"{number:6}  {'  '.join(key)}")
    print("\n".join(faults[:10]))
    print(f"{len(faults)} faults in {sum(seen.values())}")
