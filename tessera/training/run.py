"""Runs the programs of a training step on the caller's tensors and the optimizer's own.

A `Graph` belongs to one graph that Dynamo captured. It is called with that graph's inputs, finds out which are
parameters of the optimizer, compiles a program for what this call has to do (add to the sums of gradients, or
update), and hands it the optimizer's tensors. `Updater` does the same for gradients that autograd left in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from tessera.frontends.captured import Captured
from tessera.ir.types import TensorType, type_of
from tessera.optim.updates import Member, Plan
from tessera.pipeline.options import Options
from tessera.runtime.autograd import below_autograd
from tessera.runtime.call import overlaps
from tessera.training.optimizer_state import OptimizerState
from tessera.training.program import StepCompilation, StepProgram, UpdateCompilation, without_mark
from tessera.util.errors import CaptureError, InputError, OptionError


class StepFailure(CaptureError):
    """Compiling the step failed inside of Tessera; the cause is the error's own cause."""


class Settings:
    """What the caller of train_step asked for."""

    def __init__(
        self,
        options: Options,
        clips: dict[str, float],
        accumulate: int,
        keep_grads: bool,
        names: dict[torch.Tensor, str],
    ) -> None:
        self.options, self.accumulate, self.keep_grads = options, accumulate, keep_grads
        self.clips = clips  # how gradients are clipped, in order, and to what: `Plan.clips`
        self.names = names
        self.calls = 0  # since the last update

    @property
    def updates(self) -> bool:
        """The call that runs now ends with an update."""
        return self.calls + 1 >= self.accumulate

    def done(self) -> None:
        self.calls = 0 if self.updates else self.calls + 1


def make_plan(
    state: OptimizerState,
    settings: Settings,
    params: Sequence[torch.Tensor],
    ages: Sequence[int],
    updates: bool,
    waiting: Collection[torch.Tensor] = (),
) -> Plan:
    """`waiting`: the parameters to whose `.grad` this call adds."""
    groups, forms = state.groups(), state.forms()
    places = [groups[p] for p in params]
    families, of = state.families(places, ages, forms)
    members = []
    for i, (p, g, family) in enumerate(zip(params, places, of, strict=True)):
        names = state.rule.state(forms[g]) if updates else ()
        tensors = tuple(_type(state.optimizer.state[p][name]) for name in names)
        total = _type(p.grad) if p in waiting else None
        members.append(Member(settings.names.get(p, f"param_{i}"), _type(p), family, None, tensors, total))
    clips = tuple(settings.clips) if updates else ()
    return Plan(state.rule, tuple(members), families, clips, updates, settings.keep_grads and updates)


def _type(x: torch.Tensor | None) -> TensorType:
    tensor_type = type_of(x)
    assert isinstance(tensor_type, TensorType)
    return tensor_type


class Prepared:
    """A compiled program with the parameters it updates."""

    def __init__(self, compilation: StepProgram, params: list[torch.Tensor], state: OptimizerState) -> None:
        self.compilation, self.params, self.state = compilation, params, state
        groups = state.groups()
        self.groups = [groups[p] for p in params]
        self.where: list[int] = []  # addresses at the last call
        self.memory: dict[int, int] = {}  # written input -> its storage

    def ages(self) -> list[int]:
        plan = self.compilation.plan
        return self.state.ages(self.params, self.groups) if plan.updates else [0] * len(self.params)

    def fits(self, ages: list[int]) -> bool:
        """Members of one family still are of one age."""
        plan = self.compilation.plan
        known: dict[int, int] = {}
        return all(known.setdefault(m.family, a) == a for m, a in zip(plan.members, ages, strict=True))

    def tensors(self, ages: list[int], settings: Settings) -> list[torch.Tensor]:
        plan = self.compilation.plan
        numbers = self.state.numbers(plan, ages, [*settings.clips.values()]) if plan.updates else []
        return [self.state.tensor(extra, self.params, numbers) for extra in self.compilation.executable.extras]

    def run(self, tensors: Sequence[object]) -> tuple:
        """The program on these tensors, which it writes in place."""
        written = self.compilation.executable.ends.written
        self._check_memory(tensors, written)
        with below_autograd():
            out = self.compilation.executable.call(*tensors)
        torch.autograd.graph.increment_version([tensors[i] for i in written])  # type: ignore[misc]
        return out

    def _check_memory(self, tensors: Sequence[object], written: tuple[int, ...]) -> None:
        """What is written shares memory with nothing else. Only what moved since the last call is looked at."""
        where = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in tensors]
        moved = [i for i, (a, b) in enumerate(zip(where, self.where, strict=False)) if a != b]
        if len(where) == len(self.where) and not any(
            i in self.memory or tensors[i].untyped_storage().data_ptr() in self.memory.values()  # type: ignore[attr-defined]
            for i in moved
        ):
            self.where = where
            return
        if overlaps(tuple(tensors), written):
            raise CaptureError("parameters, optimizer state or inputs share memory with each other")
        self.where = where
        self.memory = {i: tensors[i].untyped_storage().data_ptr() for i in written}  # type: ignore[attr-defined]

    def keep(self, grads: Sequence[torch.Tensor]) -> None:
        if self.compilation.plan.keeps:
            for p, grad in zip(self.params, grads_of(self.params, grads), strict=True):
                p.grad = grad


