"""Operators that run on the host, since no unit of a core has a form for them.

In: an equation whose operator is one of the host's (`listing/host.py`). Out: a node for each of its results; its
operands are sent to the host, its results come back. Whether the machine has such a host is asked when it is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera.ir.equation import Arg, Equation, Value
from tessera.spatial.graph import Graph, HostCall, Hosted
from tessera.spatial.importer.values import Item, Lazy, Values, fold
from tessera.spatial.listing.host import OPERATORS
from tessera.spatial.listing.types import Argument, Ref
from tessera.spatial.maps import whole


def hosted(values: Values, env: Mapping[Value, Item], eqn: Equation) -> list[Item | None] | None:
    """The results of an operator on the host; None where it is not one of the host's, or takes what has no text."""
    if str(eqn.op) not in OPERATORS or not all(v.numel() for v in eqn.inputs()):
        return None
    names: dict[Value, str] = {}
    operands = {}
    for v in dict.fromkeys(eqn.inputs()):
        shape, m = tuple(int(n) for n in v.shape), values.map(env[v])
        if (m, v.dtype) not in values.at_host:  # what several read goes there once
            values.at_host[m, v.dtype] = values.graph.fresh(f"{v.name}_at_host")
        names[v] = values.at_host[m, v.dtype]
        operands[names[v]] = (v.dtype, shape, m.reshape(*fold(shape)))
    arguments = [("", a) for a in eqn.args] + list(eqn.kwargs.items())
    try:
        written = tuple((key, _argument(a, names)) for key, a in arguments)
    except TypeError:
        return None
    call = HostCall(str(eqn.op), written, operands, len(eqn.outputs), eqn.source)
    return [_result(values.graph, call, number, v) for number, v in enumerate(eqn.outputs)]


def _result(graph: Graph, call: HostCall, number: int, v: Value | None) -> Item | None:
    if v is None:
        return None
    shape = tuple(int(n) for n in v.shape)
    home = graph.home(v.name, v.dtype, *fold(shape), call.source)
    graph.add(Hosted(home, call, number, shape))
    return Lazy(shape, v.dtype, 0, (whole(home, shape),), home.name, call.source)


def _argument(of: Arg, names: dict[Value, str]) -> Argument:
    match of:
        case Value():
            return Ref(names[of])
        case None | bool() | int() | float() | str():
            return of
        case list() | tuple():
            return tuple(_argument(one, names) for one in of)
    raise TypeError(f"{type(of).__name__} has no text in a listing")
