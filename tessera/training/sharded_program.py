"""The program of a training step on one rank of a mesh, from the user's loss to a callable.

In: a model whose weights are or will be DTensors, a loss, a batch's part, a plan. Out: a compilation. The loss is
captured on fake tensors with the sizes of the whole batch and of whole weights, differentiated and given its update as
one global program; then it is partitioned, and one rank's program goes through the stages of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from tessera.distributed.plan import Layout as Lies
from tessera.frontends.functional.trace import Traced, trace_function
from tessera.ir.builder import Builder, aten
from tessera.ir.equation import Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.optim.updates import Extra, Plan, append_updates
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.decompose.random import compute_random
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends
from tessera.pipeline.lists import PIPELINES, claiming, finishing, last
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.stage import PROGRAM, STEP, Hook, Stage
from tessera.runtime.call import Layout
from tessera.training.program import StepExecutable, StepProgram
from tessera.transforms.shard.partition import Sharded, shard
from tessera.transforms.vjp import vjp
from tessera.util.errors import CaptureError

PIPELINES["sharded"] = [
    Hook("decompose", "one rank's program is a program like any other", PROGRAM),
    Stage("canonicalise", last, "what decomposition left"),
    Stage("cse", cse, "what forward, backward and update all compute"),
    Stage("dce", dce, "what nobody reads"),
    *claiming(PROGRAM),
    *finishing(PROGRAM),
]


@dataclass(frozen=True)
class Forward:
    """A captured loss over whole tensors: inputs are weights, buffers and the batch, by name."""

    traced: Traced
    trace: Trace
    weights: dict[str, Value]
    buffers: dict[str, Value]
    batch: tuple[Value, ...]
    loss: int  # place of the loss among the outputs


def capture_loss(
    model: nn.Module,
    loss_fn: Callable | None,
    types: Mapping[str, TensorType],
    batch: tuple,
    named: dict,
    batch_types: Mapping[int, TensorType],
) -> Forward:
    """The loss as a program over whole tensors. `types` are those of weights and buffers, `batch_types` those of the
    tensors among the batch, by their place."""
    names = list(types)

    def run(held: list, batch: tuple, named: dict) -> object:
        own = dict(zip(names, held, strict=True))

        def call(*args: object, **kwargs: object) -> object:
            return functional_call(model, own, args, kwargs)

        return call(*batch, **named) if loss_fn is None else loss_fn(_Called(model, call), *batch, **named)

    held = [torch.empty(0, dtype=t.dtype, device=t.device) for t in types.values()]
    all_types = {**dict(enumerate(types.values())), **{len(names) + i: t for i, t in batch_types.items()}}
    traced = trace_function(run, (held, batch, named), types=all_types, name=type(model).__name__)
    renamed = _named(traced.trace, names)
    loss = _loss_place(traced)
    trace = renamed
    for apply in (canonicalise, fold, cse, dce):
        trace = apply(trace)
    trace = compute_random(trace, lambda device: True, lambda eqn: True)
    count = {name: trace.inputs[i] for i, name in enumerate(names)}
    params = {name for name, _ in model.named_parameters()}
    weights = {name: v for name, v in count.items() if name in params}
    buffers = {name: v for name, v in count.items() if name not in params}
    return Forward(traced, trace, weights, buffers, trace.inputs[len(names) :], loss)


class _Called:
    """A model whose calls run on given weights; all else is the model's own."""

    def __init__(self, model: nn.Module, call: Callable) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def _named(trace: Trace, names: Sequence[str]) -> Trace:
    """Inputs called as the model calls its weights."""
    builder = Builder(trace.name)
    builder.reserve(trace.values())
    fresh = {v: Value(builder.fresh(n.replace(".", "_")), v.type) for v, n in zip(trace.inputs, names, strict=False)}
    return trace.with_(
        inputs=tuple(fresh.get(v, v) for v in trace.inputs),
        equations=tuple(e.substitute(fresh) for e in trace.equations),
        outputs=map_values(trace.outputs, lambda v: fresh.get(v, v)),
        mutations={fresh.get(t, t): fresh.get(v, v) for t, v in trace.mutations.items()},
        symbols={s: (fresh.get(v, v), d) for s, (v, d) in trace.symbols.items()},
    )


def _loss_place(traced: Traced) -> int:
    """The loss is the result, the first of a tuple, or what a dict calls so."""
    numbers = list(range(len(traced.trace.outputs)))
    packed = traced.pack(numbers)
    place = packed.get("loss") if isinstance(packed, dict) else packed[0] if isinstance(packed, tuple) else packed
    kind = type(packed).__name__
    if not isinstance(place, int):
        raise CaptureError(f"expected a loss, a tuple that starts with it or a dict with a 'loss', got {kind}")
    loss = traced.trace.outputs[place]
    if not isinstance(loss, Value) or not loss.tensor.is_float or loss.tensor.numel() != 1:
        raise CaptureError(f"expected the loss to be one floating-point number, got {loss}")
    return place


