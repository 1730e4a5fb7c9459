"""Sizes of which arguments have only multiples, `8*tiles` for one: the program has to find out how many tiles.

In: the arguments, while a program is recorded. Out: in the program, a view of as many elements for each such size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch


def tell_roots(inputs: Sequence[object]) -> None:
    sizes = [(x, d, n.node.expr) for x in inputs if isinstance(x, torch.Tensor) for d, n in _symbolic(x)]
    known = {expr for _, _, expr in sizes} | {x.node.expr for x in inputs if isinstance(x, torch.SymInt)}
    for x, d, expr in sizes:
        unknown = expr.free_symbols - known
        if len(unknown) != 1:
            continue
        (root,) = unknown
        step, more = expr.coeff(root, 1), expr.coeff(root, 0)
        if expr == step * root + more and step.is_Integer and more.is_Integer and step > 0 <= more:
            torch.ops.aten.slice.Tensor(x, d, int(more), sys.maxsize, int(step))
            known.add(root)


def _symbolic(x: torch.Tensor) -> list[tuple[int, torch.SymInt]]:
    return [(d, n) for d, n in enumerate(x.shape) if isinstance(n, torch.SymInt) and n.node.constant is None]
