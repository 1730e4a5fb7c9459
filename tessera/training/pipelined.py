"""A training step over a pipeline of ranks: `train_step` of a model whose plan has a schedule.

Every call cuts this rank's part of the batch into microbatches and runs the schedule on them: gradients are those of
accumulation, one microbatch after the other, and the loss is the mean of theirs, on every rank. A rank has the weights
of its stages alone, and the optimizer's state of those whose gradients it makes; of other weights it keeps names and
sizes, on the meta device. A weight that several stages read is updated by one of them and handed on to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tessera.distributed.alone import warned
from tessera.distributed.capture import Forward, capture
from tessera.distributed.channel import GroupChannel
from tessera.distributed.once import meet
from tessera.distributed.pipelined import Worker, joined
from tessera.distributed.plan import Layout
from tessera.distributed.python_state import casts_written
from tessera.distributed.sharding import Sharding
from tessera.distributed.users_line import at_users_line
from tessera.distributed.whole_batch import over_whole_batch, refuse_steady
from tessera.ir.equation import Value
from tessera.just_in_time.backend import GraphRecord
from tessera.just_in_time.sharded import batch_key
from tessera.pipeline.pipelined import Piped, microbatches, same_lines, with_counts
from tessera.runtime.autograd import below_autograd
from tessera.torch_internals import pytree
from tessera.torch_internals.distributed import part_of
from tessera.training.optimizer_state import OptimizerState
from tessera.training.pipelined_program import PipelinedCompilation
from tessera.training.run import Settings
from tessera.training.sharded import ShardedStep
from tessera.training.sharded_program import Recipe, loss_place
from tessera.transforms.pipelined.places import Held
from tessera.util.errors import OptionError


class PipelinedStep(ShardedStep):
    """Call it with this rank's part of a batch, which all ranks of the pipeline have; it gives the batch's loss."""

    programs: dict[tuple, _Program]  # type: ignore[assignment]

    def __init__(
        self, model: nn.Module, loss_fn: Callable | None, state: OptimizerState, settings: Settings, sharding: Sharding
    ) -> None:
        if settings.options.offload != "none":
            raise OptionError(
                "offload: expected 'none' beside a pipeline, whose stages hold few microbatches, got 'host'"
            )
        super().__init__(model, loss_fn, state, settings, sharding)

    def __call__(self, /, *batch: object, **named: object) -> object:
        leaves, _ = pytree.tree_flatten((batch, named))
        what = *self.python.asked(), *map(batch_key, leaves)
        program = self.programs.get(what)
        if program is None:
            microbatches = self._microbatches(leaves)
            forward, lies = self._captured((microbatches, *what), batch, named, leaves)
            program = self.programs[what] = self._prepare(forward, lies, microbatches)
            meet()
        elif program.compilation.executable is not program.executable:  # it was edited
            program = self.programs[what] = program.again()
        if not self.agreement.knows(program.compilation, what):
            self._agree(program.compilation, what, leaves)
        with casts_written():
            out = program.run([x for x in leaves if isinstance(x, Tensor)])
        self.settings.done()
        return out

    def _agree(self, compilation: PipelinedCompilation, sizes: tuple, leaves: list) -> None:  # type: ignore[override]
        self._check_room(compilation)
        lines = partial(same_lines, compilation.account, compilation.edits)
        self.agreement(compilation, sizes, leaves, lines, self.state.told())

    @at_users_line
    def _microbatches(self, leaves: list) -> int:
        pipe = self.sharding.plan.pipe
        assert pipe is not None
        rows = self.sharding.rows(leaves)
        if len(rows) != 1:
            raise OptionError(f"pipeline: expected tensors of as many rows as the batch has, got {rows}")
        return pipe.in_table(rows[0], self.sharding.microbatches)

    def _captured(self, what: tuple, batch: tuple, named: dict, leaves: list) -> tuple[Forward, Layout]:
        if what not in self.captures:
            sharding, model = self.sharding, self.model

            def captured(microbatches: int) -> Forward:
                types, watched = sharding.whole_batch(leaves, microbatches), sharding.watched(model)
                return capture(model, self.loss_fn, batch, named, types, watched, regions=sharding.regions)

            forward = captured(what[0])
            if what[0] > 1:
                forward = self._over_all(forward, captured(1), what[0])
            self.captures[what] = forward, sharding.settle(model, forward)
            self.python.settle()
        return self.captures[what]

    def _over_all(self, forward: Forward, whole: Forward, microbatches: int) -> Forward:
        """The mean of the microbatches' losses is the loss of the whole batch."""
        refuse_steady(forward, whole, "train_step")
        found = over_whole_batch(forward, whole, microbatches, forward.batch, forward.buffers.values())
        more = found.trace.inputs[len(forward.trace.inputs) :]
        alone = warned(found.seen, "train_step", "the loss", self.sharding.device_mesh)
        batch = (*forward.batch, *more)
        return replace(forward, trace=found.trace, batch=batch, counts=found.counts, alone=alone)

    @at_users_line
    def _prepare(self, forward: Forward, lies: Layout, microbatches: int) -> _Program:  # type: ignore[override]
        model, settings, owned, sharding = self.model, self.settings, self.state.groups(), self.sharding
        pipe = sharding.plan.pipe
        assert pipe is not None
        trained = [name for name, p in model.named_parameters() if p.requires_grad and p in owned]
        rank, homes = sharding.device_mesh.get_local_rank(pipe.axis), sharding.stages

        def settle(held: Mapping[str, Held]) -> None:
            sharding.settle_stages(model, held)
            self._make_state(trained, lies, [name for name in trained if held[name][0] == rank])

        recipe = Recipe(
            trained, lambda names: self._update(names, forward.weights, (), True), 1.0 / settings.accumulate
        )
        piped = Piped(pipe.schedule(microbatches), pipe.axis, rank, pipe.starts, homes, settle)
        name = f"{type(model).__name__}_{len(self.programs)}_step"
        inner = lies.on(sharding.plan.inner)
        compilation = PipelinedCompilation(
            name, forward, self._partition(forward, inner), inner, recipe, piped, settings.options
        )  # fmt: skip
        self.backend.graphs.append(GraphRecord(name, "", compilation))
        return _Program(self, forward, compilation, lies)