def grads_of(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a program gave as gradients, as autograd would leave them in `.grad`: each in memory of its own (one may be
    a view, or two parameters' at once), laid out as its parameter is."""
    seen: set[int] = set()
    owned = []
    for p, x in zip(params, grads, strict=True):
        if x.layout != torch.strided:
            owned.append(x)
            continue
        storage = x.untyped_storage()
        whole = storage.nbytes() == x.numel() * x.element_size() and storage.data_ptr() not in seen
        owned.append(x if whole and _laid_out_alike(x, p) else torch.empty_like(p, dtype=x.dtype).copy_(x))
        seen.add(storage.data_ptr())
    return owned


def _laid_out_alike(x: torch.Tensor, p: torch.Tensor) -> bool:
    if x.stride() == p.stride():
        return True
    longer = (i for i, n in enumerate(p.shape) if n != 1)
    return all(x.stride(i) == p.stride(i) for i in longer)


class Graph:
    def __init__(
        self, name: str, captured: Captured, state: OptimizerState, settings: Settings, note: Callable
    ) -> None:
        self.name, self.state, self.settings, self.note = name, state, settings, note
        self.captured, self.loss = without_mark(captured)
        self.prepared: dict[tuple, Prepared] = {}
        self.tensor_inputs = [i for i, v in enumerate(self.captured.trace.inputs) if isinstance(v.type, TensorType)]

    def __call__(self, *args: object) -> object:
        state, settings = self.state, self.settings
        groups = state.groups()
        wrt = tuple(i for i in self.tensor_inputs if self.captured.requires_grad[i] and args[i] in groups)
        waiting = [p for p in groups if p.grad is not None] if settings.calls else []
        sums = tuple((id(p), groups[p], type_of(p.grad)) for p in waiting)
        key = settings.updates, state.forms(), tuple((id(args[i]), groups[args[i]]) for i in wrt), sums
        prepared = self.prepared.get(key)
        ages = prepared.ages() if prepared is not None else []
        if prepared is None or not prepared.fits(ages):
            prepared = self.prepared[key] = self._prepare(args, list(wrt), waiting)
            ages = prepared.ages()
        return self._run(prepared, ages, args)

    def _prepare(self, args: tuple, wrt: list[int], waiting: list[torch.Tensor]) -> Prepared:
        updates = self.settings.updates
        chosen: list[torch.Tensor] = []

        def plan(positions: list[int]) -> tuple[Plan, list[int | None]]:
            """Parameters with a gradient here, then those that only an earlier call gave one."""
            here = {args[i]: i for i in positions}
            chosen[:] = [*here, *(p for p in waiting if p not in here and updates)]
            groups = self.state.groups()
            ages = self.state.ages(chosen, [groups[p] for p in chosen]) if updates else [0] * len(chosen)
            planned = make_plan(self.state, self.settings, chosen, ages, updates, set(waiting))
            return planned, [here.get(p) for p in chosen]

        name = f"{self.name}_step" if updates else f"{self.name}_accumulate"
        scale = 1.0 / self.settings.accumulate
        try:
            compilation = StepCompilation(name, self.captured, self.loss, self.settings.options, wrt, plan, scale)
        except (CaptureError, InputError, OptionError):
            raise
        except Exception as error:  # a fault of ours: nothing has run yet, so the step may still run in parts
            raise StepFailure(f"{type(error).__name__}: {error}".split("\n")[0]) from error
        self.note(compilation)
        return Prepared(compilation, chosen, self.state)

    def _run(self, prepared: Prepared, ages: list[int], args: tuple) -> object:
        compilation, state = prepared.compilation, self.state
        assert isinstance(compilation, StepCompilation)
        out = prepared.run([*args, *prepared.tensors(ages, self.settings)])
        more = out[compilation.results :]
        if compilation.plan.updates or not self.settings.calls:
            state.drop_grads()
        if not compilation.plan.updates:
            new = [p for p, m in zip(prepared.params, compilation.plan.members, strict=True) if m.total is None]
            for p, grad in zip(new, grads_of(new, more), strict=True):
                p.grad = grad
        else:
            state.advance(prepared.params)
            prepared.keep(more)
        return compilation.hand_out(out, args)


class Updater:
    """The optimizer's step on gradients that are in `.grad`, as one program."""

    def __init__(self, state: OptimizerState, settings: Settings, note: Callable) -> None:
        self.state, self.settings, self.note = state, settings, note
        self.prepared: dict[tuple, Prepared] = {}

    def __call__(self) -> None:
        state = self.state
        places = state.groups()
        params = [p for p in places if p.grad is not None]
        grads = [p.grad for p in params]
        key = state.forms(), *((id(p), places[p], type_of(g)) for p, g in zip(params, grads, strict=True))
        prepared = self.prepared.get(key)
        ages = prepared.ages() if prepared is not None else []
        if prepared is None or not prepared.fits(ages):
            ages = state.ages(params, [places[p] for p in params])
            plan = make_plan(state, self.settings, params, ages, updates=True)
            types = [_type(g) for g in grads if g is not None]
            compilation = UpdateCompilation(f"update_{len(self.prepared)}", plan, types, self.settings.options)
            self.note(compilation)
            prepared = self.prepared[key] = Prepared(compilation, params, state)
        out = prepared.run([*grads, *prepared.tensors(ages, self.settings)])
        state.advance(params)
        prepared.keep(out)
