"""The program of a training step on one rank of a mesh.

In: a captured loss over whole tensors, where everything lies, an optimizer's plan. Out: a compilation. The loss is
differentiated and partitioned, then split into halves as any training program; clipping and update are a whole program
of their own, partitioned too, that begins where gradients lie. In the end all three are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera.distributed.capture import Forward
from tessera.distributed.once import once
from tessera.distributed.plan import Layout as Lies
from tessera.frontends.captured import Captured
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.ir.placement import Placement
from tessera.ir.serial import Writer
from tessera.ir.trace import Trace
from tessera.optim.updates import Extra, Plan, append_updates
from tessera.pipeline.account import Account, Program
from tessera.pipeline.executable import Ends
from tessera.pipeline.lists import PIPELINES, SPLIT, claiming
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits
from tessera.pipeline.sharded import DIFFERENTIATED, ShardedRun, digest, finishing, in_pieces, partition_data
from tessera.pipeline.stage import BACKWARD, FORWARD, STEP, Stage
from tessera.runtime.call import Layout
from tessera.store.key import Key
from tessera.store.program import Stored, load_note, save_note
from tessera.training.program import (
    StepExecutable,
    StepProgram,
    StepRun,
    plan_data,
    read_extras,
    seeded,
    write_extras,
)
from tessera.transforms.halves import Split
from tessera.transforms.join import joined, relaid
from tessera.transforms.shard.joint import Partition
from tessera.util.errors import CaptureError, Unserial


def _step(forward: Trace, run: ShardedStepRun) -> Trace:
    return run.step(forward)


PIPELINES["sharded step"] = [
    *DIFFERENTIATED, *SPLIT, in_pieces(FORWARD), *claiming(FORWARD), in_pieces(BACKWARD), *claiming(BACKWARD),
    Stage("step", _step, "after claiming: what backward recomputes is not fused into the forward", FORWARD,
          gives=STEP, needs=("run",)),
    *finishing(STEP),
]  # fmt: skip


def loss_place(forward: Forward) -> int:
    """The loss is the result, the first of a tuple, or what a dict calls so."""
    packed = forward.pack(list(range(forward.results)))
    place = packed.get("loss") if isinstance(packed, dict) else packed[0] if isinstance(packed, tuple) else packed
    kind = type(packed).__name__
    if not isinstance(place, int):
        raise CaptureError(f"expected a loss, a tuple that starts with it or a dict with a 'loss', got {kind}")
    loss = forward.outputs[place]
    if not isinstance(loss, Value) or not loss.tensor.is_float or loss.tensor.numel() != 1:
        raise CaptureError(f"expected the loss to be one floating-point number, got {loss}")
    return place


@dataclass(frozen=True)
class Recipe:
    """What a step does: which weights it trains, with which update, from gradients times `scale`."""

    trained: Sequence[str]
    update: Callable[[list[str]], Plan]
    scale: float = 1.0


class ShardedStepRun(ShardedRun):
    """A captured loss on its way to one rank's step."""

    step, programs = StepRun.step, StepRun.programs
    written: tuple[Value, ...]

    def __init__(self, of: ShardedCompilation, captured: Captured, edits: Edits) -> None:
        self.of = of
        super().__init__(of.name, captured, of.forward.trace, of.partition, of.options, True, edits)

    def begin(self, grad: bool) -> None:
        super().begin(grad)
        self.kind = "sharded step"
        if not self.wrt:
            self.without_gradient()

    def pull(self, core: Trace) -> list[Value]:
        loss = core.outputs[loss_place(self.of.forward)]
        assert isinstance(loss, Value)
        return [loss]

    def without_gradient(self) -> None:
        raise CaptureError("the loss depends on no parameter of the optimizer")

    def completed(self, split: Split) -> Split:
        """Weights that the forward writes are saved as it leaves them: the update begins there."""
        pairs = zip(self.joint.wrt, split.backward.outputs, strict=True)
        new = [self.left(v) for v, grad in pairs if isinstance(grad, Value)]
        return split.saving([v for v in new if v not in self.joint.trace.inputs])

    def left(self, weight: Value) -> Value:
        """A weight as the forward leaves it."""
        return self.joint.trace.mutations.get(weight, weight)

    def backward_of(self, split: Split) -> Trace:
        """Backward with clipping and the update at its end."""
        recipe, backward = self.of.recipe, seeded(split.backward, self.joint, self.of.recipe.scale)
        names = dict(zip((v.name for v in self.joint.wrt), self.of.trained_names, strict=True))
        grads = {names[v.name]: g for v, g in zip(self.joint.wrt, split.backward.outputs, strict=True)}
        self.with_grads = [name for name, g in grads.items() if isinstance(g, Value)]
        self.plan = recipe.update(self.with_grads)
        update, extras = self.update(self.plan)
        local = dict(zip(self.of.forward.weights, self.joint.trace.inputs, strict=False))
        rename: dict[Value, Value] = {}
        for v, name in zip(update.inputs, self.with_grads, strict=False):
            rename[v] = grads[name]  # type: ignore[assignment]
        rest = update.inputs[len(self.with_grads) :]
        for v, extra in zip(rest, extras, strict=True):
            if extra.kind == "param":
                rename[v] = self.left(local[self.with_grads[extra.member]])
        self.extras = tuple(e for e in extras if e.kind != "param")
        update = relaid(update, rename)
        target = {self.left(v): v for v in local.values()}
        update = update.with_(mutations={target.get(t, t): v for t, v in update.mutations.items()})
        inputs = tuple(v for v in update.inputs if v not in set(grads.values()))
        return joined(backward.with_(outputs=()), update.with_(inputs=inputs), 0, backward.name)

    def update(self, plan: Plan) -> tuple[Trace, tuple[Extra, ...]]:
        """The update on one rank: it begins with gradients where they lie."""
        lies = self.of.lies
        builder = Builder("update")
        builder.reserve(self.joint.trace.values())
        grads = [builder.input(f"{m.name}_grad", m.type) for m in plan.members]
        whole, extras = append_updates(builder.finish([]), plan, grads)
        pins: dict[Value, Placement] = {v: lies.grads[n] for v, n in zip(grads, self.with_grads, strict=True)}
        kinds = {"param": lies.weights, "state": lies.states, "sum": lies.grads}
        for v, extra in zip(whole.inputs[len(grads) :], extras, strict=True):
            if extra.kind in kinds:
                pins[v] = kinds[extra.kind][self.with_grads[extra.member]]
        self.keep("update", whole)
        sharded = self.partition.of(whole, pins)
        self.keep("update shard", sharded.trace)
        self.account.gathered += sharded.notes
        return sharded.trace, extras

    def ends(self) -> Ends:
        inputs = {v: i for i, v in enumerate(self.traces[STEP].inputs)}
        return Ends(Layout(()), None, tuple(inputs[v] for v in self.written))


