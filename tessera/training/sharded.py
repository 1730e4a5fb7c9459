"""A training step of a model whose weights lie on a mesh: `train_step(shard(model, mesh, plan), …)`.

Every call gives this rank's part of the batch and gets the loss of the whole one. The loss is captured with the sizes
of the whole batch; a program is made for each kind of batch, and for each thing that a call has to do: add to sums of
gradients, or update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tessera.distributed.agree import Agreement
from tessera.distributed.capture import Forward, capture
from tessera.distributed.dtensors import as_dtensor
from tessera.distributed.once import meet
from tessera.distributed.plan import Layout
from tessera.distributed.python_state import PythonState, casts_written
from tessera.distributed.room import bytes_of, check_room, in_gb
from tessera.distributed.sharding import Sharding
from tessera.distributed.sizes import SYMBOLS_REFUSED, Sizes
from tessera.distributed.users_line import at_users_line
from tessera.distributed.weights import Named, check_owner, local_of, own_part, placement_of, whole_of
from tessera.distributed.whole_batch import with_steady
from tessera.ir.equation import Value
from tessera.ir.placement import Placement
from tessera.ir.types import TensorType
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.just_in_time.compiled import Compiled
from tessera.just_in_time.sharded import batch_key, results_of
from tessera.optim.updates import Member
from tessera.optim.updates import Plan as Update
from tessera.pipeline.sharded import told
from tessera.runtime.autograd import below_autograd
from tessera.torch_internals import pytree
from tessera.torch_internals.distributed import part_of
from tessera.training.needs import check_needs
from tessera.training.optimizer_state import OptimizerState
from tessera.training.run import Settings
from tessera.training.sharded_program import Recipe, ShardedCompilation
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import InputError, OptionError


class ShardedStep:
    """Call it with this rank's part of a batch; it gives the loss of the whole batch, the same on every rank."""

    @at_users_line
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable | None,
        state: OptimizerState,
        settings: Settings,
        sharding: Sharding,
    ) -> None:
        if reason := state.own_step():
            raise OptionError(
                f"train_step on a mesh: expected an optimizer that Tessera has equations for; {reason}. In place of "
                "the step call tessera.jit(model), .backward() and the optimizer, which may be any that steps DTensors"
            )
        check_owner(state.optimizer)
        if not any(p in state.groups() for p in model.parameters()):
            raise InputError(
                f"train_step: expected an optimizer of {type(model).__name__}'s parameters, got one that owns none"
            )
        self.model, self.loss_fn, self.state, self.settings = model, loss_fn, state, settings
        self.sharding = sharding
        self.params, self.buffers = Named(model, "_parameters"), Named(model, "_buffers")
        self.python, self.why = PythonState(model, loss_fn), ""
        self.captures: dict[tuple, tuple[Forward, Layout]] = {}
        self.programs: dict[tuple, _Program] = {}
        self.sizes: Sizes[_Program] = Sizes()
        self.agreement = Agreement(sharding)
        self.backend = Backend(settings.options, True, type(model).__name__, ())
        self.__tessera__ = Compiled(self.__call__, self.backend, self.__call__, _again)

    def __call__(self, /, *batch: object, **named: object) -> object:
        leaves, _ = pytree.tree_flatten((batch, named))
        settings = self.settings
        waiting = tuple(n for n, p in self.params().items() if p.grad is not None) if settings.calls else ()
        what = *self.python.asked(), *map(batch_key, leaves)
        program = self.programs.get((settings.updates, waiting, *what))
        if program is None:
            program = self._for_sizes(what, waiting, batch, named, leaves)
            self.programs[settings.updates, waiting, *what] = program
        if not self.agreement.knows(program.compilation, what):
            self._agree(program.compilation, what, leaves)
        with casts_written():
            out = program.run([x for x in leaves if isinstance(x, torch.Tensor)])
        settings.done()
        return out

    @at_users_line
    def _for_sizes(self, what: tuple, waiting: tuple[str, ...], batch: tuple, named: dict, leaves: list) -> _Program:
        """A program that serves other sizes too, where sizes have changed; otherwise one for these."""
        shared = self.settings.updates, waiting, self.python.key
        kind = *shared, *(batch_key(x, sizes=False) for x in leaves)
        if (program := self.sizes.known(kind, leaves)) is not None:
            return program
        given, reason = self.sizes.symbolic_arguments(kind, leaves), ""
        if given is not None:
            try:
                shown = given.like(batch, named)
                forward, lies = self._captured((kind, len(self.programs)), shown[0], shown[1], given.leaves)
                program = self._prepare(forward, lies, waiting)
            except SYMBOLS_REFUSED as error:
                reason = self.sizes.give_up(kind, error)
            else:
                self.sizes.keep(kind, given.fits(), program)
        if program is None:
            forward, lies = self._captured(what, batch, named, leaves)
            program = self._prepare(forward, lies, waiting)
            self.backend.graphs[-1].recompile_reason, self.why = reason or self.why, ""
        meet()
        return program

    def _agree(self, compilation: ShardedCompilation, sizes: tuple, leaves: list) -> None:
        self._check_room(compilation)
        lines = partial(told, compilation.account, compilation.edits)
        self.agreement(compilation, sizes, leaves, lines, self.state.told())

    @at_users_line
    def _check_room(self, compilation: ShardedCompilation) -> None:
        if compilation.executable not in self.agreement.known:
            check_needs(compilation, self.device)

    @property
    def device(self) -> torch.device:
        return torch.device(self.sharding.device_mesh.device_type)

    def _captured(self, what: tuple, batch: tuple, named: dict, leaves: list) -> tuple[Forward, Layout]:
        if what not in self.captures:
            sharding, model = self.sharding, self.model
            whole = sharding.whole_batch(leaves)
            watched = sharding.watched(model)

            def again(types: Mapping[int, TensorType]) -> Forward:
                return capture(model, self.loss_fn, batch, named, types, watched, regions=sharding.regions)

            forward = with_steady(model, again(whole), whole, again)
            self.captures[what] = forward, sharding.settle(model, forward, leaves)
            self.why = self.python.settle()
        return self.captures[what]

    def _prepare(self, forward: Forward, lies: Layout, waiting: tuple[str, ...]) -> _Program:
        model, settings, owned = self.model, self.settings, self.state.groups()
        trained = [name for name, p in model.named_parameters() if p.requires_grad and p in owned]
        if settings.updates:
            self._make_state(trained, lies)
        name = f"{type(model).__name__}_{len(self.programs)}_{'step' if settings.updates else 'accumulate'}"
        recipe = Recipe(trained, lambda names: self._update(names, forward.weights, waiting), 1.0 / settings.accumulate)
        partition = self._partition(forward, lies)
        compilation = ShardedCompilation(name, forward, partition, lies, recipe, settings.options)
        self.backend.graphs.append(GraphRecord(name, "", compilation))
        return _Program(self, forward, compilation)

    def _partition(self, forward: Forward, lies: Layout) -> Partition:
        sharding, mesh = self.sharding, self.sharding.plan.inner
        inputs = {**lies.inputs, **lies.results, **{v: lies.weights[name] for name, v in forward.weights.items()}}
        placed = [*results_of(forward, lies), *sharding.placed(self.model, forward)]
        outputs = [None if p is None else replace(p, mesh=mesh) for p in placed]
        grads = {v: lies.grads[name] for name, v in forward.weights.items()}
        weights = forward.weights.values()
        return Partition(
            mesh,
            inputs,
            outputs,
            forward.results,
            grads,
            weights,
            lies.plan.stays,
            sharding.wide,
            lies.homes,
            lies.plan.ways,
        )

    def _make_state(self, trained: list[str], lies: Layout, own: Collection[str] | None = None) -> None:
        """The optimizer's state where the plan has it, before its first step makes it elsewhere. Of weights that are
        not this rank's `own` it has sizes and no memory."""
        params, groups = dict(self.model.named_parameters()), self.state.groups()
        forms = self.state.forms()
        self._check_held(params, trained, lies, own)
        for name in trained:
            p, placement, absent = params[name], lies.states[name], own is not None and name not in own
            state = self.state.optimizer.state[p]
            for slot in self.state.rule.state(forms[groups[p]]):
                held = state.get(slot)
                there = isinstance(held, DTensor) and local_of(held).is_meta == absent
                if there and placement_of(held, placement.mesh) == placement:  # type: ignore[arg-type]
                    continue
                if held is None or absent:
                    shape, device = [int(n) for n in placement.local_shape], local_of(p).device
                    part = torch.zeros(shape, dtype=p.dtype, device="meta" if absent else device)
                else:  # it was loaded, and lies elsewhere
                    part = own_part(whole_of(held), placement, self.sharding.device_mesh)
                placed = as_dtensor(part, placement, self.sharding.device_mesh)
                if held is None:
                    self.state.give(p, slot, placed)
                else:
                    state[slot] = placed

    def _check_held(
        self, params: dict[str, nn.Parameter], trained: list[str], lies: Layout, own: Collection[str] | None
    ) -> None:
        """Weights and state fit, before the state is made."""
        groups, forms = self.state.groups(), self.state.forms()
        held = bytes_of((p, lies.weights[name]) for name, p in params.items() if not local_of(p).is_meta)
        state = 0
        for name in trained if own is None else own:
            p = params[name]
            state += len(self.state.rule.state(forms[groups[p]])) * bytes_of([(p, lies.states[name])])
        check_room(held + state, f"{in_gb(held)} of weights, and {in_gb(state)} of the optimizer's state", self.device)

    def _update(
        self, names: list[str], values: dict[str, Value], waiting: tuple[str, ...], updates: bool | None = None
    ) -> Update:
        params, groups = dict(self.model.named_parameters()), self.state.groups()
        updates = self.settings.updates if updates is None else updates
        chosen = [params[name] for name in names]
        places, forms = [groups[p] for p in chosen], self.state.forms()
        ages = self.state.ages(chosen, places) if updates else [0] * len(chosen)
        families, of = self.state.families(places, ages, forms)
        members = []
        for name, g, family in zip(names, places, of, strict=True):
            type_ = values[name].tensor
            state = tuple(type_ for _ in self.state.rule.state(forms[g])) if updates else ()
            total = type_ if name in waiting else None
            members.append(Member(name.replace(".", "_"), type_, family, None, state, total))
        clips = tuple(self.settings.clips) if updates else ()
        keeps = self.settings.keep_grads and updates
        return Update(self.state.rule, tuple(members), families, clips, updates, keeps)

    def as_grad(self, grad: torch.Tensor, placement: Placement) -> DTensor:
        return as_dtensor(grad, placement, self.sharding.device_mesh)


