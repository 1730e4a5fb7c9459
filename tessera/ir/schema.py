"""What an operator's schema says: its arguments, what it aliases or mutates, which overload a call means.

Everything here is read off PyTorch's own schemas and cached; no operator is described twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tessera.ir.types import ScalarType, TensorType
from tessera.torch_internals.operators import (
    OpOverload,
    OpOverloadPacket,
    has_kernel,
    op_name,
    op_schema,
    overload_name,
)

REQUIRED = object()


@dataclass(frozen=True)
class Param:
    name: str
    kind: str  # the schema's type without alias marks: Tensor, Tensor?, Tensor[], int, int[], Scalar, …
    default: object
    keyword: bool
    writes: bool
    alias: bool


@dataclass(frozen=True)
class Schema:
    params: tuple[Param, ...]
    mutated: tuple[int, ...]  # positions of parameters the operator writes
    is_view: bool  # some result shares memory with an argument, and nothing is written
    is_inplace: bool  # writes its first argument and gives it back
    is_out: bool
    random: bool
    pointwise: bool  # an element of the result is made of the elements at its place
    returns: tuple[str, ...]

    @property
    def positional(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if not p.keyword)


@functools.cache
def schema_of(op: OpOverload) -> Schema:
    schema = op_schema(op)
    params = []
    for a in schema.arguments:
        info = a.alias_info
        default = a.default_value if a.has_default_value() else REQUIRED
        params.append(
            Param(
                a.name,
                str(a.real_type),
                default,
                a.kwarg_only,
                bool(info and info.is_write),
                info is not None,
            )
        )
    mutated = tuple(i for i, p in enumerate(params) if p.writes)
    aliased = any(r.alias_info is not None for r in schema.returns)
    return Schema(
        tuple(params),
        mutated,
        is_view=aliased and not mutated and any(p.alias for p in params),
        is_inplace=mutated == (0,) and op_name(op).endswith("_") and not op_name(op).endswith("__"),
        is_out=bool(mutated) and all(params[i].keyword for i in mutated),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        pointwise=torch.Tag.pointwise in op.tags,
        returns=tuple(str(r.type) for r in schema.returns),
    )


@functools.cache
def touches_tensors(op: OpOverload) -> bool:
    """Takes or gives a tensor (or a number read from one)."""
    schema = schema_of(op)
    return any("Tensor" in k for k in (*schema.returns, *(p.kind for p in schema.params)))


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """PyTorch itself runs it as other operators; a mere decomposition beside a kernel does not count."""
    return has_kernel(op.name(), "CompositeImplicitAutograd")


def bind(op: OpOverload, args: tuple, kwargs: dict) -> tuple[list, dict]:
    """All arguments in schema order, defaults filled in: (positional, keyword-only)."""
    positional: list = []
    keyword: dict = {}
    for index, p in enumerate(schema_of(op).params):
        if p.keyword:
            keyword[p.name] = kwargs.get(p.name, p.default)
        elif index < len(args):
            positional.append(args[index])
        else:
            positional.append(kwargs.get(p.name, p.default))
    return positional, keyword


def normalise(op: OpOverload, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Positional where the schema has it so, trailing defaults left out: one spelling per call."""
    positional, keyword = bind(op, args, kwargs)
    params = schema_of(op).positional
    while positional and _same(positional[-1], params[len(positional) - 1].default):
        positional.pop()
    defaults = {p.name: p.default for p in schema_of(op).params if p.keyword}
    return tuple(positional), {k: v for k, v in keyword.items() if not _same(v, defaults[k])}


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and (a is b or (isinstance(a, (bool, int, float, str)) and a == b))


# --- which overload a call by the short name means -----------------------------------------------


def kind_of(a: object) -> str:
    """The class of an argument that decides between overloads."""
    type_ = getattr(a, "type", a)
    if isinstance(a, torch.Tensor) or isinstance(type_, TensorType):
        return "Tensor"
    if isinstance(type_, ScalarType):
        return type_.kind.__name__
    if isinstance(a, (bool, torch.SymBool)):
        return "bool"
    if isinstance(a, (int, torch.SymInt)):
        return "int"
    if isinstance(a, (float, torch.SymFloat)):
        return "float"
    if isinstance(a, (list, tuple)):
        return f"[{','.join(sorted({kind_of(x) for x in a}))}]"
    if a is None:
        return "None"
    return type(a).__name__


_ACCEPTS = {
    "Tensor": {"Tensor"},
    "Scalar": {"int", "float", "bool", "complex"},
    "int": {"int"}, "SymInt": {"int"}, "float": {"float", "int"}, "bool": {"bool"}, "str": {"str"},
    "ScalarType": {"dtype"}, "Layout": {"layout"}, "Device": {"device"}, "MemoryFormat": {"memory_format"},
    "Generator": {"Generator"}, "number": {"int", "float", "bool", "complex"},
    "Dimname": set(),
}  # fmt: skip