class ShardedCompilation(StepProgram):
    """One rank's step."""

    kinds = ("sharded step",)
    with_grads: list[str]
    places: list[int]  # of each output of the loss, its place among what the program gives
    results: int  # how many of those there are; then come gradients
    digest: str  # of the programs: the same on all ranks

    def __init__(
        self, name: str, forward: Forward, partition: Partition, lies: Lies, recipe: Recipe, options: Options
    ) -> None:
        self.forward, self.partition, self.lies, self.recipe = forward, partition, lies, recipe
        self.trained_names = [name for name in forward.weights if name in set(recipe.trained)]
        needs = tuple(name in self.trained_names for name in forward.weights)
        needs += (False,) * (len(forward.trace.inputs) - len(needs))
        trace = forward.trace.with_(outputs=forward.outputs)
        captured = Captured(
            trace, forward.traced.out_spec, forward.traced.mode, forward.results, requires_grad=needs
        )  # fmt: skip
        super().__init__(name, captured, _never, options)

    # --- kept on disk: first which weights have gradients, then, for the update that follows from them, the program ---

    def identity(self) -> dict[str, object]:
        data = partition_data(self.forward.trace, self.partition)
        return {**super().identity(), **data, "trained": self.trained_names, "scale": self.recipe.scale}

    def compile(self, key: Key | None) -> None:
        text = None if key is None else key.text
        once(text, lambda: StepProgram.compile(self, key), lambda: key is not None and self.load(key))

    def load(self, key: Key) -> bool:
        places = load_note(key)
        if places is None:
            return False
        every = list(self.forward.weights)
        self.with_grads = [every[i] for i in places]
        self.plan = plan = self.recipe.update(self.with_grads)
        more = plan_data(plan, [*places])
        if more is None or not super().load(key.with_more(more)):
            return False
        self.recipe = replace(self.recipe, update=lambda _: plan)  # who asks for the stages later wants this one
        return True

    def store(self, key: Key) -> None:
        every = list(self.forward.weights)
        places = [every.index(name) for name in self.with_grads]
        more = plan_data(self.plan, [*places])
        if more is None:
            raise Unserial(f"the optimizer {self.plan.rule.name} is not one of Tessera's own rules")
        super().store(key.with_more(more))
        save_note(key, places)

    def details(self, writer: Writer) -> dict:
        ends = self.executable.ends
        return {
            "extras": write_extras(self.extras, writer),
            "written": ends.written,
            "places": self.places,
            "results": self.results,
            "digest": self.digest,
        }

    def restored(self, programs: list[Program], stored: Stored) -> StepExecutable:
        details = stored.details
        self.places, self.results, self.digest = details["places"], details["results"], details["digest"]
        ends = Ends(Layout(()), None, tuple(details["written"]))
        return StepExecutable(programs, ends, self.options, read_extras(details["extras"], stored.reader))

    def through(self, captured: Captured, edits: Edits) -> tuple[StepExecutable, Account]:
        run = ShardedStepRun(self, captured, edits)
        run.go()
        run.account.programs = run.programs()
        self.plan, self.with_grads = run.plan, run.with_grads
        outputs = run.split.forward.outputs[: self.forward.results]
        self.places, self.results = [run.results.index(v) for v in outputs], len(run.results)
        executable = StepExecutable(run.account.programs, run.ends(), self.options, run.extras)
        self.digest = digest(run.account, edits)
        return executable, run.account

    def outputs(self, out: Sequence[object]) -> list:
        """What the loss gave, of what the program gave."""
        return [out[i] for i in self.places]

    @property
    def extras(self) -> tuple[Extra, ...]:
        return self.executable.extras


def _never(*_: object) -> object:
    raise AssertionError("a step's programs are not called through their compilation")
