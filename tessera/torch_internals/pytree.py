"""Nested structures of arguments and results, as PyTorch flattens them: `torch.utils._pytree`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.torch_internals.lookup import symbol

_WHY = "arguments and results that are nested"
if TYPE_CHECKING:
    from torch.utils._pytree import GetAttrKey as GetAttrKey
    from torch.utils._pytree import MappingKey as MappingKey
    from torch.utils._pytree import SequenceKey as SequenceKey
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import _broadcast_to_and_flatten as broadcast_to_and_flatten
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_structure as tree_structure
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    TreeSpec = symbol("torch.utils._pytree.TreeSpec", _WHY)
    register_pytree_node = symbol("torch.utils._pytree.register_pytree_node", "structures of our own")
    tree_flatten = symbol("torch.utils._pytree.tree_flatten", _WHY)
    tree_flatten_with_path = symbol("torch.utils._pytree.tree_flatten_with_path", _WHY)
    tree_leaves = symbol("torch.utils._pytree.tree_leaves", _WHY)
    tree_map = symbol("torch.utils._pytree.tree_map", _WHY)
    tree_map_only = symbol("torch.utils._pytree.tree_map_only", _WHY)
    tree_structure = symbol("torch.utils._pytree.tree_structure", _WHY)
    tree_unflatten = symbol("torch.utils._pytree.tree_unflatten", _WHY)
    # Steps on the way to a leaf, after which arguments are named.
    MappingKey = symbol("torch.utils._pytree.MappingKey", "the names of arguments")
    GetAttrKey = symbol("torch.utils._pytree.GetAttrKey", "the names of arguments")
    SequenceKey = symbol("torch.utils._pytree.SequenceKey", "the names of arguments")
    broadcast_to_and_flatten = symbol("torch.utils._pytree._broadcast_to_and_flatten", "the out_dims of a vmap rule")


def is_leaf(x: object) -> bool:
    return tree_structure(x).is_leaf()


def members(x: object) -> dict[object, object]:
    """What stands directly in a structure, by its keys, fields or places."""
    found, _ = tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    return {_key(path[0]): member for path, member in found}


def beside(x: object, values: Sequence[object]) -> object:
    """A structure as `torch.export` wants it beside another: of a class that PyTorch did not bring, a plain list."""
    if isinstance(x, (dict, list, tuple, deque)):
        return with_members(x, values)
    return type(_node_of(x).flatten_fn(x)[0])(values)


def with_members(x: object, values: Sequence[object]) -> object:
    """The structure with other things standing directly in it."""
    return tree_unflatten(values, tree_structure(x, is_leaf=lambda y: y is not x))


def _key(step: Any) -> object:
    for name in ("key", "name", "idx"):
        if hasattr(step, name):
            return getattr(step, name)
    return str(step)


def _node_of(x: object) -> Any:
    return symbol("torch.utils._pytree.SUPPORTED_NODES", "structures of the user's own")[type(x)]
