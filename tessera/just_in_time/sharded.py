"""`jit` of a model whose weights lie on a mesh.

Every call gives this rank's part of a batch and gets this rank's part of the result: rows, where the result has the
batch's rows, and all of it otherwise. The program is captured with whole sizes, differentiated and partitioned. What
`.backward()` brings is the gradient of the sum of all ranks' losses; a result that is the same on all ranks counts
once. A weight's gradient lies as the weight does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.distributed.agree import Agreement
from tessera.distributed.caches import Caches, is_cache
from tessera.distributed.caches import lies as lies_in_cache
from tessera.distributed.capture import Forward, capture
from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.object_key import NUMBERS, object_key
from tessera.distributed.once import meet, once
from tessera.distributed.plan import Layout, Plan
from tessera.distributed.python_state import PythonState, casts_written
from tessera.distributed.sharding import Sharding
from tessera.distributed.sizes import SYMBOLS_REFUSED, Sizes, SymbolicArguments
from tessera.distributed.users_line import at_users_line
from tessera.distributed.weights import placement_of
from tessera.distributed.whole_batch import with_steady
from tessera.frontends.captured import Captured
from tessera.ir.equation import Value
from tessera.ir.placement import Axes, Placement
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_key
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.pipeline.account import Account, Program
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.executable import Executable
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits
from tessera.pipeline.sharded import ShardedRun, digest, partition_data, told
from tessera.runtime.double_backward import Derivative, Wanted
from tessera.runtime.linked import Level
from tessera.store.key import Key
from tessera.store.program import Stored
from tessera.torch_internals import pytree
from tessera.torch_internals.distributed import part_of
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import DoubleBackwardError, InputError


class ShardedCall:
    """The call of a sharded model: a program for every kind of batch."""

    lines = staticmethod(told)  # what must be the same on all ranks

    def __init__(
        self, model: nn.Module, sharding: Sharding, options: Options, backend: Backend, dynamic: bool = True
    ) -> None:
        """`dynamic`: sizes that change become symbols."""
        self.model, self.sharding, self.options, self.backend = model, sharding, options, backend
        self.dynamic = dynamic
        self.python = PythonState(model)
        self.programs: dict[tuple, _Program] = {}
        self.sizes: Sizes[_Program] = Sizes()
        self.agreement = Agreement(sharding)

    def __call__(self, /, *batch: object, **named: object) -> object:
        leaves, _ = pytree.tree_flatten((batch, named))
        caches = Caches(leaves)
        if caches.objects:
            return self._with_caches(batch, named, leaves, caches)
        grad = torch.is_grad_enabled()
        key = *self.python.asked(), grad, *(batch_key(x, grad) for x in leaves)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._for_sizes(batch, named, leaves, grad)
        self._agree(program, key, leaves)
        with casts_written():
            return program([x for x in leaves if isinstance(x, Tensor)])

    def _agree(self, program: _Program, sizes: tuple, leaves: list) -> None:
        compilation = program.compilation
        if not self.agreement.knows(compilation, sizes):
            self.agreement(compilation, sizes, leaves, lambda: self.lines(compilation.account, compilation.edits))

    def _for_sizes(self, batch: tuple, named: dict, leaves: list, grad: bool) -> _Program:
        """A program that serves other sizes too, where sizes have changed; otherwise one for these."""
        kind = self.python.key, grad, *(batch_key(x, grad, sizes=False) for x in leaves)
        if (program := self.sizes.known(kind, leaves)) is not None:
            return program
        given, reason = self.sizes.symbolic_arguments(kind, leaves) if self.dynamic else None, ""
        if given is not None:
            try:
                program = self._prepare(*given.like(batch, named), leaves=leaves, grad=grad, given=given)
                self.sizes.keep(kind, given.fits(), program)
                return program
            except SYMBOLS_REFUSED as error:
                reason = self.sizes.give_up(kind, error)
        return self._prepare(batch, named, leaves, grad, reason=reason)

    def _with_caches(self, batch: tuple, named: dict, leaves: list, caches: Caches) -> object:
        """Tensors in caches are arguments too."""
        sharding = self.sharding
        caches.lay_out(sharding.plan, sharding.device_mesh)
        tensors, grad = caches.tensors, torch.is_grad_enabled()
        given = [batch_key(x, grad) for x in (*(x for x in leaves if not is_cache(x)), *tensors)]
        key = *self.python.asked(), grad, *given, caches.key()
        if key not in self.programs:
            self.programs[key] = self._prepare(batch, named, [*leaves, *tensors], grad, caches)
        self._agree(self.programs[key], key, [*leaves, *tensors])
        with casts_written():
            return self.programs[key].with_caches([x for x in leaves if isinstance(x, Tensor)], caches)

    @at_users_line
    def _prepare(
        self,
        batch: tuple,
        named: dict,
        leaves: list,
        grad: bool,
        caches: Caches | None = None,
        given: SymbolicArguments | None = None,
        reason: str = "",
    ) -> _Program:
        """`leaves` are the arguments, and `given` what stands for them; `reason` says why this is compiled again."""
        sharding, model = self.sharding, self.model
        shown = leaves if given is None else given.leaves
        types, watched = sharding.whole_batch(shown), sharding.watched(model)

        def captured(types: Mapping[int, TensorType]) -> Forward:
            return capture(model, None, batch, named, types, watched, caches, sharding.regions)

        forward = captured(types)
        if caches is None and not any(isinstance(x, DTensor) for x in leaves):
            forward = with_steady(model, forward, types, captured)
        lies = sharding.settle(model, forward, shown)
        reason = reason or self.python.settle()
        needs = [x.requires_grad for x in (*held_by(model, forward), *(x for x in leaves if isinstance(x, Tensor)))]
        name = f"{type(model).__name__}_{len(self.programs)}"
        whole = caches is None and any(isinstance(x, DTensor) for x in leaves)
        partition = partition_of(sharding, model, forward, lies)
        compilation = ShardedGraph(name, forward, partition, needs, self.options)
        meet()
        self.backend.graphs.append(GraphRecord(name, "", compilation, recompile_reason=reason))
        return _Program(model, sharding, forward, compilation, whole)


def batch_key(x: object, grad: bool = False, sizes: bool = True) -> object:
    """What a program is made for; without `sizes`, what several programs have in common."""
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, NUMBERS) else object_key(x)
    lies = x.placements if isinstance(x, DTensor) else ()
    return tuple(x.shape) if sizes else x.ndim, x.dtype, grad and x.requires_grad, lies


def partition_of(sharding: Sharding, model: nn.Module, forward: Forward, lies: Layout) -> Partition:
    """Where the values of a model's call lie."""
    inputs = {**lies.inputs, **lies.results, **{v: lies.weights[name] for name, v in forward.weights.items()}}
    outputs = results_of(forward, lies)
    if forward.left is not None and forward.left.slots:
        count = len(forward.left.slots)
        outputs[-count:] = [lies_in_cache(lies.plan, v.shape) for v in forward.outputs[-count:]]
    outputs += sharding.placed(model, forward)
    inner = lies.plan.inner
    outputs = [None if place is None else replace(place, mesh=inner) for place in outputs]
    grads = {v: inputs[v] for v in (*forward.weights.values(), *lies.inputs)}
    weights = forward.weights.values()
    return Partition(
        inner, inputs, outputs, forward.results, grads, weights, lies.plan.stays, sharding.wide,
        lies.homes, lies.plan.ways,
    )  # fmt: skip


