"""What ranks send to each other, told by axis and collective, and what was gathered for want of a sharding rule."""

from __future__ import annotations

from tessera.ir.dist import COMMUNICATORS, ROWS, Collective, axis_in, bytes_sent, exchange_of, is_collective
from tessera.ir.equation import short_path
from tessera.pipeline.account import Account


def sent(account: Account) -> tuple[str, ...]:
    """Lines about one compilation; none where it is not for a mesh."""
    counts: dict[tuple[str, str], list[float]] = {}
    for program in account.programs:
        for eqn in program.trace.equations:
            if (exchange := exchange_of(eqn)) is not None:
                name, args = exchange
                counts.setdefault((axis_in(args), name), []).append(bytes_sent(eqn))
    lines = [*account.pipeline]
    lines += [
        f"{axis}: {len(each)} {name}, {sum(each):,.0f} bytes sent by a rank" for (axis, name), each in counts.items()
    ]
    for note in account.gathered:
        line = f"{short_path(note.source.file)}:{note.source.line}" if note.source.file else "an unknown line"
        lines.append(f"{note.operator} at {line} wants whole values, and a rank sends {note.bytes:,.0f} bytes for it")
    return tuple(lines + _loads(account))


def _loads(account: Account) -> list[str]:
    """How unevenly rows went to experts, in the last exchanges that this rank took part in."""
    ops = [eqn.op for program in account.programs for eqn in program.trace.equations if is_collective(eqn, ROWS)]
    if not ops or not isinstance(ops[0], Collective) or ops[0].mesh not in COMMUNICATORS:
        return []
    by_axis: dict[str, list[tuple[int, int]]] = {}
    for axis, sent_out, came in COMMUNICATORS[ops[0].mesh].loads:
        by_axis.setdefault(axis, []).append((sent_out, came))
    lines = []
    for axis, each in by_axis.items():
        share, had = (sum(numbers) / len(each) for numbers in zip(*each, strict=True))
        most = max(came for _, came in each)
        lines.append(f"{axis}: this rank's experts had {had:.0f} rows on average, {most} at most; it sent {share:.0f}")
    return lines
