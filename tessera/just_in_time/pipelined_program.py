"""The programs of a jitted model over a pipeline, with the tensors they run on.

In: this rank's part of a batch. Out: the results of all microbatches, on every rank; and in `.backward()` gradients of
the weights of this rank's stages. A weight that several ranks have gets its gradient on all of them, and so does what
was given. Keys and values in caches are where their layer runs; on other ranks they have sizes and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.distributed.caches import HEADS, Caches, Slot
from tessera.distributed.capture import Forward
from tessera.distributed.channel import GroupChannel, empty_of
from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.pipelined import Worker, joined
from tessera.distributed.sharding import Sharding
from tessera.distributed.weights import placement_of
from tessera.ir.equation import Value
from tessera.just_in_time.sharded import held_by
from tessera.pipeline.pipelined import microbatches
from tessera.runtime.autograd import below_autograd
from tessera.torch_internals.distributed import part_of
from tessera.transforms.pipelined.orders import in_two
from tessera.transforms.pipelined.places import Held
from tessera.util.errors import DoubleBackwardError, InputError, OptionError

if TYPE_CHECKING:
    from tessera.just_in_time.pipelined import PipelinedGraph


class PipelinedProgram:
    def __init__(self, model: nn.Module, sharding: Sharding, forward: Forward, compilation: PipelinedGraph) -> None:
        self.model, self.sharding, self.forward, self.compilation = model, sharding, forward, compilation
        self.executable = compilation.executable
        pipeline, schedule = self.executable.pipeline, compilation.piped.schedule
        self.pipeline, self.stages, self.count = pipeline, pipeline.stages, schedule.microbatches
        self.differentiates = schedule.backward
        self.channel = GroupChannel(sharding.device_mesh, compilation.piped.axis, self.stages, schedule.home)
        steps = pipeline.rows[compilation.piped.rank]
        self.forwards, self.backwards = in_two(steps)
        self.worker = Worker(
            self.stages, steps, self.executable.execute, torch.add, self.channel, pipeline.summed, schedule.split
        )  # fmt: skip
        self.inputs = [*pipeline.weights.values(), *pipeline.buffers.values(), *pipeline.batch]
        self.cached = {pipeline.batch[i] for i in compilation.piped.kept}  # no other rank reads them
        self.written = {t: part[1] for part, program in self.stages.programs.items() for t in program.mutations}
        slots = 0 if forward.left is None else len(forward.left.slots)
        self.kept = forward.outputs[forward.results - slots :]  # results that go into caches
        places = {v: i for i, v in enumerate(forward.trace.inputs)}
        self.given = {v: places[v] for v in forward.distinct if v in places}  # results that are inputs
        self.computed = [v for v in forward.distinct if v not in self.given]
        first = len(self.inputs) - len(pipeline.batch)
        if held := [v.name for v, i in self.given.items() if i < first]:
            raise OptionError(f"pipeline: expected results that the model computes, got its weight {held[0]}")
        for v in self.computed:
            self.kind_of(self.executable.final[v])

    # --- calls ---

    def __call__(self, batch: list[Tensor]) -> object:
        tensors = [*held_by(self.model, self.forward), *batch]
        return self.packed(tensors, _Passes.apply(self, *tensors) if self.differentiates else self.go(tensors)[1])  # type: ignore[arg-type]

    def packed(self, tensors: Sequence[Tensor], computed: Sequence[Tensor]) -> object:
        named = dict(zip(self.computed, computed, strict=True)) | {v: tensors[i] for v, i in self.given.items()}
        return self.forward.pack([named[v] if isinstance(v, Value) else v for v in self.forward.outputs])

    def with_caches(self, batch: list[Tensor], caches: Caches) -> object:
        """The call's own result; each rank keeps the caches of its stages."""
        left, mesh = self.forward.left, self.sharding.mesh
        assert left is not None
        tensors = [*held_by(self.model, self.forward), *batch, *caches.tensors]
        out, new = self.packed(tensors, self.go(tensors)[1])  # type: ignore[misc]
        inner = self.compilation.partition.outputs[self.forward.results - len(new) : self.forward.results]
        caches.take(left, new, [replace(p, mesh=mesh) for p in inner], self.sharding.device_mesh)  # type: ignore[type-var]
        caches.leave([slot for slot, stage in self.stages_of(caches).items() if stage not in self.worker.own])
        return caches.back(out)

    def stages_of(self, caches: Caches) -> dict[Slot, int]:
        """The stages that keys and values in caches are on."""
        assert self.forward.left is not None
        final, batch, home = self.executable.final, self.pipeline.batch, self.stages.home
        pairs = zip(self.forward.left.slots, (final[v] for v in self.kept), strict=True)  # type: ignore[index]
        on = {slot: home[v] for slot, v in pairs if v.ndim == HEADS and v in home}
        for slot, v in zip(caches.slots, batch[len(batch) - len(caches.slots) :], strict=False):
            readers = self.stages.readers.get(v, ()) if v.ndim == HEADS else ()
            if len(readers) > 1:
                raise OptionError(
                    f"pipeline: {v.name} of a cache is read on the stages {readers}, expected one of them: say which "
                    "modules stages begin with, as in ('1f1b', ['layers.4'])"
                )
            on |= dict.fromkeys([slot], *readers) if readers else {}
        return on

    # --- all forwards ---

    def go(self, tensors: Sequence[Tensor]) -> tuple[Worker, list[Tensor]]:
        """Every rank gets the results, but for keys and values that go into caches."""
        if self.compilation.executable is not self.executable:  # it was edited
            self.__init__(self.model, self.sharding, self.forward, self.compilation)
        pipeline, worker = self.pipeline, copy.copy(self.worker)
        local = dict(zip(self.inputs, (part_of(x).detach() for x in tensors), strict=True))
        with below_autograd():
            given = [local[v] for v in pipeline.batch]
            draws = self.executable.draws
            worker.begin(local, microbatches(pipeline.batch, given, self.count, draws, self.channel))
            _through(worker.go(self.forwards))
            results = [self.result(worker, v) for v in self.computed]
            for v, stage in self.written.items():
                if v not in self.cached:
                    self.channel.share(local[v], self.channel.home[stage])
        torch.autograd.graph.increment_version([local[v] for v in self.written if not local[v].is_meta])
        self.channel.finish()
        return worker, results

    def result(self, worker: Worker, captured: Value) -> Tensor:
        v, home = self.executable.final[captured], self.stages.home
        kind = self.kind_of(v)
        if v not in home:  # what was given, which everyone has
            return joined(self.each(worker, v), kind).clone()
        here = home[v] in worker.own
        if captured in self.kept and v.ndim == HEADS:
            return self.each(worker, v)[0] if here else empty_of(v, device="meta")
        whole = joined(self.each(worker, v), kind) if here else None
        return self.channel.everyones(v, whole, home[v], self.count if kind == "rows" else 1)

    def kind_of(self, v: Value) -> str:
        if self.count == 1:
            return "whole"
        if v.ndim and int(v.shape[0]) in {int(x.shape[0]) for x in self.pipeline.batch if x.ndim}:
            return "rows"
        raise OptionError(
            f"jit: a pipeline cuts the batch into {self.count} microbatches; expected results that have its rows, got "
            f"{v.type}; microbatches=1 leaves the batch whole, and train_step takes the mean of a loss"
        )

    # --- all backwards ---

    def back(self, worker: Worker, tensors: Sequence[Tensor | None], cotangents: Sequence[Tensor]) -> list:
        """The gradients of the inputs; `tensors` are weights, of which gradients lie as they do."""
        pipeline = self.pipeline
        for v, x in zip(self.computed, cotangents, strict=True):
            ct = pipeline.cotangents.get(self.executable.final[v])
            if ct is not None:
                parts = x.chunk(self.count) if self.count > 1 else (x,)
                for env, part in zip(worker.batches, parts, strict=True):
                    env[ct] = part  # type: ignore[index]
        with below_autograd():
            _through(worker.go(self.backwards))
            owners = {v: pipeline.held[name] for name, v in pipeline.weights.items()}
            grads = {
                v: self.weight_grad(worker, grad, owners[v]) if v in owners else self.input_grad(worker, v, grad)
                for v, grad in pipeline.grads.items()
            }
        self.channel.finish()
        worker.clear()
        mesh, ours = self.sharding.device_mesh, [grads.get(v) for v in self.inputs]
        return [
            as_dtensor(g, placement_of(x, self.sharding.mesh), mesh) if isinstance(x, DTensor) and g is not None else g
            for g, x in zip(ours, tensors, strict=True)
        ]

    def weight_grad(self, worker: Worker, grad: Value, held: Held) -> Tensor | None:
        """The sum over microbatches, on all ranks that have the weight."""
        here, others = self.channel.here, [rank for rank in held.ranks if rank != held.owner]
        if here not in held.ranks:
            return None
        computed = grad in self.stages.home  # otherwise it is a cotangent, which everyone has
        total = self.total(worker, grad) if here == held.owner or not computed else empty_of(grad)
        if others and computed:
            self.channel.hand_on(total, held.owner, others)
        return total

    def input_grad(self, worker: Worker, v: Value, grad: Value) -> Tensor:
        """On all ranks; rows one after the other, and the sum over microbatches of anything else."""
        home, rows = self.stages.home, v.ndim and v in self.pipeline.batch
        whole = None
        if grad not in home or home[grad] in worker.own:
            whole = joined(self.each(worker, grad), "rows") if rows else self.total(worker, grad)
        if grad not in home:
            assert whole is not None
            return whole
        times = self.count if rows else 1
        return self.channel.everyones(grad, whole, home[grad], times)

    def each(self, worker: Worker, v: Value) -> list[Tensor]:
        return [env[v] for env in (worker.results if v in self.stages.home else worker.batches)]  # type: ignore[misc]

    def total(self, worker: Worker, grad: Value) -> Tensor:
        if grad in worker.sums:
            return worker.sums[grad]  # type: ignore[return-value]
        return torch.stack(self.each(worker, grad)).sum(0)


class _Passes(torch.autograd.Function):
    """Forwards in the call, backwards when gradients are asked for."""

    @staticmethod
    def forward(ctx, program: PipelinedProgram, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.program = program
        ctx.worker, results = program.go(tensors)
        ctx.weights = [x if isinstance(x, DTensor) else None for x in tensors]
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents: Tensor) -> tuple:  # noqa: ANN001
        if torch.is_grad_enabled():
            raise DoubleBackwardError("expected gradients that are not differentiated again: on a mesh they cannot be")
        worker, ctx.worker = ctx.worker, None
        if worker is None:
            raise InputError("expected one backward of a call of a pipeline, got a second: it keeps nothing for it")
        return None, *ctx.program.back(worker, ctx.weights, cotangents)


def _through(steps: Iterator[None]) -> None:
    for _ in steps:
        raise AssertionError("a channel between processes waits for what comes")
