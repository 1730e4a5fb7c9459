"""Definitions of executors' own callables, as Python over PyTorch's operators.

In: a trace after claiming, whose equations call `tile.region_0(x, w)` or `sdpa.scaled_dot_product_attention(q, k, v)`.
Out: the text of one class an executor, with a function for every such call: the region's equations, or the operator.
So a saved program runs by itself at every stage, by PyTorch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tessera.ir.block import Block
from tessera.ir.equation import Operator, Special
from tessera.torch_internals.operators import op_name, overload_name

INDENT = "    "
# Writes the function of a region: its trace, its name, the results it writes over arguments.
Body = Callable[[Block, str, dict[int, int]], list[str]]


class Definitions:
    """Names for the callables of executors: no two share one, and no value of the program has an executor's."""

    def __init__(self, trace: Block, values: set[str]) -> None:
        self.classes: dict[str, dict[str, Special]] = {}  # executor -> name in its class -> callable
        self._names: dict[Special, str] = {}
        for op in dict.fromkeys(_claimed(trace)):
            members = self.classes.setdefault(op.namespace, {})
            name, count = op.name, 1
            while name in members and not _same(members[name], op):
                name, count = f"{op.name}_{count}", count + 1
            members[name] = op
            self._names[op] = f"{_free(op.namespace, values)}.{name}"
        self._values = values

    def name(self, op: Operator) -> str | None:
        return self._names.get(op) if isinstance(op, Special) else None

    def lines(self, body: Body) -> list[str]:
        """One class an executor; `body` writes the function of a region."""
        lines: list[str] = []
        for executor, members in self.classes.items():
            title = f'{INDENT}"""What the executor {executor} runs, as the operators it stands for."""'
            lines += [f"class {_free(executor, self._values)}:", title]
            for name, op in members.items():
                lines += ["", *(INDENT + line for line in _function(name, op, body))]
            lines += ["", ""]
        return lines


def _function(name: str, op: Special, body: Body) -> list[str]:
    if op.recipe is not None:
        return body(op.recipe.body, name, dict(op.recipe.over))
    if op.body is not None:
        return body(op.body, name, {})
    if op.of is not None:
        return [f"{name} = torch.ops.{op.of.namespace}.{op_name(op.of)}.{overload_name(op.of)}"]
    return [
        f"def {name}(*_):",
        f"{INDENT}raise NotImplementedError('{op!r} is a function inside Tessera and has no text of its own')",
    ]


def _claimed(trace: Block) -> Iterator[Special]:
    for eqn in trace.equations:
        if isinstance(eqn.op, Special) and eqn.op.namespace not in ("tessera", "dist"):
            yield eqn.op
        for body in eqn.args:
            if isinstance(body, Block):
                yield from _claimed(body)


def _same(a: Special, b: Special) -> bool:
    """Two callables for one operator stand for the same."""
    return a.of is not None and a.of == b.of and a.body is None and b.body is None


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