def results_of(forward: Forward, lies: Layout) -> list[Placement | None]:
    """Where the caller gets results: this rank's rows, or all of it."""
    rows = {size_key(v.shape[0]): placement.splits[0] for v, placement in reversed(lies.inputs.items())}
    return [_result(lies.plan, v, {} if i in forward.steady else rows) for i, v in enumerate(forward.outputs)]


def _result(plan: Plan, v: object, rows: Mapping[object, Axes]) -> Placement | None:
    """A result that has the batch's rows is split as they are; another one is whole."""
    if not isinstance(v, Value) or not isinstance(v.type, TensorType):
        return None
    whole = Placement.whole(plan.mesh, v.shape)
    return whole.with_split(0, rows.get(size_key(v.shape[0]), ())) if v.ndim else whole


def held_by(model: nn.Module, forward: Forward) -> list[Tensor]:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return [*(params[name] for name in forward.weights), *(buffers[name] for name in forward.buffers)]


class ShardedGraph(Compilation):
    """One rank's programs of a model's call."""

    kinds = ("sharded inference", "sharded training")
    shortens = False  # layers are partitioned one after the other
    digest: str  # of the programs: the same on all ranks

    def __init__(
        self,
        name: str,
        forward: Forward,
        partition: Partition,
        needs: Sequence[bool],
        options: Options,
    ) -> None:
        self.forward, self.partition = forward, partition
        trace = forward.trace.with_(outputs=forward.outputs)
        count, spec = forward.results, forward.traced.out_spec
        captured = Captured(trace, spec, forward.traced.mode, count, requires_grad=tuple(needs))
        super().__init__(name, captured, _never, options)

    def identity(self) -> dict[str, object]:
        return {**super().identity(), **partition_data(self.forward.trace, self.partition)}

    def compile(self, key: Key | None) -> None:
        text = None if key is None else key.text
        once(text, lambda: Compilation.compile(self, key), lambda: key is not None and self.load(key))

    def details(self, writer: Writer) -> dict:
        return {**super().details(writer), "digest": self.digest}

    def restored(self, programs: list[Program], stored: Stored) -> Executable:
        self.digest = stored.details["digest"]
        return super().restored(programs, stored)

    def derivative(self, wanted: Wanted, again: bool, level: Level | None) -> Derivative:
        raise DoubleBackwardError("expected gradients that are not differentiated again: on a mesh they cannot be yet")

    def through(self, captured: Captured, edits: Edits) -> tuple[Executable, Account]:
        trace, partition = self.distinct()
        run = ShardedRun(self.name, captured, trace, partition, self.options, self.grad, edits)
        run.go()
        run.account.programs = run.programs()
        executable = self.assemble(run.account.programs, run.ends(), captured)
        self.digest = digest(run.account, edits)
        return executable, run.account

    def distinct(self) -> tuple[Trace, Partition]:
        """The program, and where its values lie, with each of the caller's outputs once."""
        whole, values, every = self.forward.trace, self.forward.distinct, self.partition.outputs
        places, rest = [every[self.forward.outputs.index(v)] for v in values], self.forward.results
        partition = self.partition.with_outputs([*places, *every[rest:]], len(places))
        return whole.with_(outputs=(*values, *whole.outputs[rest:])), partition


