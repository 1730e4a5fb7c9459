"""Appends an optimizer's step to a program that gives gradients.

In: a trace, the gradient of each member among its values, and a `Plan`. Out: the trace with the equations of clipping,
accumulation and update at its end; parameters, state and sums of gradients are inputs that it mutates, and `Extra`
says what each further input is. Numbers come in one vector a dtype, in the order of the plan's slots. Parameters of 16
bits are updated in float32 arithmetic and rounded once. Complex ones are updated as pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Arg, Source, Value
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.families import cast
from tessera.optim.rule import Form, Rule

LITTLE = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to a norm before dividing by it


@dataclass(frozen=True)
class Member:
    """A parameter that this program updates."""

    name: str
    type: TensorType
    family: int  # members of one family share their numbers
    value: Value | None = None  # the input of the trace that is this parameter, where one is
    state: tuple[TensorType, ...] = ()
    total: TensorType | None = None  # of the sum of gradients that earlier calls left, where there is one


@dataclass(frozen=True)
class Family:
    """Parameters of one group and one age."""

    group: int
    form: Form
    names: tuple[str, ...]  # of the numbers, in order


@dataclass(frozen=True)
class Plan:
    rule: Rule
    members: tuple[Member, ...]
    families: tuple[Family, ...]
    clips: tuple[str, ...] = ()  # in order; "norm": gradients together · "value": each element; first slots: limits
    updates: bool = True  # False: gradients are added to sums; those without a sum yet are further outputs
    keeps: bool = False  # give the gradients as further outputs
    norms: int | None = None  # the norms of so many gradients, of other programs' members too, are an input

    def slots(self) -> int:
        return len(self.clips) + sum(len(f.names) for f in self.families)


@dataclass(frozen=True)
class Extra:
    """A further input of the program: "param", "state", "sum" of a member, "numbers" or "norms"."""

    kind: str
    member: int = -1
    name: str = ""
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass
class _Appender:
    builder: Builder
    plan: Plan
    grads: list[Value | None]
    extras: list[Extra] = field(default_factory=list)
    mutations: dict[Value, Value] = field(default_factory=dict)
    vectors: dict[tuple, list[Value]] = field(default_factory=dict)

    def input(self, name: str, type_: TensorType, extra: Extra) -> Value:
        self.extras.append(extra)
        return self.builder.input(name, type_)

    def numbers(self, dtype: torch.dtype, device: torch.device) -> list[Value]:
        """All numbers of the plan, each a tensor without dimensions."""
        key = dtype, device
        if key not in self.vectors:
            type_ = TensorType(dtype, (self.plan.slots(),), (1,), device)
            vector = self.input(f"numbers_{len(self.vectors)}", type_, Extra("numbers", dtype=dtype, device=device))
            self.vectors[key] = aten.unbind(vector, 0)
            # First of all: who updates a parameter beside making its gradient must not wait for the others.
            self.builder.equations.insert(0, self.builder.equations.pop())
        return self.vectors[key]

    # --- gradients ---

    def totals(self) -> list[Value]:
        """Gradients with the sums that earlier calls left; without an update, the sums grow."""
        totals = []
        for i, (member, grad) in enumerate(zip(self.plan.members, self.grads, strict=True)):
            total = grad
            if member.total is not None:
                held = self.input(f"{member.name}_sum", member.total, Extra("sum", i))
                total = held if grad is None else held + grad
                if not self.plan.updates:
                    self.mutations[held] = total
            assert total is not None, f"{member.name} has neither a gradient nor a sum of earlier ones"
            totals.append(total)
        return totals

    def clipped(self, grads: list[Value]) -> list[Value]:
        """Gradients within the limits, each of which has a slot."""
        for slot, how in enumerate(self.plan.clips if grads else ()):
            grads = self.scaled(grads, slot) if how == "norm" else [self.clamped(g, slot) for g in grads]
        return grads

    def clamped(self, grad: Value, slot: int) -> Value:
        """Every element at most as far from zero as the limit."""
        limit, wide = self.numbers(_wide(grad), grad.tensor.device)[slot], _wide(grad)
        return cast(aten.minimum(aten.maximum(cast(grad, wide), -limit), limit), grad.dtype)

    def scaled(self, grads: list[Value], slot: int) -> list[Value]:
        """Gradients scaled down so that all of them together have at most the limit as their norm."""
        device = grads[0].tensor.device
        wide = norm_dtype(g.dtype for g in grads)
        if self.plan.norms is None:
            norms = stacked_norms(grads, wide)
        else:
            type_ = TensorType(wide, (self.plan.norms,), (1,), device)
            norms = self.input("norms", type_, Extra("norms", dtype=wide, device=device))
        total = aten.linalg_vector_norm(norms)
        scale = aten.clamp_max(self.numbers(wide, device)[slot] / (total + LITTLE), 1.0)
        return [cast(cast(g, _wide(g)) * cast(scale, _wide(g)), g.dtype) for g in grads]

    # --- updates ---

    def update(self, index: int, grad: Value, first: dict[int, int]) -> None:
        member = self.plan.members[index]
        family = self.plan.families[member.family]
        held_param = member.value or self.input(member.name, member.type, Extra("param", index))
        param = as_real(held_param)
        wide = _wide(param)
        names = self.plan.rule.state(family.form)
        held = {
            name: self.input(f"{member.name}_{name}", type_, Extra("state", index, name))
            for name, type_ in zip(names, member.state, strict=True)
        }
        start = first[member.family]
        slots = self.numbers(wide, member.type.device)[start : start + len(family.names)]
        numbers = dict(zip(family.names, slots, strict=True))
        state = {name: cast(as_real(v), wide) for name, v in held.items()}
        new, changed = self.plan.rule.update(family.form, cast(param, wide), cast(grad, wide), state, numbers)
        self.mutations[held_param] = _as(new, held_param.dtype)
        for name, v in changed.items():
            self.mutations[held[name]] = _as(v, held[name].dtype)

    def run(self) -> list[Value]:
        """Carry the plan out; gives what the program hands out besides."""
        totals = self.totals()
        if not self.plan.updates:
            return [g for member, g in zip(self.plan.members, totals, strict=True) if member.total is None]
        grads = self.clipped([as_real(g) for g in totals])
        first, place = {}, len(self.plan.clips)
        for i, family in enumerate(self.plan.families):
            first[i], place = place, place + len(family.names)
        for index, (member, grad) in enumerate(zip(self.plan.members, grads, strict=True)):
            self.builder.source = Source(module=member.name, note=f"{self.plan.rule.name} step")
            self.update(index, grad, first)
        kept = [_as(g, total.dtype) for g, total in zip(grads, totals, strict=True)]
        return kept if self.plan.keeps else []


def append_updates(trace: Trace, plan: Plan, grads: Sequence[Value | None]) -> tuple[Trace, tuple[Extra, ...]]:
    """The trace with the plan carried out at its end. `grads[i]` belongs to `plan.members[i]`."""
    builder = Builder.over(trace)
    builder.equations += trace.equations
    with builder:
        appender = _Appender(builder, plan, list(grads))
        kept: list[Arg] = list(appender.run())
    mutations = {**trace.mutations, **appender.mutations}
    updated = builder.finish([*trace.outputs, *kept], {v: mutations[v] for v in builder.inputs if v in mutations})
    return updated, tuple(appender.extras)


def norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which the norms of gradients are taken."""
    return torch.float64 if {torch.float64, torch.complex128}.intersection(dtypes) else torch.float32


def stacked_norms(grads: list[Value], dtype: torch.dtype) -> Value:
    """The norm of each gradient."""
    norms: list[Value] = aten._foreach_norm([as_real(g) for g in grads], 2, dtype=dtype)
    return aten.stack(norms)


def as_real(v: Value) -> Value:
    """Complex numbers as pairs."""
    return aten.view_as_real(v) if v.dtype.is_complex else v


def _as(v: Value, dtype: torch.dtype) -> Value:
    """What was computed on real numbers, as what is held."""
    return aten.view_as_complex(cast(v, dtype.to_real())) if dtype.is_complex else cast(v, dtype)


def _wide(v: Value) -> torch.dtype:
    """The dtype of the arithmetic on a value: 16 bits are too few to add small steps up in."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32
