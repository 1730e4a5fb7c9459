"""What was found out about equations of numbers alone, for programs that are partitioned later in this process.

In: a mesh, and what stays or is exchanged along its axes. Out: how equations were cut on it, by their signature and by
where their operands lay; the rules of operators do not depend on a mesh. A step that accumulates gradients and one that
updates weights, a model that trains and is evaluated, ask the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera.ir.mesh import Mesh
from tessera.ops.factors.rule import Factors
from tessera.transforms.shard.choose import Choice

MOST = 1 << 16  # choices that are kept
RULES: dict[int, Factors | None] = {}
_choices: dict[tuple, dict[tuple, Choice]] = {}


def choices_on(mesh: Mesh, stays: Mapping[str, str], ways: Mapping[str, str]) -> dict[tuple, Choice]:
    if sum(map(len, _choices.values())) > MOST:
        _choices.clear()
    return _choices.setdefault((mesh, frozenset(stays.items()), frozenset(ways.items())), {})
