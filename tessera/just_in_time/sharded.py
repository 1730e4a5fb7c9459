"""`jit` of a model whose weights lie on a mesh.

Every call gives this rank's part of a batch and gets this rank's part of the result: rows, where the result has the
batch's rows, and all of it otherwise. The program is captured with whole sizes, differentiated and partitioned. What
`.backward()` brings is the gradient of the sum of all ranks' losses; a result that is the same on all ranks counts
once. A weight's gradient lies as the weight does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.distributed.agree import agree
from tessera.distributed.capture import Forward, capture
from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.plan import Layout, Plan
from tessera.distributed.sharding import Sharding
from tessera.distributed.weights import local_of, placement_of
from tessera.frontends.captured import Captured
from tessera.ir.equation import Value
from tessera.ir.placement import Axes, Placement
from tessera.ir.types import TensorType, size_key
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.pipeline.account import Account
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.executable import Executable
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits
from tessera.pipeline.sharded import ShardedRun, told
from tessera.runtime.double_backward import Derivative, Wanted
from tessera.torch_internals import pytree
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import DoubleBackwardError, InputError, OptionError


class ShardedCall:
    """The call of a sharded model: a program for every kind of batch."""

    def __init__(self, model: nn.Module, sharding: Sharding, options: Options, backend: Backend) -> None:
        if (pipe := sharding.plan.pipe) is not None:
            raise OptionError(f"jit: expected a plan without a pipeline, got {pipe.axis}: {pipe.word}; use train_step")
        self.model, self.sharding, self.options, self.backend = model, sharding, options, backend
        self.programs: dict[tuple, _Program] = {}

    def __call__(self, *batch: object, **named: object) -> object:
        leaves, _ = pytree.tree_flatten((batch, named))
        grad = torch.is_grad_enabled()
        key = self.model.training, grad, *(batch_key(x, grad) for x in leaves)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._prepare(batch, named, leaves, grad)
        return program([x for x in leaves if isinstance(x, Tensor)])

    def _prepare(self, batch: tuple, named: dict, leaves: list, grad: bool) -> _Program:
        sharding, model = self.sharding, self.model
        forward = capture(model, None, batch, named, sharding.whole_batch(leaves), sharding.watched(model))
        lies = sharding.settle(model, forward, leaves)
        needs = [x.requires_grad for x in (*_held(model, forward), *(x for x in leaves if isinstance(x, Tensor)))]
        name = f"{type(model).__name__}_{len(self.programs)}"
        whole = any(isinstance(x, DTensor) for x in leaves)
        partition = partition_of(sharding, model, forward, lies)
        compilation = ShardedGraph(name, forward, partition, needs, self.options, grad)
        agree(sharding, leaves, told(compilation.account))
        self.backend.graphs.append(GraphRecord(name, "", compilation))
        return _Program(model, sharding, forward, compilation, whole)


def batch_key(x: object, grad: bool = False) -> object:
    """What a program is made for."""
    if not isinstance(x, Tensor):
        return repr(x)
    lies = x.placements if isinstance(x, DTensor) else ()
    return tuple(x.shape), x.dtype, grad and x.requires_grad, lies


def partition_of(sharding: Sharding, model: nn.Module, forward: Forward, lies: Layout) -> Partition:
    """Where the values of a model's call lie."""
    inputs = {**lies.inputs, **lies.results, **{v: lies.weights[name] for name, v in forward.weights.items()}}
    rows = {size_key(v.shape[0]): placement.splits[0] for v, placement in reversed(lies.inputs.items())}
    outputs: list[Placement | None] = [_result(lies.plan, v, rows) for v in forward.outputs]
    outputs += sharding.placed(model, forward)
    grads = {v: inputs[v] for v in (*forward.weights.values(), *lies.inputs)}
    weights = forward.weights.values()
    return Partition(
        sharding.mesh, inputs, outputs, forward.results, grads, weights, lies.plan.stays, sharding.wide,
        lies.homes, lies.plan.ways,
    )  # fmt: skip


def _result(plan: Plan, v: object, rows: Mapping[object, Axes]) -> Placement | None:
    """A result that has the batch's rows is split as they are; another one is whole."""
    if not isinstance(v, Value) or not isinstance(v.type, TensorType):
        return None
    whole = Placement.whole(plan.mesh, v.shape)
    return whole.with_split(0, rows.get(size_key(v.shape[0]), ())) if v.ndim else whole


