"""The text of a program as a tree of lines and blocks, so that parts of it can be taken away."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Block:
    """A line that ends in a colon, and what stands under it."""

    head: str
    body: list[str | Block] = field(default_factory=list)


Node = str | Block


def render(nodes: list[Node], depth: int = 0) -> str:
    """Python."""
    indent, lines = "    " * depth, []
    for node in nodes:
        if isinstance(node, str):
            lines.append(indent + node)
        else:
            lines.append(indent + node.head)
            lines.append(render(node.body, depth + 1) if node.body else f"{indent}    pass")
    return "\n".join(lines)


def smaller(nodes: list[Node]) -> Iterator[list[Node]]:
    """The same with less: without several parts in a row, without a line, a block, or only the block's own line."""
    for many in (len(nodes) // 2, len(nodes) // 4):
        if many > 1 and not str(getattr(nodes[0], "head", "")).startswith(("def ", "class ")):
            yield from (nodes[:i] + nodes[i + many :] for i in range(0, len(nodes), many))
    for i, node in reversed(list(enumerate(nodes))):
        before, after = nodes[:i], nodes[i + 1 :]
        if isinstance(node, str):
            yield from ([*before, *less, *after] for less in shorter(node))
        elif node.head.startswith(("def ", "class ")):
            yield from ([*before, Block(node.head, body), *after] for body in smaller(node.body))
        else:
            yield [*before, *after]
            yield [*before, *node.body, *after]
            yield from ([*before, Block(node.head, body), *after] for body in smaller(node.body))


def shorter(line: str) -> Iterator[list[Node]]:
    """A line taken away; of a return, one of the things that it gives."""
    if not line.startswith("return "):
        yield []
        return
    given = ast.parse(line.removeprefix("return "), mode="eval").body
    if isinstance(given, ast.Tuple | ast.List) and given.elts:
        for i in range(len(given.elts)):
            kept = [e for j, e in enumerate(given.elts) if j != i]
            yield [f"return {ast.unparse(type(given)(elts=kept, ctx=ast.Load()))}"]
            yield [f"return {ast.unparse(given.elts[i])}"]
    elif isinstance(given, ast.Dict):
        yield from ([f"return {ast.unparse(v)}"] for v in given.values)


def size(nodes: list[Node]) -> int:
    return sum(1 if isinstance(n, str) else 1 + size(n.body) for n in nodes)
