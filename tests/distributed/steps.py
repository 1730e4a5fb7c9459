"""Training steps on all ranks of a mesh, in one process, beside eager training on the whole batch.

The front door is used as rank 0 of a group that does not exist; the program that it compiled is every rank's, and is
run by the interpreter that holds them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tessera
from tessera.distributed import in_step
from tessera.distributed.plan import DATA
from tessera.ir.trace import Trace
from tessera.training.sharded_program import ShardedCompilation

# eps is large: the gradient of a bias of keys is rounding alone, which Adam would blow up
OPTIMIZERS: dict[str, Callable] = {
    "adam": lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, eps=1e-3),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1e-1, eps=1e-3),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2, eps=1e-3),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2, eps=1e-3),
}


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    held: dict[str, Tensor]  # weights, buffers and the optimizer's state, by name


def train_whole(
    model: nn.Module, loss_fn: Callable, batches: list, optimizer: str, clip: float | None, accumulate: int = 1
) -> Trained:
    """Eager, on whole batches."""
    model, losses = copy.deepcopy(model), []
    by = OPTIMIZERS[optimizer](model.parameters())
    for number, batch in enumerate(batches, 1):
        loss = loss_fn(model, *batch)
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            by.step()
            by.zero_grad()
    held = {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
    for name, p in model.named_parameters():
        held |= {f"{name}.{slot}": x for slot, x in by.state.get(p, {}).items() if slot != "step"}
    return Trained(losses, held)


@contextmanager
def pretended(axes: dict[str, int], device: str = "cpu") -> Iterator:
    """A mesh whose other ranks do not exist."""
    try:
        yield tessera.mesh(device=device, fake=True, **axes)
    finally:
        dist.destroy_process_group()


def compiled_step(
    model: nn.Module, loss_fn: Callable, batch: list, axes: dict, plan: object, optimizer: str, clip: float | None,
    **options: object,
) -> tuple[tessera.training.sharded.ShardedStep, ShardedCompilation]:  # fmt: skip
    model = copy.deepcopy(model)
    with pretended(axes, next(model.parameters()).device.type) as mesh:
        by = OPTIMIZERS[optimizer](model.parameters())
        step = tessera.train_step(
            model, loss_fn, by, clip_norm=clip, executors="aten", mesh=mesh, plan=plan, **options
        )  # fmt: skip
        parts = prod(axes[axis] for axis in step.sharding.plan.axes(*DATA))
        step(*(x.chunk(parts)[0] for x in batch))
    (program,) = step.programs.values()
    return step, program.compilation


def program_of(compilation: ShardedCompilation) -> Trace:
    (program,) = compilation.account.programs
    return program.trace


def train_ranks(
    model: nn.Module, step: object, compilation: ShardedCompilation, batches: list, exact: bool = True
) -> Trained:
    """All ranks in step, from the same weights; losses are equal on all of them, bit for bit where `exact`."""
    trace, forward, state = program_of(compilation), compilation.forward, step.state
    whole = {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
    names = [*forward.weights, *forward.buffers, *(None for _ in forward.batch)]
    for extra in compilation.extras:
        names.append(None if extra.kind == "numbers" else f"{compilation.with_grads[extra.member]}.{extra.name}")
        if names[-1] is not None:
            whole[names[-1]] = torch.zeros_like(whole[compilation.with_grads[extra.member]])
    places = [v.type.placement for v in trace.inputs]
    held = {n: in_step.cut(whole[n], p) for n, p in zip(names, places, strict=True) if n is not None}
    losses, clips, plan = [], [*step.settings.clips.values()], compilation.plan
    for age, batch in enumerate(batches):
        numbers = torch.tensor(state.numbers(plan, [age + 1] * len(plan.members), clips), dtype=torch.float64)
        numbers = numbers.to(next(model.parameters()).device)
        rest = iter([*batch, *(numbers for e in compilation.extras if e.kind == "numbers")])
        args = [held[n] if n else in_step.cut(next(rest), p) for n, p in zip(names, places, strict=True)]
        outputs = in_step.run(trace, args)
        losses.append(in_step.join(outputs[0], trace.outputs[0].type.placement, exact))
    joined = {n: in_step.join(held[n], p, exact) for n, p in zip(names, places, strict=True) if n is not None}
    return Trained(losses, joined)
