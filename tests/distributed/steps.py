"""Training steps as one global program, and their runs on whole tensors and on all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import functional_call

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir import interp
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Value
from tessera.ir.trace import Trace
from tessera.ir.types import type_of
from tessera.optim.adam import ADAM
from tessera.optim.sgd import SGD
from tessera.optim.updates import Extra, Family, Member, Plan, append_updates
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.transforms.vjp import vjp

# eps is large: the gradient of a bias of keys is rounding alone, which Adam would blow up
ADAM_GROUP = {
    "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "decoupled_weight_decay": True,
}  # fmt: skip
SGD_GROUP = {"lr": 1e-1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
RULES = {"adam": (ADAM, ADAM_GROUP), "sgd": (SGD, SGD_GROUP)}


@dataclass(frozen=True)
class Step:
    """A global program: forward, backward and update of a model."""

    trace: Trace
    forward: Trace  # before differentiation
    params: dict[str, Value]
    grads: dict[str, Value]
    states: dict[str, list[Value]]  # of each parameter
    batch: list[Value]
    tensors: list[torch.Tensor | None]  # for each input; None where it is of the batch or a vector of numbers
    numbers: Callable[[int], torch.Tensor]

    def arguments(self, batch: list[torch.Tensor], age: int, held: list) -> list:
        rest = iter(batch)
        given = []
        for v, x in zip(self.trace.inputs, held, strict=True):
            given.append(next(rest) if v in self.batch else self.numbers(age) if x is None else x)
        return given


def make_step(
    model: torch.nn.Module,
    loss_fn: Callable,
    batch: list[torch.Tensor],
    optimizer: str = "adam",
    clip: float | None = None,
) -> Step:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = {name: x.detach() for name, x in {**params, **buffers}.items()}

    def fn(*args: torch.Tensor) -> torch.Tensor:
        own = dict(zip(state, args[: len(state)], strict=True))
        return loss_fn(lambda *inputs: functional_call(model, own, inputs), *args[len(state) :])

    names = [*(name.replace(".", "_") for name in state), *(f"batch_{i}" for i in range(len(batch)))]
    captured = trace_function(fn, [*(x.clone() for x in state.values()), *batch]).trace
    rename = dict(
        zip(captured.inputs, (Value(n, v.type) for n, v in zip(names, captured.inputs, strict=True)), strict=True)
    )
    forward = _renamed(captured, rename)
    forward = dce(cse(canonicalise(forward)))
    wrt = list(forward.inputs[: len(params)])
    loss = forward.outputs[0]
    joint = vjp(forward, wrt, pull=[loss])
    trace = _seeded(dce(cse(canonicalise(joint.trace, differentiable=False))))
    rule, group = RULES[optimizer]
    form = rule.form(group)
    slots = tuple(rule.numbers(group, form, 1))
    members = [Member(v.name, v.tensor, 0, v, tuple(v.tensor for _ in rule.state(form))) for v in wrt]
    plan = Plan(rule, tuple(members), (Family(0, form, slots),), ("norm",) if clip else ())
    grads = list(trace.outputs[1:])
    trace, extras = append_updates(trace.with_(outputs=trace.outputs[:1]), plan, grads)
    dtype = next(iter(params.values())).dtype

    def numbers(age: int) -> torch.Tensor:
        listed = [*([clip] if clip else []), *rule.numbers(group, form, age).values()]
        return torch.tensor(listed, dtype=dtype)

    states: dict[str, list[Value]] = {}
    tensors: list[torch.Tensor | None] = [x.clone() for x in state.values()] + [None] * len(batch)
    for v, extra in zip(trace.inputs[len(tensors) :], extras, strict=True):
        tensors.append(_state(extra, wrt, state, list(params)))
        if extra.kind == "state":
            states.setdefault(list(params)[extra.member], []).append(v)
    by_name = dict(zip(params, wrt, strict=True))
    return Step(
        trace, forward, by_name, dict(zip(params, grads, strict=True)), states,
        list(trace.inputs[len(state) : len(state) + len(batch)]), tensors, numbers,
    )  # fmt: skip


def _state(extra: Extra, wrt: list[Value], state: dict, names: list[str]) -> torch.Tensor | None:
    return torch.zeros_like(state[names[extra.member]]) if extra.kind == "state" else None


def _renamed(trace: Trace, rename: dict[Value, Value]) -> Trace:
    return trace.with_(
        inputs=tuple(rename[v] for v in trace.inputs),
        equations=tuple(e.substitute(rename) for e in trace.equations),
        outputs=tuple(rename.get(v, v) for v in trace.outputs),
        mutations={rename[t]: rename.get(v, v) for t, v in trace.mutations.items()},
    )


def _seeded(trace: Trace) -> Trace:
    """The loss's cotangent is one."""
    seed = trace.inputs[-1]
    builder = Builder(trace.name)
    builder.reserve(trace.values())
    with builder:
        aten.full(list(seed.shape), 1.0, dtype=seed.dtype, device=seed.tensor.device)
    first = builder.equations[0].with_(outputs=(seed,))
    return trace.with_(inputs=trace.inputs[:-1], equations=(first, *trace.equations))


def run_whole(step: Step, batches: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and what the program's inputs hold in the end."""
    held = [None if x is None else x.clone() for x in step.tensors]
    losses = [interp.run(step.trace, *step.arguments(batch, i + 1, held))[0] for i, batch in enumerate(batches)]
    return losses, [x for x in held if x is not None]


def run_ranks(step: Step, local: Trace, batches: list[list[torch.Tensor]]) -> tuple[list, list[torch.Tensor]]:
    """The same on all ranks in step; losses are equal on all of them."""
    places = [v.type.placement for v in local.inputs]
    held = [None if x is None else in_step.cut(x, p) for x, p in zip(step.tensors, places, strict=True)]
    losses = []
    for i, batch in enumerate(batches):
        whole = step.arguments(batch, i + 1, [None if x is None else ... for x in held])
        args = [h if h is not None else in_step.cut(x, p) for h, x, p in zip(held, whole, places, strict=True)]
        outputs = in_step.run(local, args)
        losses.append(in_step.join(outputs[0], local.outputs[0].type.placement))
    return losses, [in_step.join(h, p) for h, p in zip(held, places, strict=True) if h is not None]


def types_of(xs: list[torch.Tensor]) -> list:
    return [type_of(x) for x in xs]
