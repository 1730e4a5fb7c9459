"""What an equation computes, as a number.

In: an equation. Out: a number that it shares with all equations of the same operator, constants and types, whatever its
values are called: what depends on nothing else is worked out once for all of them, as in the layers of a model.
"""

from __future__ import annotations

from tessera.ir import fake
from tessera.ir.equation import Equation, Value
from tessera.ir.types import TensorType
from tessera.torch_internals.operators import OpOverload

_numbers: dict[tuple, tuple[int, bool]] = {}  # the number, and whether it mentions no symbols


def signature(eqn: Equation) -> int:
    """Equal for equations that differ only in which values they read and give. Of an operator of PyTorch's, since a
    Special may hold a whole program."""
    if eqn._signature is not None:
        return eqn._signature
    reads = eqn.inputs()
    types = tuple(None if v is None else v.type.key() for v in eqn.outputs)
    same = tuple(map(reads.index, reads)) if len(reads) > 1 else ()  # add(x, x) is not add(x, y)
    key = (eqn.op, fake.argument_key(eqn.args), fake.argument_key(eqn.kwargs), types, eqn.many, same)
    if key not in _numbers:
        symbolic = fake.mentions_symbols((eqn.args, eqn.kwargs)) or any(map(_is_symbolic, eqn.outputs))
        _numbers[key] = len(_numbers), not symbolic
    number, lasts = _numbers[key]
    if lasts:  # what is known of a symbolic size may change
        object.__setattr__(eqn, "_signature", number)
    return number


def lasting(eqn: Equation) -> int | None:
    """The signature, of an operator of PyTorch's whose sizes are all known; None otherwise."""
    if not isinstance(eqn.op, OpOverload):
        return None
    number = signature(eqn)
    return None if eqn._signature is None else number


def _is_symbolic(v: Value | None) -> bool:
    return v is not None and isinstance(v.type, TensorType) and v.type.is_symbolic
