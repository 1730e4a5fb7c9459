"""The structure of arguments and results, as data and back, without PyTorch's registry.

In: a pytree's spec. Out: nested lists that JSON holds: a leaf, None, a tuple, list, dict or named tuple of such. A
class of the user's has no form here: a dict-like one, as models of Transformers give back, becomes a dict, a dataclass
a named tuple of its fields, and so do `torch.return_types`; a `torch.Size` becomes a tuple; others are refused.
`flatten` and `unflatten` do at a call what the pytree functions do.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tessera.ir.serial_check import is_name
from tessera.torch_internals import pytree
from tessera.util.errors import ArtifactError, InputError, OptionError

Structure = list
LEAF: Structure = ["leaf"]
DEEPEST, WIDEST = 16, 10_000


def structure_of(spec: pytree.TreeSpec) -> Structure:
    """Of a pytree, as data."""
    if spec.is_leaf():
        return LEAF
    children = [structure_of(spec.child(i)) for i in range(spec.num_children)]
    kind, context = spec.type, spec.context
    if kind is type(None):
        return ["none"]
    if kind in (tuple, list, torch.Size):
        return ["list" if kind is list else "tuple", children]
    if kind in (dict, collections.OrderedDict) or (isinstance(kind, type) and issubclass(kind, dict)):
        keys = _keys(kind, context)
        if not isinstance(keys, list) or not all(isinstance(k, (str, int)) and not isinstance(k, bool) for k in keys):
            raise OptionError(f"expected texts or numbers as the keys of a dict, got {keys!r}")
        return ["dict", list(keys), children]
    if kind is collections.namedtuple or (isinstance(kind, type) and hasattr(kind, "_fields")):
        named = context if isinstance(context, type) else kind
        return ["namedtuple", named.__name__, list(named._fields), children]
    if issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields"):  # what `max` along a dimension gives
        return ["namedtuple", kind.__name__, list(kind.__match_args__), children]
    if dataclasses.is_dataclass(kind) and _nested(context):
        there, absent = context  # names of fields; the latter are None
        given = dict(zip(there, children, strict=True))
        fields = [f.name for f in dataclasses.fields(kind) if f.name in given or f.name in absent]
        if not any(name.startswith("_") for name in fields):
            return ["namedtuple", kind.__name__, fields, [given.get(name, ["none"]) for name in fields]]  # type: ignore[union-attr]
    raise OptionError(f"an artifact has no form for {getattr(kind, '__name__', kind)} among arguments or results")


def _keys(kind: type, context: Any) -> object:
    if kind is collections.defaultdict:
        return context[1]  # behind what makes the values that are not there
    plain = kind in (dict, collections.OrderedDict)
    return context[0] if not plain and _nested(context) else context


def _nested(context: object) -> bool:
    return isinstance(context, (list, tuple)) and bool(context) and isinstance(context[0], list)


def check_structure(data: object, where: str, deepest: int = DEEPEST) -> int:
    """How many leaves a structure from a file has; `ArtifactError` where it is none."""
    if not isinstance(data, list) or not data or not deepest:
        raise ArtifactError(f"{where}: expected a structure, got {str(data)[:80]}")
    match data:
        case ["leaf"]:
            return 1
        case ["none"]:
            return 0
        case ["tuple" | "list", list(children)] if len(children) <= WIDEST:
            pass
        case ["dict", list(keys), list(children)] if len(keys) == len(children) <= WIDEST:
            if not all(type(k) in (str, int) for k in keys) or len(set(keys)) != len(keys):
                raise ArtifactError(f"{where}: expected texts or numbers as keys, each once")
        case ["namedtuple", str(name), list(fields), list(children)] if len(fields) == len(children) <= WIDEST:
            plain = all(is_name(f) and not f.startswith("_") for f in fields)
            if not is_name(name) or not plain or len(set(fields)) != len(fields):
                raise ArtifactError(f"{where}: expected plain names of fields, each once")
        case _:
            raise ArtifactError(f"{where}: expected a structure, got {str(data)[:80]}")
    return sum(check_structure(child, where, deepest - 1) for child in children)


def flatten(tree: object, structure: Structure, name: str = "") -> list[object]:
    """The leaves of an argument; `InputError` says where it has another structure."""
    leaves: list[object] = []
    _flatten(tree, structure, name, leaves)
    return leaves


def _flatten(tree: object, structure: Structure, name: str, leaves: list[object]) -> None:
    kind = structure[0]
    if kind == "leaf":
        leaves.append(tree)
        return
    if kind == "none":
        if tree is not None:
            raise InputError(f"{name}: expected None, as it was exported with, got {type(tree).__name__}")
        return
    for step, child, sub in _children(tree, structure, name):
        _flatten(child, sub, step, leaves)


def _children(tree: Any, structure: Structure, name: str) -> Iterator[tuple[str, object, Structure]]:
    kind, children = structure[0], structure[-1]
    if kind == "dict":
        keys = structure[1]
        if not isinstance(tree, dict) or set(tree) != set(keys):
            got = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
            raise InputError(f"{name}: expected a dict with the keys {', '.join(map(str, keys))}, got {got}")
        yield from ((f"{name}[{k!r}]", tree[k], sub) for k, sub in zip(keys, children, strict=True))
        return
    if kind == "namedtuple" and dataclasses.is_dataclass(tree):
        tree = tuple(getattr(tree, field, None) for field in structure[2])
    wanted = list if kind == "list" else tuple
    if not isinstance(tree, wanted) or len(tree) != len(children):
        got = f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, (list, tuple)) else type(tree).__name__
        raise InputError(f"{name}: expected a {wanted.__name__} of {len(children)}, got {got}")
    yield from ((f"{name}[{i}]", x, sub) for i, (x, sub) in enumerate(zip(tree, children, strict=True)))


def unflatten(leaves: Iterator[object], structure: Structure) -> object:
    """A result of this structure."""
    match structure:
        case ["leaf"]:
            return next(leaves)
        case ["none"]:
            return None
        case ["tuple", children]:
            return tuple(unflatten(leaves, child) for child in children)
        case ["list", children]:
            return [unflatten(leaves, child) for child in children]
        case ["dict", keys, children]:
            return {k: unflatten(leaves, child) for k, child in zip(keys, children, strict=True)}
        case ["namedtuple", name, fields, children]:
            return _named(name, tuple(fields))(*(unflatten(leaves, child) for child in children))
    raise AssertionError(structure)


_classes: dict[tuple, type] = {}


def _named(name: str, fields: tuple[str, ...]) -> type:
    if (name, fields) not in _classes:
        _classes[name, fields] = collections.namedtuple(name, fields)  # noqa: PYI024
    return _classes[name, fields]
