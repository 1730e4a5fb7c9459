"""What ranks send to each other, told by axis and collective, and what was gathered for want of a sharding rule."""

from __future__ import annotations

from tessera.ir.dist import axis_in, bytes_sent, exchange_of
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
    return tuple(lines)