class _Program:
    """Compiled programs with the tensors they run on."""

    def __init__(self, step: PipelinedStep, forward: Forward, compilation: PipelinedCompilation, lies: Layout) -> None:
        self.step, self.forward, self.compilation, self.lies = step, forward, compilation, lies
        self.executable = compilation.executable
        pipe, mesh = step.sharding.plan.pipe, step.sharding.device_mesh
        assert pipe is not None
        schedule, pipeline = compilation.piped.schedule, compilation.pipeline
        stages, steps = pipeline.stages, pipeline.rows[compilation.piped.rank]
        self.channel = GroupChannel(mesh, pipe.axis, stages, schedule.home)
        self.worker = Worker(
            stages, steps, compilation.executable.execute, torch.add, self.channel, pipeline.summed, schedule.split
        )  # fmt: skip
        self.loss = compilation.places[loss_place(forward)]
        mutated = {t for program in stages.programs.values() for t in program.mutations}
        homes = {t: part[1] for part, program in stages.programs.items() for t in program.mutations}
        counts = forward.counts.inputs if forward.counts is not None else ()
        self.counted = [n for v in counts for n, buffer in forward.buffers.items() if v is buffer]
        self.written = {n: schedule.home[homes[v]] for n, v in pipeline.buffers.items() if v in mutated}

    def again(self) -> _Program:
        """With the programs that the compilation has now."""
        return _Program(self.step, self.forward, self.compilation, self.lies)

    def run(self, batch: list[Tensor]) -> object:
        step, of = self.step, self.compilation
        params, buffers = step.params(), step.buffers()
        values = of.grads
        held = {v: part_of(params[name]) for name, v in of.pipeline.weights.items()}
        held |= {v: buffers[name] for name, v in of.pipeline.buffers.items()}
        sums = {values[n]: part_of(g) for n in of.own if (g := params[n].grad) is not None}
        with below_autograd():
            count, draws = of.piped.schedule.microbatches, of.executable.draws
            read = [buffers[n] for n in self.counted]
            given = with_counts(of.pipeline.batch, batch, count, of.executable.counts, read)
            batches = microbatches(of.pipeline.batch, given, count, draws, self.channel)
            for _ in self.worker.run(held, batches, sums if step.settings.calls else {}):
                raise AssertionError("a channel between processes waits for what comes")
            results = self.results()
        grads: dict[str, Tensor] = {n: self.worker.sums[values[n]] for n in of.own}  # type: ignore[misc]
        self.worker.clear()
        if step.settings.updates:
            with below_autograd():
                self.update(params, grads)
                self.share(params, buffers)
        else:
            self.hand(params, grads)
        self.channel.finish()
        return self.forward.pack(of.outputs(results))

    # --- what ranks tell each other beside the schedule ---

    def results(self) -> list:
        """What the loss gave: its mean over microbatches, rows one after the other. Every rank gets it."""
        of, given = self.compilation, []
        home, worker = of.pipeline.stages.home, self.worker
        for i, v in enumerate(of.pipeline.outputs):
            if not isinstance(v, Value):
                given.append(v)
                continue
            kind = _kind_of(v, i == self.loss, of.pipeline.batch)
            if v not in home:  # a part of the batch, which everyone has
                given.append(joined([env[v] for env in worker.batches], kind))  # type: ignore[misc]
                continue
            whole = joined([env[v] for env in worker.results], kind) if home[v] in worker.own else None  # type: ignore[misc]
            times = of.piped.schedule.microbatches if kind == "rows" else 1
            given.append(self.channel.everyones(v, whole, home[v], times))
        return given

    def update(self, params: dict[str, nn.Parameter], grads: dict[str, Tensor]) -> None:
        step, of = self.step, self.compilation
        state, owned, plan = step.state, step.state.groups(), of.plan
        chosen = [params[name] for name in of.with_grads]
        ages = dict(zip(of.with_grads, state.ages(chosen, [owned[p] for p in chosen]), strict=True))
        numbers = state.numbers(plan, [ages[name] for name in of.own], [*step.settings.clips.values()])
        norms = self.norms(grads) if plan.norms is not None or "norm" in step.settings.clips else None
        state.drop_grads()
        if of.update is not None:
            own = [params[name] for name in of.own]
            more = [norms if e.kind == "norms" else part_of(state.tensor(e, own, numbers)) for e in of.extras]
            tensors = [*(grads[name] for name in of.own), *more]
            kept = of.update.run(*tensors)
            torch.autograd.graph.increment_version([tensors[i] for i in of.written])
            if plan.keeps:
                self.hand(params, dict(zip(of.own, kept, strict=True)))
        state.advance(chosen)

    def norms(self, grads: dict[str, Tensor]) -> Tensor:
        """The norms of all gradients, in the order of the model."""
        of, device = self.compilation, self.channel.device
        norms = torch.zeros(len(of.with_grads), dtype=of.norm_dtype, device=device)
        if of.norms is not None:
            (own,) = of.norms.run(*(grads[name] for name in of.own))
            norms[[of.with_grads.index(name) for name in of.own]] = own
        self.channel.add_up(norms)
        return norms

    def share(self, params: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        """Weights that several ranks read, and buffers that one of them wrote."""
        for name, (owner, ranks, _) in self.compilation.pipeline.held.items():
            if len(ranks) > 1 and name in self.compilation.with_grads:
                self.channel.hand_on(part_of(params[name]), owner, [r for r in ranks if r != owner])
        for name, home in self.written.items():
            self.channel.share(buffers[name], home)

    def hand(self, params: dict[str, nn.Parameter], grads: dict[str, Tensor]) -> None:
        """Gradients wait in `.grad` of the rank that updates the weight, split as the plan splits them."""
        for name, grad in grads.items():
            params[name].grad = self.step.as_grad(grad, self.lies.grads[name])


def _kind_of(v: Value, loss: bool, batch: tuple[Value, ...]) -> str:
    """What becomes of the results of microbatches: "mean" or "rows"."""
    rows = {int(x.shape[0]) for x in batch if x.ndim}
    if v.ndim and int(v.shape[0]) in rows and not loss:
        return "rows"
    if v.dtype.is_floating_point and v.tensor.numel() == 1:
        return "mean"
    raise OptionError(
        f"train_step: a pipeline cuts the batch into microbatches; expected results that have its rows, or one "
        f"floating-point number, whose mean is taken, got {v.type}"
    )
