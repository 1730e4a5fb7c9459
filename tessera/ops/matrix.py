"""The matrix of operators and rules, as a page.

In: the registry, once all declarations are imported. Out: `docs/operators.md`, which a test compares with the
registry, so that the page is always true. `python -m tessera.ops.matrix` writes it again.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from tessera.ir.schema import is_pointwise, is_random
from tessera.ops.factors import DECOMPOSED, FACTORS
from tessera.ops.op import Rules, registry

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

HEAD = """# Operators

What Tessera declares about each operator, from the registry. `rule` is a rule of our own; `zero` says that
the derivative is zero or does not exist, so nothing flows; `fallback` means that PyTorch's own formula for
that one operator is traced. Every operator that is not listed works through the fallback too. `for` tells
where the derivative rules hold: elsewhere (complex numbers, some calls) the fallback takes over. Cost is what
`flops` counts: `own` has a formula, `element` is one an element of the result, `free` moves no data. `shard` tells how
ranks of a mesh share it: by a `rule` that says along which dimensions it may be cut, `decomposed`, as other operators
that have one, or `whole`, where each rank computes all of it.

This page is generated: `python -m tessera.ops.matrix` writes it.
"""


def derivative(declared: Rules, rule: object) -> str:
    return "rule" if rule is not None else "zero" if declared.zero else "fallback"


def scope(declared: Rules) -> str:
    if declared.zero or (declared.vjp is None and declared.forward is None):
        return ""
    return ("real" if declared.real else "all") + (", some calls" if declared.applies is not None else "")


def cost(declared: Rules) -> str:
    return "free" if declared.free else "element" if declared.cost is None else "own"


def sharding(declared: Rules) -> str:
    """Overloads may have rules of their own."""
    if any(_speaks_of(name, declared.name) for name in FACTORS) or _elementwise(declared.name):
        return "rule"
    return "decomposed" if any(_speaks_of(name, declared.name) for name in DECOMPOSED) else "whole"


def _speaks_of(rule: str, name: str) -> bool:
    return rule == name or rule.startswith(f"{name}.") or name.startswith(f"{rule}.")


def _elementwise(name: str) -> bool:
    namespace, packet_name, *overload = name.split(".")
    if namespace != "aten":
        return False
    packet = getattr(torch.ops.aten, packet_name)
    op = getattr(packet, overload[0] if overload else packet.overloads()[0])
    return is_pointwise(op) and not is_random(op)


def row(declared: Rules) -> tuple[str, ...]:
    return (
        f"`{declared.name}`",
        derivative(declared, declared.vjp or declared.forward),
        derivative(declared, declared.jvp),
        scope(declared),
        "fallback" if declared.batch is None else "rule",
        sharding(declared),
        cost(declared),
    )


def table() -> str:
    """The whole page: one section a family, one line an operator; what users registered is not on it."""
    families: dict[str, list[Rules]] = {}
    own = [declared for name, declared in registry().items() if name.startswith(("aten.", "tessera."))]
    for declared in own:
        families.setdefault(declared.family, []).append(declared)
    parts = [HEAD, f"{len(own)} declarations in {len(families)} families.\n"]
    for family, members in sorted(families.items()):
        lines = ["| operator | vjp | jvp | for | batch | shard | cost |", "| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(row(m))} |" for m in sorted(members, key=lambda m: m.name)]
        parts.append(f"## {family}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    for package in ("transforms", "executors"):  # they declare operators over sub-traces, and executors' own
        importlib.import_module(f"tessera.{package}")
    PAGE.write_text(table())
    print(f"wrote {PAGE}")