def _accepts(param: str, kind: str) -> bool:
    if param.startswith("Optional[") or param.endswith("?"):
        param = param.removeprefix("Optional[").removesuffix("]").removesuffix("?")
        if kind == "None":
            return True
    if param.startswith("List["):
        param = param.removeprefix("List[").removesuffix("]") + "[]"
    if param.endswith("]") and "[" in param:
        element = param[: param.rindex("[")]
        if not kind.startswith("["):
            return False
        return all(_accepts(element, k) for k in kind[1:-1].split(",") if k)
    return kind in _ACCEPTS.get(param, set())


@functools.cache
def _candidates(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return tuple(o for o in overloads if not schema_of(o).is_out)


@functools.cache
def _resolve(packet: OpOverloadPacket, kinds: tuple[str, ...], named: tuple[tuple[str, str], ...]) -> OpOverload | None:
    for overload in _candidates(packet):
        params = schema_of(overload).params
        by_name = {p.name: p for p in params}
        positional = [p for p in params if not p.keyword]
        if len(kinds) > len(positional) or any(name not in by_name for name, _ in named):
            continue
        given = {p.name for p in positional[: len(kinds)]} | {name for name, _ in named}
        if any(p.default is REQUIRED and p.name not in given for p in params):
            continue
        if all(_accepts(p.kind, k) for p, k in zip(positional, kinds, strict=False)) and all(
            _accepts(by_name[n].kind, k) for n, k in named
        ):
            return overload
    return None


def resolve(packet: OpOverloadPacket, args: tuple, kwargs: dict) -> OpOverload | None:
    """The overload that a call of the short name means, by the kinds of its arguments."""
    return _resolve(packet, tuple(map(kind_of, args)), tuple((k, kind_of(v)) for k, v in sorted(kwargs.items())))


def short_name(op: OpOverload, args: tuple, kwargs: dict) -> str:
    """`aten.linear`, or `aten.sum.dim_IntList` where the arguments alone do not tell the overload."""
    name = f"{op.namespace}.{op_name(op)}"
    packet = getattr(getattr(torch.ops, op.namespace), op_name(op))
    if len(_candidates(packet)) == 1 or resolve(packet, args, kwargs) is op:
        return name
    # `x + 2` is recorded as add.Tensor; by the short name it is add.Scalar, which computes the same
    return name if overload_name(op) == "Tensor" and args else f"{name}.{overload_name(op)}"


def functional_of(op: OpOverload) -> OpOverload | None:
    """The overload that computes what an in-place or out= operator writes, without writing it."""
    return _functional_of(op)


@functools.cache
def _functional_of(op: OpOverload) -> OpOverload | None:
    schema = schema_of(op)
    name = op_name(op)
    if schema.is_inplace:
        name = name[:-1]
    elif not schema.is_out:
        return None
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if packet is None:
        return None
    wanted = [(p.name, p.kind) for i, p in enumerate(schema.params) if not (schema.is_out and i in schema.mutated)]
    for candidate in _candidates(packet):
        theirs = schema_of(candidate)
        if not theirs.mutated and [(p.name, p.kind) for p in theirs.params] == wanted:
            return candidate
    return None


def is_view(op: object) -> bool:
    """Does its schema say that its result shows its argument's memory?"""
    return isinstance(op, OpOverload) and schema_of(op).is_view


def is_pointwise(op: object) -> bool:
    return isinstance(op, OpOverload) and schema_of(op).pointwise


def is_random(op: object) -> bool:
    return isinstance(op, OpOverload) and schema_of(op).random


# Composite dropouts: with a probability of zero, as in evaluation, they give their argument back.
DROPOUTS = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))


def draws(op: object, args: tuple, kwargs: dict) -> bool:
    """This call draws random numbers: attention and recurrent layers without dropout, or dropout in evaluation or of
    nothing, do not."""
    if not isinstance(op, OpOverload) or not is_random(op):
        return False
    positional, keyword = bind(op, args, kwargs)
    given = {p.name: a for p, a in zip(schema_of(op).positional, positional, strict=True)} | keyword
    p = given.get("p") if op_name(op) in DROPOUTS else given.get("dropout_p", given.get("dropout"))
    off = type(p) in (int, float) and p == 0
    return not off and given.get("train") is not False and given.get("training") is not False


_EFFECTS = ("_assert", "sym_constrain", "_print", "record_stream")
# Ranks meet in them: none may be left out, run twice, or run in another order than on other ranks.
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))


class _Call(Protocol):
    """An equation, as far as this file needs to know one."""

    @property
    def op(self) -> Any: ...
    @property
    def args(self) -> tuple: ...
    @property
    def kwargs(self) -> dict: ...
    @property
    def _effect(self) -> bool | None: ...


def has_effect(eqn: _Call) -> bool:
    """Must stay even if nothing reads its result, and must keep its place among its like."""
    if eqn._effect is None:  # passes ask again and again
        object.__setattr__(eqn, "_effect", _has_effect(eqn))
    return eqn._effect  # type: ignore[return-value]


def _has_effect(eqn: _Call) -> bool:
    op = eqn.op
    if not isinstance(op, OpOverload):
        return not getattr(op, "pure", True) or any(isinstance(a, OpOverload) and is_random(a) for a in eqn.args)
    schema = schema_of(op)
    if schema.mutated or not schema.returns or op_name(op).startswith(_EFFECTS) or op.namespace in COLLECTIVES:
        return True
    return schema.random and draws(op, eqn.args, eqn.kwargs)
