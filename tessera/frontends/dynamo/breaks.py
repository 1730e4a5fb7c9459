"""Why one of Dynamo's graphs ended before its program did.

In: a graph as a backend is given it. Out: Dynamo's words for what it could not follow, and the user's line; both are
empty where the graph ends with the program. Where that stands in a property or a `try`, Dynamo goes back to an earlier
line, ends the graph there and says no more than that it did: the reason is then what it counted last.
"""

from __future__ import annotations

from collections import Counter

import torch

from tessera.frontends.dynamo.lines import is_library
from tessera.torch_internals.dynamo import counters

UNTOLD = "step_unsupported"  # the words for having gone back

_counted: dict[str, Counter[str]] = {"graph_break": Counter(), "unimplemented": Counter()}


def why_it_ended(gm: torch.fx.GraphModule) -> tuple[str, str]:
    """(the reason, where)."""
    counted = last_counted()
    ended = getattr(gm, "compile_subgraph_reason", None)
    if ended is None or not getattr(ended, "graph_break", False):
        return "", ""
    reason = ended.reason if ended.reason != UNTOLD else counted or ended.reason
    if not ended.user_stack:
        return reason, ""
    own = [f for f in ended.user_stack if not is_library(f.filename)]
    frame = (own or ended.user_stack)[-1]
    return reason, f"{frame.filename}:{frame.lineno}"


def last_counted() -> str:
    """The latest of the reasons that Dynamo has counted since this was asked before."""
    latest = ""
    for kind, before in reversed(_counted.items()):
        now = counters[kind]
        latest = next((text for text in reversed(now) if now[text] != before[text]), latest)
        before.clear()
        before.update(now)
    return latest
