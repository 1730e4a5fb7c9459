"""What ranks send to each other, told by axis and collective, and what was gathered for want of a sharding rule; and
the same, with the mesh and a pipeline's schedule, as data that a report draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tessera.inspection.timeline import Timeline, timeline
from tessera.ir.dist import ROWS, Collective, axis_in, bytes_sent, exchange_of, on
from tessera.ir.equation import short_path
from tessera.ir.types import TensorType
from tessera.machines.here import machine_of
from tessera.passes.memory.bucket import members
from tessera.pipeline.account import Account
from tessera.transforms.pipelined.schedule import Schedule

LINK = "link.nvlink"
LINES = 5  # of those where a program waits longest


@dataclass
class Exchanged:
    """What programs exchange along an axis by one collective."""

    calls: int = 0
    joined: int = 0  # of how many exchanges those are made
    bytes: float = 0.0  # that a rank sends


def exchanged(account: Account) -> dict[tuple[str, str], Exchanged]:
    """By axis and collective."""
    sums: dict[tuple[str, str], Exchanged] = {}
    for program in account.programs:
        for eqn in program.trace.equations:
            if (exchange := exchange_of(eqn)) is not None:
                name, args = exchange
                each = sums.setdefault((axis_in(args), name), Exchanged())
                each.calls, each.joined = each.calls + 1, each.joined + members(eqn)
                each.bytes += bytes_sent(eqn)
    return sums


def sent(account: Account) -> tuple[str, ...]:
    """Lines about one compilation; none where it is not for a mesh."""
    lines = [*account.pipeline]
    for (axis, name), each in exchanged(account).items():
        of = f" of {each.joined} joined" if each.joined > each.calls else ""
        lines.append(f"{axis}: {each.calls} {name}{of}, {each.bytes:,.0f} bytes sent by a rank")
    lines += [said if times == 1 else f"{said} ({times} times)" for said, times in Counter(account.in_pieces).items()]
    lines += exposed(account)
    for note in account.gathered:
        line = f"{short_path(note.source.file)}:{note.source.line}" if note.source.file else "an unknown line"
        lines.append(f"{note.operator} at {line} wants whole values, and a rank sends {note.bytes:,.0f} bytes for it")
    return tuple(lines + _loads(account))


def picture(account: Account) -> dict[str, object] | None:
    """A compilation's mesh, what goes along its axes, and the pipeline's schedule; None where it is for no mesh."""
    values = (v.type for program in account.programs for v in program.trace.values())
    mesh = next((t.placement.mesh for t in values if isinstance(t, TensorType) and t.placement is not None), None)
    if mesh is None:
        return None
    rows = [line for line in account.pipeline if line.startswith("rank ")]
    timed = Schedule.parse("\n".join(rows)).timed() if rows else []
    drawn = [[[t.action.kind, t.action.microbatch, t.action.stage, t.start, t.end] for t in row] for row in timed]
    return {
        "axes": [[axis, len(rows) if axis == account.pipeline_axis else size] for axis, size in mesh.axes],
        "exchanges": [[axis, name, e.calls, e.joined, e.bytes] for (axis, name), e in exchanged(account).items()],
        "schedule": drawn,
        "told": [line for line in account.pipeline if line not in rows],
    }


def exposed(account: Account) -> list[str]:
    """What of the exchanges nothing hides, by line, on a machine whose links are known."""
    lines = []
    for program in account.programs:
        inputs = [v.type for v in program.trace.inputs if isinstance(v.type, TensorType)]
        if not inputs or not any(exchange_of(eqn) for eqn in program.trace.equations):
            continue
        here = machine_of(inputs[0].device)
        if LINK in here:
            lines += [
                f"{program.trace.name}, foreseen: {line.strip()}" for line in _told(timeline(program.trace, here))
            ]
    return lines


def _told(line: Timeline) -> list[str]:
    return str(line).splitlines()[: 1 + LINES]


def _loads(account: Account) -> list[str]:
    """How unevenly rows went to experts, in the last exchanges that this rank took part in."""
    equations = [eqn for program in account.programs for eqn in program.trace.equations]
    ops = [eqn.op for eqn in equations if (exchange_of(eqn) or ("",))[0] == ROWS]
    communicator = on(ops[0].mesh).communicator if ops and isinstance(ops[0], Collective) else None
    if communicator is None:
        return []
    by_axis: dict[str, list[tuple[int, int]]] = {}
    for axis, sent_out, came in communicator.loads:
        by_axis.setdefault(axis, []).append((sent_out, came))
    lines = []
    for axis, each in by_axis.items():
        share, had = (sum(numbers) / len(each) for numbers in zip(*each, strict=True))
        most = max(came for _, came in each)
        lines.append(f"{axis}: this rank's experts had {had:.0f} rows on average, {most} at most; it sent {share:.0f}")
    return lines
