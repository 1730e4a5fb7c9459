"""A training run on all ranks of a mesh, with or without a pipeline, in one process.

The front door is called with rank 0's part of every batch, in a group that does not exist, so that it makes the
programs that these calls ask for; what it computes is nobody's. Each program is then run on all ranks together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod

import torch
from pipe_steps import Held, Ranks
from steps import OPTIMIZERS, Trained, pretended, program_of
from torch import Tensor, nn

import tessera
from tessera.distributed import in_step
from tessera.distributed.plan import DATA
from tessera.ir.verify import verify
from tessera.transforms.pipelined.named_schedules import WORDS as SCHEDULES


class Programs(dict):
    """A step's programs; `last` is the one that was called last."""

    def get(self, key: object, default: object = None) -> object:
        self.last = super().get(key, default)
        return self.last

    def __setitem__(self, key: object, program: object) -> None:
        self.last = program
        super().__setitem__(key, program)


def train_mesh(
    model: nn.Module, loss_fn: Callable, batches: list, axes: dict, plan: dict, optimizer: str = "adam",
    clip: float | None = None, **options: object,
) -> Trained:  # fmt: skip
    pretender, piped = copy.deepcopy(model), any(word in SCHEDULES for word in plan.values())
    if piped:
        options.setdefault("microbatches", 2)
    losses = []
    with pretended(axes) as mesh:
        by = OPTIMIZERS[optimizer](pretender.parameters())
        step = tessera.train_step(
            pretender, loss_fn, by, clip_norm=clip, executors="aten", mesh=mesh, plan=plan, **options
        )  # fmt: skip
        step.programs = Programs()
        ranks = Piped(model, step) if piped else InStep(model, step)
        parts = prod(axes[axis] for axis in step.sharding.plan.axes(*DATA))
        for batch in batches:
            updates = step.settings.updates
            step(*(x.chunk(parts)[0] for x in batch))
            losses.append(ranks.loss(step.programs.last.compilation, batch, updates))
        return Trained(losses, ranks.whole())


class Piped:
    def __init__(self, model: nn.Module, step: object) -> None:
        self.model, self.step = model, step
        self.held: Held | None = None
        self.ranks: dict[int, Ranks] = {}

    def loss(self, compilation: object, batch: list[Tensor], updates: bool) -> Tensor:
        if id(compilation) not in self.ranks:
            self.ranks[id(compilation)] = Ranks(self.model, self.step, compilation, self.held)
        self.last = self.ranks[id(compilation)]
        self.held = self.last.held
        return self.last.loss(batch, updates)

    def whole(self) -> dict[str, Tensor]:
        return self.last.whole()


class InStep:
    def __init__(self, model: nn.Module, step: object) -> None:
        self.step, self.age, self.verified = step, 0, None
        self.start = {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
        self.held: dict[str, tuple] = {}  # of weights, buffers, state and sums of gradients: parts, and where they lie

    def loss(self, compilation: object, batch: list[Tensor], updates: bool) -> Tensor:
        trace, forward, plan = program_of(compilation), compilation.forward, compilation.plan
        if compilation is not self.verified:
            verify(trace)
            self.verified = compilation
        ages = [self.age + 1 if self.step.state.rule.ages == "step" else self.age] * len(plan.members)
        numbers = self.step.state.numbers(plan, ages, [*self.step.settings.clips.values()]) if updates else []
        dtypes = [extra.dtype for extra in compilation.extras if extra.kind == "numbers"]
        rest = iter([*batch, *(torch.tensor(numbers, dtype=dtype) for dtype in dtypes)])
        names = [*forward.weights, *forward.buffers, *(None for _ in forward.batch)]
        names += [self.name(extra, compilation.with_grads) for extra in compilation.extras]
        pairs = [(n, v.type.placement) for n, v in zip(names, trace.inputs, strict=True)]
        args = [in_step.cut(next(rest), place) if n is None else self.parts(n, place) for n, place in pairs]
        outputs = in_step.run(trace, args)
        self.age += updates
        if updates:
            self.held = {n: x for n, x in self.held.items() if not n.endswith(".grad")}
        else:
            new = [n for n, m in zip(compilation.with_grads, plan.members, strict=True) if m.total is None]
            sums = zip(outputs[compilation.results :], trace.outputs[compilation.results :], strict=True)
            self.held |= {f"{n}.grad": (x, v.type.placement) for n, (x, v) in zip(new, sums, strict=True)}
        return in_step.join(outputs[0], trace.outputs[0].type.placement)

    def name(self, extra: object, with_grads: list[str]) -> str | None:
        suffixes = {"state": extra.name, "sum": "grad"}
        return f"{with_grads[extra.member]}.{suffixes[extra.kind]}" if extra.kind in suffixes else None

    def parts(self, name: str, place: object) -> list[Tensor]:
        if name not in self.held:
            whole = self.start.get(name)
            if whole is None:
                whole = torch.zeros_like(self.start[name.rpartition(".")[0]])
            self.held[name] = in_step.cut(whole, place), place
        assert self.held[name][1] == place
        return self.held[name][0]

    def whole(self) -> dict[str, Tensor]:
        rest = {name: x for name, x in self.start.items() if name not in self.held}
        return rest | {name: in_step.join(*held) for name, held in self.held.items()}


def assert_equal(mine: Trained, want: Trained, tolerance: float = 1e-11, little: float = 1e-14) -> None:
    """Losses, weights, buffers and state."""
    assert mine.held.keys() == want.held.keys()
    pairs = [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]
    for got, x in pairs:
        wide = torch.complex128 if x.is_complex() else torch.float64
        got, x = got.to(wide), x.to(wide)
        assert (got - x).norm() <= tolerance * x.norm() + little