def _held(model: nn.Module, forward: Forward) -> list[Tensor]:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return [*(params[name] for name in forward.weights), *(buffers[name] for name in forward.buffers)]


class ShardedGraph(Compilation):
    """One rank's programs of a model's call."""

    kinds = ("sharded inference", "sharded training")

    def __init__(
        self,
        name: str,
        forward: Forward,
        partition: Partition,
        needs: Sequence[bool],
        options: Options,
        grad: bool,
    ) -> None:
        self.forward, self.partition = forward, partition
        trace = forward.trace.with_(outputs=forward.outputs)
        count, spec = forward.results, forward.traced.out_spec
        captured = Captured(trace, spec, forward.traced.mode, count, requires_grad=tuple(needs))
        super().__init__(name, captured, _never, options)

    def key(self) -> None:
        """Not kept on disk."""
        return None

    def derivative(self, wanted: Wanted, again: bool) -> Derivative:
        raise DoubleBackwardError("expected gradients that are not differentiated again: on a mesh they cannot be yet")

    def through(self, captured: Captured, edits: Edits) -> tuple[Executable, Account]:
        whole = self.forward.trace
        outputs = [v for v in whole.outputs[: self.forward.results] if isinstance(v, Value)]
        once = {v: i for i, v in reversed(list(enumerate(outputs)))}
        places = [self.partition.outputs[i] for i in sorted(once.values())]
        placed = self.partition.outputs[self.forward.results :]
        trace = whole.with_(outputs=(*sorted(once, key=once.__getitem__), *whole.outputs[self.forward.results :]))
        partition = self.partition.with_outputs([*places, *placed], len(places))
        run = ShardedRun(self.name, captured, trace, partition, self.options, self.grad, edits)
        run.go()
        run.account.programs = run.programs()
        return self.made(run.account.programs, run.ends(), captured), run.account


class _Program:
    """A compiled call with the tensors it runs on."""

    def __init__(
        self, model: nn.Module, sharding: Sharding, forward: Forward, compilation: ShardedGraph, whole: bool
    ) -> None:
        self.model, self.sharding, self.forward, self.compilation = model, sharding, forward, compilation
        self.whole = whole  # DTensors come, and are given

    def __call__(self, batch: list[Tensor]) -> object:
        held = _held(self.model, self.forward)
        count = len(self.forward.weights)
        parts = _Parts.apply(self.sharding, *held[:count])
        if self.whole:
            return self.with_dtensors(parts, held[count:], batch)
        return self.forward.pack(self.compilation.executable.call(*parts, *held[count:], *batch))

    def with_dtensors(self, parts: Sequence[Tensor], buffers: list[Tensor], batch: list[Tensor]) -> object:
        places = [i for i, x in enumerate(batch) if isinstance(x, DTensor)]
        local = dict(zip(places, _Parts.apply(self.sharding, *(batch[i] for i in places)), strict=True))
        batch = [local.get(i, x) for i, x in enumerate(batch)]
        results = self.compilation.executable.call(*parts, *buffers, *batch)
        mesh, places = self.sharding.device_mesh, self.compilation.partition.outputs
        pairs = zip(results, places, strict=False)
        return self.forward.pack([x if p is None else as_dtensor(x, p, mesh) for x, p in pairs])


class _Parts(torch.autograd.Function):
    """This rank's parts of weights; their gradients are DTensors again."""

    @staticmethod
    def forward(ctx, sharding: Sharding, *weights: DTensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.sharding = sharding
        ctx.placements = [placement_of(w, sharding.mesh) for w in weights]
        ctx.set_materialize_grads(False)
        return tuple(local_of(w).detach() for w in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple:  # noqa: ANN001
        mesh = ctx.sharding.device_mesh
        pairs = zip(grads, ctx.placements, strict=True)
        return None, *(None if g is None else as_dtensor(g, placement, mesh) for g, placement in pairs)


def _never(*_: object) -> object:
    raise InputError("a program on a mesh runs on plain tensors without forward-mode tangents, that share no memory")
