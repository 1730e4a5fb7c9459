"""Backward for its own sake: gradients are computed and dropped, and nobody's `.grad` changes."""

from __future__ import annotations

import torch

from tessera.torch_internals import pytree


def pull(out: object) -> bool:
    """Run the backward of everything in `out` that has one; is there anything?"""
    results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = leaves_of(results)
    if results:
        torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)
    return bool(results)


def leaves_of(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors at the ends of the autograd graph."""
    leaves: dict[int, torch.Tensor] = {id(x): x for x in results if x.grad_fn is None}
    stack, seen = [x.grad_fn for x in results if x.grad_fn is not None], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable  # type: ignore[attr-defined]
        stack += [following for following, _ in node.next_functions if following is not None]
    return list(leaves.values())