class _Program:
    """A compiled call with the tensors it runs on."""

    def __init__(
        self, model: nn.Module, sharding: Sharding, forward: Forward, compilation: ShardedGraph, whole: bool
    ) -> None:
        self.model, self.sharding, self.forward, self.compilation = model, sharding, forward, compilation
        self.whole = whole  # DTensors come, and are given

    def __call__(self, batch: list[Tensor]) -> object:
        held = held_by(self.model, self.forward)
        count = len(self.forward.weights)
        parts = _Parts.apply(self.sharding, *held[:count])
        if self.whole:
            return self.with_dtensors(parts, held[count:], batch)
        return self.forward.pack(self.compilation.executable.call(*parts, *held[count:], *batch))

    def with_caches(self, batch: list[Tensor], caches: Caches) -> object:
        """The call's own result; caches keep what is theirs."""
        held, left = held_by(self.model, self.forward), self.forward.left
        assert left is not None
        results = self.compilation.executable.call(*map(part_of, (*held, *batch, *caches.tensors)))
        out, new = self.forward.pack(results)  # type: ignore[misc]
        places = self.compilation.partition.outputs[self.forward.results - len(new) : self.forward.results]
        caches.take(left, new, places, self.sharding.device_mesh)  # type: ignore[arg-type]
        return caches.back(out)

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
        return tuple(part_of(w).detach() for w in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple:  # noqa: ANN001
        mesh = ctx.sharding.device_mesh
        pairs = zip(grads, ctx.placements, strict=True)
        return None, *(None if g is None else as_dtensor(g, placement, mesh) for g, placement in pairs)


def _never(*_: object) -> object:
    raise InputError("a program on a mesh runs on plain tensors without forward-mode tangents, that share no memory")
