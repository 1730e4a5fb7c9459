"""Slots of experts: how many tokens each may take, and how many choices found none.

In: a captured program with `tessera.experts`, and how many slots an expert has at most; 0: as many as the program says.
Out: the program in which the first tokens of each expert have the slots; what found none is counted, from run to run,
in a state `overflow` of the module that calls the experts. Of a capacity that the program has itself likewise.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value
from tessera.ir.record import record
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, type_of
from tessera.spatial.capture import Captured
from tessera.spatial.importer.written_experts import places
from tessera.util.errors import OptionError

CHOICE, UP, MOST = 1, 3, 7  # among the operator's arguments


def in_slots(got: Captured, slots: int, demanded: bool) -> Captured:
    """`demanded`: that there are experts."""
    found = [eqn for eqn in got.trace.equations if str(eqn.op) == "tessera.experts.default"]
    if demanded and not found:
        raise OptionError(f"cut: expected tessera.experts in {got.trace.name}, which is what is cut; got none")
    rewrite, weights, mutations = Rewrite(got.trace), dict(got.weights), dict(got.trace.mutations)
    for eqn in rewrite:
        if eqn not in found:
            continue
        choice, own = eqn.args[CHOICE], eqn.args[MOST]
        assert isinstance(choice, Value) and isinstance(own, int)
        most = min((n for n in (slots, own) if n), default=0)
        if not 0 < most < int(choice.shape[0]):
            continue
        counter = torch.zeros(1, dtype=torch.int64)
        name = f"{eqn.source.module}.overflow".lstrip(".")
        with rewrite.at(eqn) as builder:
            state = builder.input(name, type_of(counter))
            kept, counted = builder.inline(_kept(got, eqn, most if most != own else 0), (choice, state), here=True)
        assert isinstance(counted, Value)
        mutations[state] = counted
        weights[state] = name, counter
        args = tuple({CHOICE: kept, MOST: most}.get(i, a) for i, a in enumerate(eqn.args))
        rewrite.keep(eqn.with_(args=args))
    if len(weights) == len(got.weights):
        return got
    trace = rewrite.finish(mutations=mutations, inputs=tuple(rewrite.builder.inputs))
    return replace(got, trace=trace, weights=weights)


def _kept(got: Captured, eqn: Equation, most: int) -> Trace:
    """Choices and a counter, with those choices left out for which there is no slot."""
    choice, up = eqn.args[CHOICE], eqn.args[UP]
    assert isinstance(choice, Value) and isinstance(up, Value)
    counter = type_of(torch.zeros(1, dtype=torch.int64))
    assert isinstance(counter, TensorType)
    given = fake.fake_of(choice.tensor, got.mode), fake.fake_of(counter, got.mode)
    fn = functools.partial(_counted, count=int(up.shape[0]), most=most)
    return record(fn, given, ["choice", "overflow"], lambda op: True, Builder("slots", got.mode), locate=False)[0]


def _counted(choice: torch.Tensor, overflow: torch.Tensor, count: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert behind the last one is none; with `most` those choose it that come too late."""
    if most:
        flat = choice.reshape(-1)
        choice = torch.where(places(flat) < most, flat, torch.full((), count)).reshape(choice.shape)
    none = (choice < 0) | (choice >= count)
    lost = none.to(torch.int64).reshape(1, -1).sum(-1)
    return choice, overflow.index_copy(0, torch.zeros(1, dtype=torch.int64), overflow + lost)
