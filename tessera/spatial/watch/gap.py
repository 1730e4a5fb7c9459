"""Why a program takes longer than its bound, in cycles that add up exactly.

In: what each instruction waited for, and the bound. Out: cycles by cause. The busiest resource is idle before its first
instruction (fill), after its last (imbalance: others still work), and between two, where the next one waits: for what
another instruction of its core computes (dependence), for what arrives from another core or for a link (link), for a
port or a bank (port), for another unit (imbalance). What the bound itself allows for, such as the first loads, is taken
off again, in the order of `ALLOWED`.
"""

from __future__ import annotations

from tessera.spatial.simulator.claims import Resource
from tessera.spatial.watch.waits import Waits

CAUSES = ("dependence", "port", "link", "imbalance", "fill")
ALLOWED = ("fill", "imbalance", "dependence", "link", "port")
CAUSE_OF = {
    "data": "dependence", "room": "dependence", "arrival": "link", "link": "link", "port": "port", "bank": "port",
    "unit": "imbalance",
}  # fmt: skip


def busiest(waits: Waits) -> tuple[Resource, int] | None:
    """The unit, port, bank or link that is busy longest, and for how many cycles."""
    busy = {resource: sum(c.end - c.begin for c in users) for resource, users in waits.claims.items()}
    return min(busy.items(), key=lambda item: (-item[1], item[0]), default=None)


def split(waits: Waits, cycles: int, bound: int) -> dict[str, int]:
    """The gap by cause; the causes add up to cycles - bound."""
    causes: dict[str, int] = dict.fromkeys(CAUSES, 0)
    if (most := busiest(waits)) is None:
        return causes
    resource, busy = most
    at = 0
    for claim in waits.claims[resource]:
        if idle := claim.begin - at:
            wait = waits.wait(claim.work, resource) if at else None
            cause = CAUSE_OF[wait.kind] if wait else "fill" if not at else "imbalance"
            causes[cause] += idle
        at = claim.end
    causes["imbalance"] += cycles - at
    allowed = bound - busy
    # A bound below the busy time of one of several equal ports: they are loaded unequally.
    causes["imbalance"] += max(-allowed, 0)
    for cause in ALLOWED:
        taken = min(causes[cause], max(allowed, 0))
        causes[cause] -= taken
        allowed -= taken
    return causes
