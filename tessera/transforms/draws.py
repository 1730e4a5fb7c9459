"""What an equation draws from, as far as batching asks.

Some draws look at a tensor for its shape alone: `rand_like`, and whatever overwrites a tensor (`x.normal_()`). Those
are batched here by giving them another tensor to look at. Of the others, tensors are the parameters.
"""

from __future__ import annotations

from tessera.ir.alias import FUNCTIONAL
from tessera.ir.equation import Equation, Value
from tessera.ir.schema import draws, is_random
from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.errors import BatchError
from tessera.util.names import names

_OVERWRITING = names("random uniform cauchy exponential geometric log_normal normal_functional normal_ bernoulli_")
_OVERWRITING_BERNOULLI = ("p", "Tensor")


def is_draw(eqn: Equation) -> bool:
    return draws(eqn.op, eqn.args, eqn.kwargs) or (eqn.op is FUNCTIONAL and is_random(eqn.args[0]))


def _operator(eqn: Equation) -> object:
    return eqn.args[0] if eqn.op is FUNCTIONAL else eqn.op


def refused_draw(transform: str, eqn: Equation) -> BatchError:
    return BatchError(
        f"{transform}: {_operator(eqn)} draws random numbers ({eqn.source or 'unknown line'}); say whether every "
        'example gets its own (randomness="different") or all share one draw (randomness="same")'
    )


def no_common_draw(eqn: Equation) -> BatchError:
    return BatchError(
        f"vmap: {_operator(eqn)} draws from what differs between examples ({eqn.source or 'unknown line'}); "
        'they cannot share one draw (randomness="same"); say randomness="different"'
    )


def lender(eqn: Equation) -> Value | None:
    """The tensor that only lends its shape to what is drawn."""
    op, args = (eqn.args[0], eqn.args[1:]) if eqn.op is FUNCTIONAL else (eqn.op, eqn.args)
    if not isinstance(op, OpOverload) or not args or not isinstance(args[0], Value):
        return None
    name = op_name(op)
    overwrites = name in _OVERWRITING or (name == "bernoulli" and overload_name(op) in _OVERWRITING_BERNOULLI)
    return args[0] if overwrites or name.endswith("_like") else None
