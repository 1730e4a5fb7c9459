"""Values that are in memory already are not computed again.

In: a program, and others that ran before it, whose results were kept: they stand among the program's inputs. Out: the
program reading them. A value is known where both programs compute it the same way from the same inputs; random numbers
are known by their turn, since nothing else tells two draws apart. Effects happened when the first program ran and do
not happen again, so what still draws a random number would draw another one: it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.ir.alias import KEEP_GRAD
from tessera.ir.equation import APART, Arg, Value, map_values
from tessera.ir.rewrite import needed, with_equations
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.passes.clean.cse import key_of
from tessera.util.errors import DoubleBackwardError

SMALL = 4096  # elements

_aten = torch.ops.aten
# Which argument these hand on: for the values, they are names.
_HANDED_ON = {_aten.detach.default: 0, _aten.alias.default: 0, _aten.clone.default: 0, KEEP_GRAD: 1}


@dataclass(frozen=True)
class Given:
    """What another program computed and kept, and the inputs that bring it."""

    program: Trace
    kept: tuple[Value, ...]
    inputs: tuple[Value, ...]


def known(trace: Trace, given: Sequence[Given]) -> Trace:
    """The program on what others kept, without effects."""
    for one in given:
        trace = _known(trace, one)
    return _without_effects(trace)


def _known(trace: Trace, given: Given) -> Trace:
    numbers: dict[object, int] = {}
    theirs, ours = _numbered(given.program, numbers), _numbered(trace, numbers)
    inputs = {theirs[v]: x for v, x in zip(given.kept, given.inputs, strict=True) if v in theirs}
    names = {v: inputs[n] for v, n in ours.items() if n in inputs and inputs[n].type.key() == v.type.key()}
    equations = [e.substitute(names) if any(v in names for v in e.inputs()) else e for e in trace.equations]
    return with_equations(trace, equations, names)


def _numbered(trace: Trace, numbers: dict[object, int]) -> dict[Value, int]:
    """A number for every value, equal where two programs compute the same."""
    number_of: dict[Value, int] = {}
    drawn = 0

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    for v in trace.inputs:
        number_of[v] = number(("input", v))
    for v, tensor in trace.constants.items():
        number_of[v] = number(("constant", *_contents(tensor)))
    for eqn in trace.equations:
        if eqn.op in _HANDED_ON and isinstance(source := eqn.args[_HANDED_ON[eqn.op]], Value):
            number_of[eqn.out] = number_of[source]
            continue
        key: tuple[object, ...] = (eqn.op, _key(eqn.args, number_of), _key(eqn.kwargs, number_of), APART in eqn.tags)
        if has_effect(eqn):
            key, drawn = (eqn.op, "turn", drawn), drawn + 1
        for place, v in enumerate(eqn.outputs):
            if v is not None:
                number_of[v] = number((*key, place))
    return number_of


def _contents(tensor: torch.Tensor) -> tuple[object, ...]:
    """Small tensors by what is in them: passes that compute them ahead make them anew each time."""
    if tensor.numel() > SMALL or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, repr(tensor.tolist()))


def _key(args: Arg, number_of: dict[Value, int]) -> object:
    return key_of(map_values(args, lambda v: ("value", number_of[v])))


def _without_effects(trace: Trace) -> Trace:
    kept = needed(trace.equations, [*trace.results(), *(v for v, _ in trace.symbols.values())])
    for eqn in kept:
        if has_effect(eqn) and any(isinstance(v.type, TensorType) for v in eqn.results()):
            raise DoubleBackwardError(
                f"expected a gradient that can be differentiated again, got one through {eqn.op} "
                f"({eqn.source or 'of an unknown line'}), whose random numbers are not kept"
            )
    return trace.with_(equations=tuple(kept))
