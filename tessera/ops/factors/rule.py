"""What a sharding rule is: which dimensions of an operator's operands and results are one dimension.

    factors("aten.mm", "m k, k n -> m n", sums="k")

In: an equation. Out: its `Factors`. Each dimension has a name, its factor. Along a factor the operator may be cut: run
on chunks of it, it gives chunks of the result, or where the result has no such dimension parts that are summed (or of
which the largest counts). A dimension made of several factors, outermost first, is written `(h d)`: it is cut along the
first alone. `1` is a dimension that is broadcast, `k!` one that must be whole, `...` any number of leading dimensions.

`linear` are sets of operands in which the operator is linear together, so that summands go in and summands come out:
a product in each of its two alone, a sum in both at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tessera.ir.dist import On
from tessera.ir.equation import Equation, Special, Value
from tessera.ir.placement import Axes, Mark, Placement
from tessera.ir.schema import schema_of
from tessera.ir.types import Size, TensorType, size_key
from tessera.torch_internals.operators import op_name, overload_name
from tessera.util.errors import OptionError, RuleError

Dims = tuple[tuple[str, ...], ...]
_TOKEN = re.compile(r"\.\.\.|\([^)]*\)|\w+!?")


@dataclass(frozen=True)
class Cut:
    """How one equation is cut: the axes that split each factor, and where its results lie."""

    axes: Mapping[str, Axes]
    whole: tuple[tuple[Size, ...], ...]  # the sizes of its operands before they were cut
    results: tuple[Placement | None, ...]
    start: Callable[[Size, Axes, torch.device], Value]  # emits the place of a rank's first element
    mesh: On  # the collectives of the mesh

    def sizes(self, result: int = 0) -> list[Size]:
        """The sizes of a result on one rank."""
        placement = self.results[result]
        assert placement is not None
        return list(placement.local_shape)


Local = Callable[..., object]  # (equation over local operands, its cut) -> results, emitted into the active builder


@dataclass(frozen=True)
class Factors:
    operands: tuple[Dims, ...]  # of each tensor among the arguments, in order
    results: tuple[Dims | None, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)  # factors that results lack, and how parts are combined
    whole: frozenset[str] = frozenset()  # factors that cannot be cut
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()  # operands that are added to what is summed, so that one rank must add them
    sizes: Mapping[str, Size] = field(default_factory=dict)  # of factors that share a dimension with others
    local: Local | None = None  # what a rank computes, where it is not the equation itself
    sized: tuple[int, ...] = ()  # arguments that are the sizes of the first result
    unread: frozenset[str] = frozenset()  # factors whose padding `local` never looks at
    merges: bool = False  # dimensions made of several may be cut along any of them
    instead: frozenset[str] = frozenset()  # what is cut where an axis splits what must be whole; results go back
    around: frozenset[str] = frozenset()  # of what must be whole, that along which operands may go round a ring
    pairs: tuple[tuple[str, str], ...] = ()  # of factors that one axis may cut at once, by sending rows to experts
    alike: frozenset[tuple[int, str]] = frozenset()  # results that lack a factor and are made of nothing that has it
    cheap: bool = False  # it makes or repeats values at no cost: who needs a part has it made, not cut

    def splittable(self, factor: str) -> bool:
        """A factor may be cut where it comes first in every dimension that has it, and where every result that lacks
        it can be put together from parts."""
        if factor in self.whole:
            return False
        lacks = any(dims is not None and not any(factor in dim for dim in dims) for dims in self.results)
        if lacks and factor not in self.reduced:
            return False
        return self.merges or all(dim[0] == factor for dims in self.everywhere() for dim in dims if factor in dim)

    def shares(self, factor: str) -> bool:
        """Some dimension is made of this factor and others: it is cut evenly or not at all."""
        return any(factor in dim and len(dim) > 1 for dims in self.everywhere() for dim in dims)

    def everywhere(self) -> Iterable[Dims]:
        return (*self.operands, *(dims for dims in self.results if dims is not None))

    def cut_by(self, dim: tuple[str, ...], mark: Mark) -> tuple[str, Mark] | None:
        """The factor of a dimension that an axis with this mark cuts, and how it cuts that. None where that is known of
        no factor."""
        if len(dim) == 1:
            return dim[0], mark
        before = 1
        for factor in dim:
            size = self.sizes.get(factor)
            last = factor == dim[-1]
            if mark.blocks % before == 0 and (last or mark.blocks == before or mark.blocks < before * _known(size)):
                return factor, replace(mark, blocks=mark.blocks // before)
            if not isinstance(size, int):
                return None
            before *= size
        return None


def _known(size: Size | None) -> int:
    return size if isinstance(size, int) else 1


Rule = Callable[[Equation], Factors | None]
FACTORS: dict[str, Rule] = {}
DECOMPOSED: dict[str, Callable[[Equation], object]] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule of these operators, of `aten` unless they say otherwise."""

    def add(fn: Rule) -> Rule:
        for name in names.split():
            full = name if name.startswith(("aten.", "tessera.")) else f"aten.{name}"
            if full in FACTORS:
                raise OptionError(f"operator {full} has two sharding rules")
            FACTORS[full] = fn
        return fn

    return add


