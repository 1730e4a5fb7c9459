"""Whether two modules are equal but for their weights: then a program traced of one is that of the other.

In: two modules. Out: a `Match`: in what they differ, and which tensor of one stands where which of the other does. Code
that two modules of one class run depends on their attributes (and on what else it reads, which is the same for both).
So they are equal where all attributes are: the same object, equal constants, tensors of one kind, or modules that are
equal in turn. Any other attribute counts as a difference: nobody could tell whether it was changed later.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import nn

from tessera.torch_internals.modules import HOOKS, IGNORED, TABLES

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_TABLES = (dict, OrderedDict)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)


@dataclass
class Match:
    """What a comparison of two modules gives."""

    differences: list[str] = field(default_factory=list)  # `mlp.scale is 2.0, not 1.0`
    constants: dict[str, str] = field(default_factory=dict)  # attributes that hold other constants: name -> difference
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # the other's, by their places
    places: dict[int, str] = field(default_factory=dict)  # by the id of the one's tensor
    tables: list[dict] = field(default_factory=list)  # all that holds the other's attributes
    lists: list[tuple[str, object, object]] = field(default_factory=list)  # with lists in them: name, value, copy
    pairs: dict[int, object] = field(default_factory=dict)  # by the id of one's module or tensor: the other's
    kept: list[object] = field(default_factory=list)  # what `pairs` names by its id


def match(one: nn.Module, other: nn.Module) -> Match:
    """The comparison; it ends with the first difference that is not one of constants."""
    result = Match()
    _modules(result, "", one, other)
    if not result.differences and len({id(x) for x in result.pairs.values()}) < len(result.pairs):
        result.differences.append("it uses one tensor or module at several places")
    return result


def _modules(result: Match, path: str, one: nn.Module, other: nn.Module) -> None:
    if _met(result, path, one, other) or one is other:
        return
    if type(one) is not type(other):
        result.differences.append(f"{path or 'it'} is a {type(other).__name__}, not a {type(one).__name__}")
        return
    mine, theirs = vars(one), vars(other)
    if mine.keys() != theirs.keys():
        name = min(mine.keys() ^ theirs.keys())
        result.differences.append(f"{_at(path, name)} is set in one of them only")
        return
    result.tables.append(theirs)
    for name, value in mine.items():
        if result.differences:
            return
        if name in TABLES and type(value) is type(theirs[name]) and type(value) in _TABLES:
            _table(result, path, value, theirs[name])
        elif name in HOOKS:
            if value or theirs[name]:
                result.differences.append(f"{path or 'it'} has hooks")
        elif name not in IGNORED:
            _values(result, _at(path, name), value, theirs[name])


def _table(result: Match, path: str, mine: dict, theirs: dict) -> None:
    """Parameters, buffers or modules. Their order counts: a program may walk through them."""
    if list(mine) != list(theirs):
        result.differences.append(f"{path or 'it'} has {', '.join(theirs) or 'none'}, not {', '.join(mine) or 'none'}")
        return
    result.tables.append(theirs)
    for name, value in mine.items():
        _values(result, _at(path, name), value, theirs[name])
        if result.differences:
            return


def _values(result: Match, path: str, one: object, other: object) -> None:
    if isinstance(one, nn.Module) and isinstance(other, nn.Module):
        _modules(result, path, one, other)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        _tensors(result, path, one, other)
    elif one is other:
        return
    elif type(one) is not type(other):
        result.differences.append(f"{path} is a {type(other).__name__}, not a {type(one).__name__}")
    elif isinstance(one, types.MethodType):
        _values(result, path, one.__func__, other.__func__)  # type: ignore[attr-defined]
        _values(result, path, one.__self__, other.__self__)  # type: ignore[attr-defined]
    elif isinstance(one, functools.partial):
        _values(result, path, one.func, other.func)  # type: ignore[attr-defined]
        _values(result, path, one.args, other.args)  # type: ignore[attr-defined]
        _values(result, path, [*one.keywords.items()], [*other.keywords.items()])  # type: ignore[attr-defined]
    elif not _constant(one) or not _constant(other):
        result.differences.append(f"{path} is an object of its own, a {type(one).__name__}")
    elif not same_constants(one, other):
        result.constants.setdefault(path.rpartition(".")[2], f"{path} is {other!r}, not {one!r}")
    elif _holds_list(other):
        result.lists.append((path.rpartition(".")[2], other, copy.deepcopy(other)))


def same_constants(one: object, other: object) -> bool:
    """-0.0 is not 0.0, 1 is not True, and another class of the same name is another class."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same_constants, one, other))  # type: ignore[arg-type]
    return one is other if isinstance(one, (enum.Enum, *_CODE)) else repr(one) == repr(other)


def _holds_list(x: object) -> bool:
    return isinstance(x, list) or (isinstance(x, tuple) and any(map(_holds_list, x)))


def _constant(x: object) -> bool:
    if isinstance(x, (tuple, list)):
        return type(x) in (tuple, list, torch.Size) and all(map(_constant, x))
    return type(x) in _CONSTANTS or isinstance(x, (enum.Enum, *_CODE))


def _tensors(result: Match, path: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if _met(result, path, one, other) or one is other:
        return
    if own := [t for t in (one, other) if type(t) not in _TENSORS or t.layout is not torch.strided]:
        result.differences.append(f"{path} is a {type(own[0]).__name__} of its own kind")
        return
    mine, theirs = kind_of(one), kind_of(other)
    if mine != theirs:
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        result.differences.append(f"{path} has {_KIND[at]} {theirs[at]}, not {mine[at]}")
    elif not _attributes(one, other):
        result.differences.append(f"{path} has attributes of its own")
    else:
        if vars(other):
            result.tables.append(vars(other))
        result.tensors[path] = other
        result.places[id(one)] = path


def _attributes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """What users set on tensors is the same."""
    mine, theirs = own_attributes(one), own_attributes(other)
    return mine.keys() == theirs.keys() and all(
        v is theirs[k] or (_constant(v) and same_constants(v, theirs[k])) for k, v in mine.items()
    )


def own_attributes(x: torch.Tensor) -> dict[str, object]:
    """What users set on a tensor. Dynamo notes there what it has seen."""
    return {k: v for k, v in vars(x).items() if not k.startswith("_dynamo")}


_KIND = ("the type", "the shape", "the strides", "the dtype", "the device", "requires_grad", "is_leaf")


def kind_of(x: torch.Tensor) -> tuple:
    """What a program depends on of a tensor, besides its numbers."""
    return type(x), tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf


def _met(result: Match, path: str, one: object, other: object) -> bool:
    """Both have been met before; then they were met together, or something is shared in one module only."""
    if id(one) in result.pairs:
        if result.pairs[id(one)] is not other:
            result.differences.append(f"{path} is shared in one of them only")
        return True
    result.pairs[id(one)] = other
    result.kept.append(one)
    return False


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
