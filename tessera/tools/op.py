"""`tessera op NAME`: where each rule of an operator stands, file and line.

In: an operator's name ("gelu", "aten.gelu", "aten::sum.dim_IntList"). Out: for every kind of rule, who gives it (a rule
of ours, zero, PyTorch's own formula) and where. A name that is no operator gets the nearest ones.
"""

from __future__ import annotations

import difflib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from tessera.ops.matrix import derivative
from tessera.ops.op import Rules, registry, rules
from tessera.passes.decompose.apply import TORCH
from tessera.passes.decompose.nn import DECOMPOSITIONS
from tessera.tile.from_trace.lower.rule import rule_of
from tessera.tools.command import Command, console, json_argument, write_json
from tessera.torch_internals.dispatch import DispatchKey
from tessera.torch_internals.operators import (
    OpOverload,
    OpOverloadPacket,
    all_operator_names,
    decomposition_table,
    op_name,
    overload_name,
)
from tessera.util.errors import OptionError

FALLBACK = "PyTorch's own formula, traced by tessera/ops/fallback.py"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


@dataclass(frozen=True)
class Place:
    """One rule of one overload."""

    rule: str
    by: str
    where: str = ""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", help="an operator, such as gelu, aten.gelu or aten.sum.dim_IntList")
    json_argument(parser)


def run(args: Namespace) -> int:
    by_overload = {str(op): list(places(op)) for op in overloads(args.name)}
    if not write_json(args, {name: [asdict(p) for p in listed] for name, listed in by_overload.items()}):
        for name, listed in by_overload.items():
            table = Table("rule", "given by", "where", title=name, title_justify="left")
            for place in listed:
                table.add_row(place.rule, place.by, place.where)
            console().print(table)
    return 0


def overloads(name: str) -> list[OpOverload]:
    """The overloads a name means; only those whose rules differ are worth telling apart."""
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    if len(parts) == 1 or (len(parts) == 2 and parts[0] not in _namespaces()):
        parts = ["aten", *parts]
    packet = _packet(parts[0], parts[1])
    if packet is None:
        raise OptionError(f"no operator {name!r}; {_nearest('.'.join(parts[:2]))}")
    if len(parts) == 3:
        if parts[2] not in packet.overloads():
            raise OptionError(
                f"{'.'.join(parts[:2])} has no overload {parts[2]!r}; it has {', '.join(packet.overloads())}"
            )
        return [getattr(packet, parts[2])]
    distinct: dict[tuple, OpOverload] = {}
    for key in packet.overloads():
        if "out" not in key:
            op = getattr(packet, key)
            distinct.setdefault(tuple((p.rule, p.by, p.where) for p in places(op) if p.rule != "type"), op)
    return list(distinct.values())


def _namespaces() -> set[str]:
    return {name.split(".")[0] for name in registry()} | {"prims"}


def _packet(namespace: str, name: str) -> OpOverloadPacket | None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def _nearest(name: str) -> str:
    known = {".".join(key.split(".")[:2]) for key in registry()}
    known |= {k.split("::")[0] + "." + k.split("::")[1].split(".")[0] for k in all_operator_names()}
    close = difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.6)
    return f"nearest: {', '.join(close)}" if close else "docs/operators.md lists those with rules of ours"


def places(op: OpOverload) -> Iterator[Place]:
    """Every kind of rule, in the order in which a program meets them."""
    declaration = rules(op)
    if declaration is not None:
        yield Place("declared", declaration.family, short(declaration.where))
    yield _type_rule(op)
    yield _derivative("vjp", declaration, (declaration.vjp or declaration.forward) if declaration else None)
    yield _derivative("jvp", declaration, declaration.jvp if declaration else None)
    yield _rule("batching", declaration.batch if declaration else None, FALLBACK, declaration)
    cost = "free: a view" if declaration and declaration.free else "one operation an element of the result"
    yield _rule("cost", declaration.cost if declaration else None, cost, declaration)
    lowering = rule_of(op)
    yield _rule("tile lowering", lowering.lower if lowering else None, "none: it is run whole", None)
    yield _decomposition(op)


def _type_rule(op: OpOverload) -> Place:
    kernel = op.py_kernels.get(DispatchKey.Meta)  # type: ignore[call-overload]
    return Place("type", "PyTorch's meta kernel", short(home(kernel)) if callable(kernel) else "in C++")


def _derivative(kind: str, declaration: Rules | None, rule: Callable | None) -> Place:
    if declaration is not None and declaration.zero:
        return Place(kind, derivative(declaration, rule), short(declaration.where))
    return _rule(kind, rule, FALLBACK, declaration)


def _rule(kind: str, rule: Callable | None, otherwise: str, declaration: Rules | None) -> Place:
    if rule is None:
        return Place(kind, otherwise)
    place = home(rule)
    if declaration is not None and "/ops/" in place and place.split(":")[0].endswith(("families.py", "formula.py")):
        place = declaration.where  # the family's own rule: what is particular stands at the declaration
    return Place(kind, "rule", short(place))


def _decomposition(op: OpOverload) -> Place:
    ours = DECOMPOSITIONS.get(f"{op_name(op)}.{overload_name(op)}") or DECOMPOSITIONS.get(op_name(op))
    if op.namespace == "aten" and ours is not None:
        return Place("decomposition", "rule", short(home(ours)))
    if op_name(op) in TORCH and op in decomposition_table:
        return Place("decomposition", "PyTorch's", short(home(decomposition_table[op])))
    return Place("decomposition", "none")


def home(fn: Callable) -> str:
    """Where the innermost function that a rule is made of stands: families wrap what a declaration gives them."""
    best, depth_of_best = getattr(fn, "__wrapped__", fn), 0
    pending, seen = [(best, 0)], {id(best)}
    while pending:
        current, depth = pending.pop(0)
        if depth > depth_of_best:
            best, depth_of_best = current, depth
        for cell in getattr(current, "__closure__", None) or ():
            inner = _held(cell)
            for candidate in inner if isinstance(inner, (list, tuple)) else [inner]:
                if hasattr(candidate, "__code__") and id(candidate) not in seen:
                    seen.add(id(candidate))
                    pending.append((candidate, depth + 1))
    code = getattr(best, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _held(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # not filled yet
        return None


def short(place: str) -> str:
    return place.removeprefix(_ROOT)


COMMAND = Command(arguments, run)
