"""Takes parts of a failing program away for as long as it fails in the same way."""

from __future__ import annotations

import re
import time

from .judge import judge
from .programs import Program
from .text import Node, render, smaller


def manner(reason: str) -> str:
    """A failure in few words: what differs, not where or by how much."""
    first = reason.splitlines()[0]
    first = re.sub(r"^see \d+: ", "", first)
    first = re.sub(r"^(out|x\d|m|g|opt)\S*: ", "", first)
    return re.sub(r"(0x)?[0-9a-f]*\d[0-9a-f]*|graph_\w+|v\d+", "#", first)[:60]


def shrink(program: Program, reason: str, seconds: float = 20) -> tuple[list[Node], str]:
    """A smaller program that fails in the same manner, and how it fails."""
    nodes, goal, end = program.nodes, manner(reason), time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in smaller(nodes):
            if time.monotonic() > end:
                return nodes, reason
            verdict = judge(render(candidate), program.kind)
            if verdict.outcome == "wrong" and manner(verdict.reason) == goal:
                nodes, reason, again = candidate, verdict.reason, True
                break
    return nodes, reason