class _Program:
    """A compiled step with the tensors it runs on."""

    def __init__(self, step: ShardedStep, forward: Forward, compilation: ShardedCompilation) -> None:
        self.step, self.forward, self.compilation = step, forward, compilation

    def run(self, batch: list[torch.Tensor]) -> object:
        step, compilation = self.step, self.compilation
        params, buffers = step.params(), step.buffers()
        owned, plan = step.state.groups(), compilation.plan
        chosen = [params[name] for name in compilation.with_grads]
        numbers: list[float] = []
        if plan.updates:
            ages = step.state.ages(chosen, [owned[p] for p in chosen])
            numbers = step.state.numbers(plan, ages, [*step.settings.clips.values()])
        held = [params[name] for name in self.forward.weights] + [buffers[name] for name in self.forward.buffers]
        more = [step.state.tensor(extra, chosen, numbers) for extra in compilation.extras]
        tensors = [*map(part_of, (*held, *batch, *more))]
        with below_autograd():
            out = compilation.executable.call(*tensors)
        torch.autograd.graph.increment_version([tensors[i] for i in compilation.executable.ends.written])
        self._hand_grads(chosen, out[compilation.results :])
        if plan.updates:
            step.state.advance(chosen)
        return self.forward.pack(compilation.outputs(out))

    def _hand_grads(self, chosen: list[nn.Parameter], grads: tuple) -> None:
        """Sums wait in `.grad`, split as the plan splits gradients; after an update they go, unless they are kept."""
        step, compilation, plan = self.step, self.compilation, self.compilation.plan
        if plan.updates:
            step.state.drop_grads()
        new = [
            (p, name)
            for p, name, m in zip(chosen, compilation.with_grads, plan.members, strict=True)
            if (plan.keeps if plan.updates else m.total is None)
        ]
        for (p, name), grad in zip(new, grads, strict=True):
            p.grad = step.as_grad(grad, compilation.lies.grads[name])


def _again(*_: object) -> Callable:
    raise OptionError("a training step is not compiled again; call tessera.train_step")