def factors(names: str, *texts: str, **options: Any) -> None:
    """Rules in words; of several texts, the one with as many operands as the equation."""
    rule(names)(lambda eqn: in_words(eqn, *texts, **options))


def decomposed(names: str) -> Callable[[Callable], Callable]:
    """Decorator: these operators as others over whole values, for what their own rule does not allow."""

    def add(fn: Callable[[Equation], object]) -> Callable:
        DECOMPOSED.update(
            {name if "." in name and name.startswith("aten.") else f"aten.{name}": fn for name in names.split()}
        )
        return fn

    return add


def names_of(eqn: Equation) -> tuple[str, ...]:
    op = eqn.op
    if isinstance(op, Special):
        return (f"{op.namespace}.{op.name}",)
    packet = f"{op.namespace}.{op_name(op)}"
    return f"{packet}.{overload_name(op)}", packet


def apart_of(eqn: Equation) -> Callable[[Equation], object] | None:
    return next((DECOMPOSED[name] for name in names_of(eqn) if name in DECOMPOSED), None)


def tensors(eqn: Equation) -> list[Value]:
    """The tensors among the arguments, in order, with repeats."""
    return [v for v in eqn.inputs() if isinstance(v.type, TensorType)]


def arguments(eqn: Equation) -> dict[str, Any]:
    """All arguments by the names that the operator's schema gives them, defaults filled in."""
    if isinstance(eqn.op, Special):
        return dict(eqn.kwargs)
    positional, keyword = eqn.bound()
    named = zip(schema_of(eqn.op).positional, positional, strict=True)
    return {param.name: a for param, a in named} | keyword


def uncut(eqn: Equation) -> Factors:
    """Nothing may be cut."""
    number = iter(range(1 << 30))

    def dims(v: Value) -> Dims:
        return tuple((f"w{next(number)}",) for _ in range(v.ndim))

    operands = tuple(dims(v) for v in tensors(eqn))
    results = tuple(dims(v) if v is not None and isinstance(v.type, TensorType) else None for v in eqn.outputs)
    return Factors(operands, results, whole=frozenset(f"w{i}" for i in range(next(number))))


# --- rules in words -------------------------------------------------------------------------------


def in_words(
    eqn: Equation,
    *texts: str,
    sums: str = "",
    alike: Sequence[tuple[int, str]] = (),
    linear: Sequence[Sequence[int]] = (),
    addends: Sequence[int] = (),
    sized: Sequence[int] = (),
    local: Local | None = None,
    unread: str = "",
) -> Factors | None:
    operands = tensors(eqn)
    results = [v if v is not None and isinstance(v.type, TensorType) else None for v in eqn.outputs]
    for text in texts:
        left, right = ([_tokens(term) for term in _terms(side)] for side in text.split("->"))
        if len(left) != len(operands) or len(right) != len(results):
            continue
        whole: set[str] = set()
        lead = max(
            (v.ndim - len(term) + 1 for v, term in zip((*operands, *results), (*left, *right), strict=True)
             if v is not None and "..." in term),
            default=0,
        )  # fmt: skip
        sizes = _lead_sizes([v for v in operands], left, lead)
        return Factors(
            tuple(_dims(v, term, lead, sizes, whole) for v, term in zip(operands, left, strict=True)),
            tuple(
                None if v is None else _dims(v, term, lead, sizes, whole)
                for v, term in zip(results, right, strict=True)
            ),
            {f: "sum" for f in (*sums.split(), *(f"*{i}" for i in range(lead) if "..." in sums.split()))},
            frozenset(whole),
            tuple(frozenset(group) for group in linear if max(group) < len(operands)),  # a linear without a bias
            frozenset(addends),
            local=local,
            sized=tuple(sized),
            unread=frozenset(unread.split()),
            alike=frozenset(alike),
        )
    return None


def _terms(side: str) -> list[str]:
    return [term.strip() for term in side.split(",")]


def _tokens(term: str) -> list[str]:
    return _TOKEN.findall(term)


def _lead_sizes(operands: Sequence[Value], left: Sequence[list[str]], lead: int) -> list[object]:
    """The sizes of leading dimensions, broadcast together, from the last to the first."""
    sizes: list[object] = [1] * lead
    for v, term in zip(operands, left, strict=True):
        if "..." in term:
            for back in range(v.ndim - len(term) + 1):
                at = v.ndim - len(term) - back
                if size_key(v.shape[at]) != 1:
                    sizes[back] = size_key(v.shape[at])
    return sizes


def _dims(v: Value, term: list[str], lead: int, sizes: list[object], whole: set[str]) -> Dims:
    count = v.ndim - len(term) + 1
    dims: list[tuple[str, ...]] = []
    for token in term:
        if token == "...":
            for at in range(count):
                back = count - 1 - at
                broadcast = size_key(v.shape[at]) == 1 and sizes[back] != 1
                dims.append(() if broadcast else (f"*{back}",))
        elif token == "1":
            dims.append(())
        else:
            name = token.removesuffix("!")
            whole.update([name] if token != name else [])
            dims.append((name,))
    if len(dims) != v.ndim:
        raise RuleError(f"a sharding rule says {' '.join(term)!r} of {v}, which has {v.ndim} dimensions")
    return tuple(dims)
