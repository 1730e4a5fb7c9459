"""A training step on a mesh: `train_step(model, loss_fn, optimizer, mesh=…, plan=…)`.

At the first call the loss is captured with the sizes of the whole batch, the plan says where weights lie, and the
model's parameters become DTensors. Every call gives this rank's part of the batch and gets the loss of the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera.distributed.communicator import bind
from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.plan import DATA, Layout, Plan, lay_out
from tessera.distributed.weights import distribute, follow, local_of, whole_type
from tessera.ir.equation import Value
from tessera.ir.types import TensorType, contiguous_strides
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.just_in_time.compiled import Compiled
from tessera.optim.updates import Member
from tessera.optim.updates import Plan as Update
from tessera.runtime.autograd import below_autograd
from tessera.torch_internals import pytree
from tessera.training.optimizer_state import OptimizerState
from tessera.training.run import Settings
from tessera.training.sharded_program import Forward, ShardedCompilation, capture_loss
from tessera.util.errors import InputError, OptionError


class ShardedStep:
    """Call it with this rank's part of a batch; it gives the loss of the whole batch, the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable | None,
        state: OptimizerState,
        settings: Settings,
        device_mesh: DeviceMesh,
        plan: str | Mapping[str, str],
    ) -> None:
        if reason := state.own_step():
            raise OptionError(f"train_step on a mesh: expected an optimizer that Tessera has equations for; {reason}")
        if settings.accumulate != 1 or settings.keep_grads:
            raise OptionError("train_step on a mesh: accumulate and keep_grads are not there yet")
        self.model, self.loss_fn, self.state, self.settings = model, loss_fn, state, settings
        self.device_mesh, self.mesh = device_mesh, bind(device_mesh)
        self.plan = Plan.of(plan, self.mesh)
        self.programs: dict[tuple, _Program] = {}
        self.backend = Backend(settings.options, True, type(model).__name__, ())
        self.__tessera__ = Compiled(self.__call__, self.backend, self.__call__, _again)

    def __call__(self, *batch: object, **named: object) -> object:
        leaves, _ = pytree.tree_flatten((batch, named))
        key = tuple((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
        program = self.programs.get((self.model.training, *key))
        if program is None:
            program = self.programs[self.model.training, *key] = self._prepare(batch, named, leaves)
        return program.run([x for x in leaves if isinstance(x, torch.Tensor)])

    def _prepare(self, batch: tuple, named: dict, leaves: list) -> _Program:
        model = self.model
        weights = dict(model.named_parameters())
        types = {name: whole_type(x) for name, x in (*weights.items(), *model.named_buffers())}
        forward = capture_loss(model, self.loss_fn, types, batch, named, self._whole_batch(leaves))
        lies = lay_out(self.plan, forward.trace, forward.weights, forward.batch)
        follow(self.state.optimizer, distribute(model, lies.weights, self.device_mesh))
        owned = self.state.groups()
        trained = [name for name, p in model.named_parameters() if p.requires_grad and p in owned]
        if not trained:
            raise InputError("train_step: the optimizer owns no parameter of the model; was it made before shard?")
        self._make_state(trained, lies)
        name = f"{type(model).__name__}_{len(self.programs)}_step"
        compilation = ShardedCompilation(name, forward, lies, trained, self._update, self.settings.options)
        self.backend.graphs.append(GraphRecord(name, "", compilation))
        return _Program(self, forward, compilation)

    def _whole_batch(self, leaves: list) -> dict[int, TensorType]:
        """The types of the whole batch, of which this rank has a part."""
        ranks = 1
        for axis in self.plan.axes(*DATA):
            ranks *= self.mesh.size(axis)
        types = {}
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                shape = (x.shape[0] * ranks, *x.shape[1:]) if x.ndim else ()
                types[i] = TensorType(x.dtype, shape, contiguous_strides(shape), x.device)
        return types

    def _make_state(self, trained: list[str], lies: Layout) -> None:
        """The optimizer's state where the plan has it, before its first step makes it elsewhere."""
        params, groups = dict(self.model.named_parameters()), self.state.groups()
        forms = self.state.forms()
        for name in trained:
            p, placement = params[name], lies.states[name]
            state = self.state.optimizer.state[p]
            for slot in self.state.rule.state(forms[groups[p]]):
                if state.get(slot) is None:
                    shape, device = [int(n) for n in placement.local_shape], local_of(p).device
                    part = torch.zeros(shape, dtype=p.dtype, device=device)
                    state[slot] = as_dtensor(part, placement, self.device_mesh)

    def _update(self, names: list[str], values: dict[str, Value]) -> Update:
        params, groups = dict(self.model.named_parameters()), self.state.groups()
        chosen = [params[name] for name in names]
        places, forms = [groups[p] for p in chosen], self.state.forms()
        families, of = self.state.families(places, self.state.ages(chosen, places), forms)
        members = []
        for name, g, family in zip(names, places, of, strict=True):
            slots = self.state.rule.state(forms[g])
            type_ = values[name].tensor
            members.append(Member(name.replace(".", "_"), type_, family, values[name], tuple(type_ for _ in slots)))
        return Update(self.state.rule, tuple(members), families, tuple(self.settings.clips))


class _Program:
    """A compiled step with the tensors it runs on."""

    def __init__(self, step: ShardedStep, forward: Forward, compilation: ShardedCompilation) -> None:
        self.step, self.forward, self.compilation = step, forward, compilation
        self.count = len(forward.trace.outputs)
        self.local = [(v.tensor.shape, v.tensor.dtype) for v in compilation.sharded.trace.inputs]

    def run(self, batch: list[torch.Tensor]) -> object:
        step, compilation = self.step, self.compilation
        params, buffers = dict(step.model.named_parameters()), dict(step.model.named_buffers())
        owned = step.state.groups()
        chosen = [params[name] for name in compilation.with_grads]
        ages = step.state.ages(chosen, [owned[p] for p in chosen])
        numbers = step.state.numbers(compilation.plan, ages, [*step.settings.clips.values()])
        held = [params[name] for name in self.forward.weights] + [buffers[name] for name in self.forward.buffers]
        more = [step.state.tensor(extra, chosen, numbers) for extra in compilation.extras]
        with below_autograd():
            tensors = [*map(local_of, held), *batch, *map(local_of, more)]
            out = compilation.executable.call(*tensors)
        written = [x for i, x in enumerate([*held, *batch, *more]) if i in compilation.executable.ends.written]
        torch.autograd.graph.increment_version([local_of(x) for x in written])
        step.state.advance(chosen)
        return self.forward.traced.pack(out[: self.count])


def _again(*_: object) -> Callable:
    raise OptionError("a training step is not compiled again; call tessera.train_step")


def check_mesh(mesh: object, plan: object) -> None:
    """Both or neither."""
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"mesh: expected what tessera.mesh gives, or a DeviceMesh, got {type(mesh).__name__}")
    if plan is None:
        raise OptionError("plan: expected one beside a mesh, such as 'zero3' or {'dp': 'zero3', 'tp': 'tensor'}")