class ShardedRun(Run):
    """A captured loss on its way to one rank's step."""

    def __init__(self, of: ShardedCompilation) -> None:
        self.of = of
        super().__init__(of.name, None, of.options, False, (), {})  # type: ignore[arg-type]

    def begin(self, _: bool) -> None:
        of, forward = self.of, self.of.forward
        self.keep("captured", forward.traced.trace)
        trace = self.keep("clean", forward.trace)
        loss = trace.outputs[forward.loss]
        assert isinstance(loss, Value)
        wrt = [forward.weights[name] for name in of.trained]
        joint = vjp(trace, wrt, mode_of(trace), pull=[loss])
        if not joint.pulled:
            raise CaptureError("the loss depends on no parameter of the optimizer")
        clean = dce(cse(fold(canonicalise(_seeded(joint.trace), differentiable=False))))
        clean = self.keep("vjp", clean)
        results = len(trace.outputs)
        grads = dict(zip(of.trained, clean.outputs[results:], strict=True))
        self.with_grads = [name for name in of.trained if isinstance(grads[name], Value)]
        plan = of.plan_of(self.with_grads, {name: forward.weights[name] for name in self.with_grads})
        chosen = [grads[name] for name in self.with_grads]
        updated, self.extras = append_updates(clean.with_(outputs=clean.outputs[:results]), plan, chosen)  # type: ignore[arg-type]
        updated = self.keep("update", updated)
        self.plan, self.results = plan, results  # type: ignore[assignment]
        placements = self.placements(updated, grads)
        self.sharded = shard(updated, of.lies.plan.mesh, placements, forward.weights.values(), of.lies.plan.stays)
        self.traces[PROGRAM] = self.keep("shard", self.sharded.trace)
        local = self.traces[PROGRAM]
        self.written = tuple(i for i, v in enumerate(local.inputs) if v in local.mutations)
        self.kind = "sharded"

    def placements(self, trace: Trace, grads: Mapping[str, object]) -> dict[Value, Placement]:
        lies, forward = self.of.lies, self.of.forward
        placed: dict[Value, Placement] = {**lies.inputs, **lies.results}
        placed |= {v: lies.weights[name] for name, v in forward.weights.items()}
        for name in self.with_grads:
            placed[grads[name]] = lies.grads[name]  # type: ignore[index]
        first = len(trace.inputs) - len(self.extras)
        for v, extra in zip(trace.inputs[first:], self.extras, strict=True):
            if extra.kind == "state":
                placed[v] = lies.states[self.with_grads[extra.member]]
        return placed

    def ends(self) -> Ends:
        return Ends(Layout(()), None, self.written)

    def programs(self) -> list[Program]:
        return [self.program(STEP, self.traces[PROGRAM])]


def _seeded(trace: Trace) -> Trace:
    """The loss's cotangent is one."""
    seed = trace.inputs[-1]
    builder = Builder(trace.name, mode_of(trace))
    builder.reserve(trace.values())
    with builder:
        aten.full(list(seed.shape), 1.0, dtype=seed.dtype, device=seed.tensor.device)
    first = builder.equations[0].with_(outputs=(seed,))
    return trace.with_(inputs=trace.inputs[:-1], equations=(first, *trace.equations))


class ShardedCompilation(StepProgram):
    """One rank's step."""

    kinds = ("sharded",)
    with_grads: list[str]
    sharded: Sharded

    def __init__(
        self,
        name: str,
        forward: Forward,
        lies: Lies,
        trained: list[str],
        plan_of: Callable[[list[str], dict[str, Value]], Plan],
        options: Options,
    ) -> None:
        self.forward, self.lies, self.trained, self.plan_of = forward, lies, trained, plan_of
        super().__init__(name, None, _never, options)  # type: ignore[arg-type]

    def key(self) -> None:
        """Not kept on disk."""
        return None

    def through(self, captured: object, edits: Edits) -> tuple[StepExecutable, Account]:
        run = ShardedRun(self)
        run.go()
        run.account.programs = run.programs()
        self.plan, self.with_grads, self.sharded = run.plan, run.with_grads, run.sharded
        return StepExecutable(run.account.programs, run.ends(), self.options, run.extras), run.account

    @property
    def extras(self) -> tuple[Extra, ...]:
        return self.executable.extras


def _never(*_: object) -> object:
    raise AssertionError("a step's programs are not called through their compilation")
