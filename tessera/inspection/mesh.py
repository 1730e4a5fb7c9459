"""What ranks send to each other, told by axis and collective, and what was gathered for want of a sharding rule."""

from __future__ import annotations

from tessera.ir.dist import EXCHANGES, axis_of, bytes_sent, is_collective
from tessera.ir.equation import short_path
from tessera.pipeline.account import Account


def sent(account: Account) -> tuple[str, ...]:
    """Lines about one compilation; none where it is not for a mesh."""
    counts: dict[tuple[str, str], list[float]] = {}
    for program in account.programs:
        for eqn in program.trace.equations:
            if is_collective(eqn, *EXCHANGES):
                counts.setdefault((axis_of(eqn), eqn.op.name), []).append(bytes_sent(eqn))  # type: ignore[union-attr]
    lines = [
        f"{axis}: {len(each)} {name}, {sum(each):,.0f} bytes sent by a rank" for (axis, name), each in counts.items()
    ]
    for note in account.gathered:
        line = f"{short_path(note.source.file)}:{note.source.line}" if note.source.file else "an unknown line"
        lines.append(f"{note.operator} at {line} wants whole values, and a rank sends {note.bytes:,.0f} bytes for it")
    return tuple(lines)
