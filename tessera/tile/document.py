"""The tile dialect as a page.

In: the dialect and its docstrings, the elementwise functions, the passes. Out: `docs/tile.md`, which a test compares
with them, so that the page is always true. `python -m tessera.tile.document` writes it again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from xdsl.ir import Attribute, Operation
from xdsl.irdl import OptOperandDef, VarOperandDef

from tessera.tile.dialect import ops as dialect
from tessera.tile.dialect.build import KernelBuilder, f32, module
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.text import to_text
from tessera.tile.rewrites.pipeline import PASSES, PIPELINE

PAGE = Path(__file__).parents[2] / "docs" / "tile.md"

TAIL = """This page is generated: `python -m tessera.tile.document` writes it."""


def page() -> str:
    head = inspect.getdoc(dialect) or ""
    parts = [
        "# The tile dialect",
        head,
        TAIL,
        "## An example",
        "The sum of each row, and `tessera tile-opt` reads it:",
        f"```mlir\n{to_text(module(example()))}\n```",
        "## Types and attributes",
        *(_attribute(a) for a in dialect.Tile.attributes),
        "## Operations",
        *(_operation(op) for op in dialect.Tile.operations),
        "## Elementwise functions",
        "What `tile.apply` may name. `predicate` functions give i1; cost is in rough instructions an element.",
        _functions(),
        "## Passes",
        f"`tessera tile-opt --passes {','.join(PIPELINE)} file.mlir` runs them; these are the default.",
        *_passes(),
    ]
    return "\n\n".join(parts) + "\n"


def example() -> dialect.KernelOp:
    """sum(x, 1) of a row-major (n, m) matrix."""
    k = KernelBuilder("row_sum", symbols=["n", "m"])
    i, r = k.axis("i", "n"), k.axis("r", "m", reduce=True)
    x, y = k.buffer(f32), k.buffer(f32)
    k.store(k.reduce("sum", k.load(x, i * k.symbol("m") + r), "r"), y, i)
    return k.finish()


def _text(thing: object) -> str:
    return inspect.getdoc(thing) or ""


def _attribute(attribute: type[Attribute]) -> str:
    fields = ", ".join(f"`{name}`" for name, _ in attribute.get_irdl_definition().parameters)  # type: ignore[attr-defined]
    return f"### `{attribute.name}`\n\n{_text(attribute)}\n\nParameters: {fields}."


def _operation(op: type[Operation]) -> str:
    definition = op.get_irdl_definition()  # type: ignore[attr-defined]
    rows = [f"- operand `{name}`{_many(d)}" for name, d in definition.operands]
    rows += [f"- property `{name}`" for name in definition.properties if name != "operandSegmentSizes"]
    rows += [f"- result `{name}`" for name, _ in definition.results]
    return f"### `{op.name}`\n\n{_text(op)}\n\n" + "\n".join(rows)


def _many(definition: object) -> str:
    match definition:
        case OptOperandDef():
            return ", may be absent"
        case VarOperandDef():
            return ", any number"
    return ""


def _functions() -> str:
    lines = ["| function | arguments | gives | cost |", "| --- | --- | --- | --- |"]
    for f in FUNCTIONS.values():
        lines.append(f"| `{f.name}` | {f.arity} | {'i1' if f.predicate else 'its last argument’s type'} | {f.cost} |")
    return "\n".join(lines)


def _passes() -> Iterator[str]:
    for name, function in PASSES.items():
        yield f"### `{name}`\n\n{_text(sys.modules[function.__module__])}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
