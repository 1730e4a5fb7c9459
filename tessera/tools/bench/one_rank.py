"""`tessera bench distributed --only rank nccl`: one rank's program of a large model, run for real on one device.

In: a device. Out: rows. The rank is the first of a fake group; in place of the group, whose collectives bring whatever
lay in memory, the others are taken to be as it is, so that numbers stay such as training has. What the timeline and the
lifetimes of values foresee, time of work and peak memory, stands beside what is measured. The rates of the device that
a timeline needs are measured first. `nccl` sends every exchange through a group of one.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tessera
from tessera.distributed.channel import GroupChannel
from tessera.distributed.communicator import bind
from tessera.inspection.memory import most_allocated
from tessera.inspection.timeline import Clock
from tessera.ir.builder import Builder, aten
from tessera.ir.dist import Communicator, on
from tessera.ir.equation import Value, values_in
from tessera.ir.trace import Trace
from tessera.machines import Machine, machine_of
from tessera.machines.here import with_figures
from tessera.machines.measure import seconds
from tessera.tools.bench.machine import attention, host, products
from tessera.tools.llama import Llama, LlamaConfig
from tessera.training.needs import Needs, needs
from tessera.training.pipelined import PipelinedStep
from tessera.training.pipelined_program import PipelinedCompilation
from tessera.training.sharded import ShardedStep
from tessera.training.sharded_program import ShardedCompilation
from tessera.transforms.pipelined.orders import Do, Message

LARGE = LlamaConfig(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256)  # 8B
TINY = LlamaConfig(layers=8, width=64, heads=8, kv_heads=8, hidden=128, vocab=512)  # nothing but the way there
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
OFF = 10.0  # per cent, that either may be off
STEPS = 3


@dataclass(frozen=True)
class Case:
    name: str
    axes: dict[str, int]
    plan: Any
    rows: int  # that the rank is given
    microbatches: int | None = None


CASES = [
    Case("zero3 of 64", {"dp": 64}, "zero3", 2),
    Case("tp8", {"tp": 8}, "tensor", 2),
    Case("tp8·pp8, the first stage", {"pp": 8, "tp": 8}, {"pp": "1f1b", "tp": "tensor"}, 8, 8),
]


@dataclass(frozen=True)
class Told:
    """Of a rank's step, what was foreseen and what was seen: seconds of work, and bytes at the peak."""

    seconds: tuple[float, float]
    bytes: tuple[float, float]


# --- ranks that are as this one ---------------------------------------------------------------------


class _Done:
    def wait(self) -> None:
        pass


class Alike:
    """A group whose other ranks hold what this one does; a sum is left as it is, so that numbers stay small."""

    def all_gather(self, out: Tensor, x: Tensor) -> _Done:
        out.view(-1, *x.shape).copy_(x)
        return _Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> _Done:
        out.copy_(x[: out.shape[0]])
        return _Done()

    def all_reduce(self, x: Tensor, how: str) -> _Done:
        return _Done()

    def all_to_all(self, out: Tensor, x: Tensor, take: list[int], give: list[int]) -> _Done:
        out.copy_(x)
        return _Done()


class AlikeChannel(GroupChannel):
    """What comes from other stages is small random numbers, which are there already and come again with each message,
    so that nobody's time is taken to make them; what goes there has gone at once."""

    def __init__(self, device_mesh: DeviceMesh, of: GroupChannel) -> None:
        super().__init__(device_mesh, of.axis, of.stages, of.home)
        self.came: dict[tuple[str, int, int], list[Tensor]] = {}

    def send(self, message: Message, values: Sequence) -> None:
        super().send(message, values)
        self.going = self.going[-1:]

    def expect(self, message: Message) -> None:
        if message.key not in self.came:
            rooms = [self.room(v) for v in self.stages.sends[message.key]]
            self.came[message.key] = [x.normal_(std=1e-3) if x.is_floating_point() else x for x in rooms]
        self.coming[message] = self.came[message.key], []


def _communicator(mesh: Any) -> Any:
    communicator: Communicator | None = on(mesh).communicator
    assert communicator is not None
    return communicator


# --- one rank -----------------------------------------------------------------------------------


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels)


@contextmanager
def rank_of(case: Case, config: LlamaConfig, length: int, device: torch.device) -> Iterator[tuple[ShardedStep, tuple]]:
    """A training step of one rank, compiled, and its batch."""
    before = torch.get_default_dtype()
    mesh = tessera.mesh(device=device.type, fake=True, **case.axes)
    try:
        torch.set_default_dtype(DTYPES[device.type])
        with torch.device("meta"):
            model = Llama(config)
        tessera.shard(model, mesh, case.plan, microbatches=case.microbatches)
        torch.set_default_dtype(before)
        step = tessera.train_step(model, _loss, torch.optim.AdamW(model.parameters(), 1e-5))
        assert isinstance(step, ShardedStep)
        for each in {step.sharding.mesh, step.sharding.plan.inner}:
            _communicator(each).groups = dict.fromkeys(each.names, Alike())
        batch = tuple(torch.randint(config.vocab, (case.rows, length), device=device) for _ in range(2))
        step(*batch)
        if isinstance(step, PipelinedStep):
            for program in step.programs.values():
                alike = AlikeChannel(step.sharding.device_mesh, program.channel)
                program.channel = program.worker.channel = alike
        yield step, batch
    finally:
        torch.set_default_dtype(before)
        dist.destroy_process_group()


def foreseen(of: ShardedCompilation, machine: Machine) -> tuple[float, Needs]:
    """Seconds of work in a step, and of waiting for the host that launches it; and the memory that it needs."""
    clock = Clock(machine)
    for trace in _run_in_turn(of):
        clock.run_all(trace)
    return clock.device, needs(of)


def _run_in_turn(of: ShardedCompilation) -> Iterator[Trace]:
    """The programs of a step, each as often as it runs; of a pipeline also how gradients of microbatches are added."""
    if not isinstance(of, PipelinedCompilation):
        yield from (program.trace for program in of.programs)
        return
    pipeline, there = of.pipeline, set[Value]()
    for step in pipeline.rows[of.piped.rank]:
        if isinstance(step, Do):
            whole = step.action.kind == "B" and not of.piped.schedule.split
            for kind in ("B", "W") if whole else (step.action.kind,):
                part = kind, step.action.stage
                if part in of.executable.parts:
                    yield of.executable.parts[part].trace
                grads = [v for v in values_in(pipeline.stages.programs[part].outputs) if v in pipeline.grads.values()]
                yield _added([v for v in grads if v in there])
                there.update(grads)
    yield from (p.trace for p in (of.norms, of.update) if p is not None)


def _added(values: Sequence[Value]) -> Trace:
    """To each of these another one of its size is added."""
    builder = Builder("sums")
    pairs = [[builder.input(v.name, v.type) for _ in range(2)] for v in values]
    with builder:
        return builder.finish([aten.add(a, b) for a, b in pairs])


def measured(case: Case, config: LlamaConfig, length: int, machine: Machine, device: torch.device) -> Told:
    cuda = device.type == "cuda"
    gc.collect()  # the rank before this one
    if cuda:
        torch.cuda.empty_cache()
    with rank_of(case, config, length, device) as (step, batch):
        (program,) = step.programs.values()
        work, needed = foreseen(program.compilation, machine)
        there = torch.cuda.memory_allocated(device) if cuda else needed.total - needed.added
        most = there + most_allocated(lambda: step(*batch), device)
        taken = seconds(lambda: step(*batch), device, turns=STEPS)
    return Told((work, taken), (needed.total, most))


def rates(device: torch.device, config: LlamaConfig, rows: int, length: int) -> Machine:
    """The device's machine, with the rates of products and attention of such a model measured."""
    known = machine_of(device)
    figures = {"sustained.bfloat16": products(device, DTYPES[device.type], rows * length, config.width, config.hidden)}
    figures |= attention(device, DTYPES[device.type], rows, config.heads, config.kv_heads, length, config.head)
    figures |= dict(host(device, known))
    return with_figures(known, figures, "measured here")


# --- every exchange -------------------------------------------------------------------------------


def exchanges(device: str, backend: str) -> dict[str, bool]:
    """Of every exchange and dtype over a group of one: does what was sent come in?"""
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        try:
            exchange = _communicator(bind(tessera.mesh(device=device, dp=1))).exchange
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = torch.arange(24, device=device).view(4, 6).to(dtype)
                for name, (args, want) in _exchanges(x).items():
                    got = exchange(name.partition(" ")[0], *args)
                    same = got.dtype == dtype and got.device == x.device and torch.equal(got, want)
                    told[f"{name} of {str(dtype).removeprefix('torch.')}"] = same
        finally:
            dist.destroy_process_group()
    return told


def _exchanges(x: Tensor) -> dict[str, tuple[Sequence, Tensor]]:
    """What a group of one is given, and what comes."""
    rows = torch.tensor([3], device=x.device)
    return {
        "all_gather": ((x, 1, "dp"), x),
        "reduce_scatter": ((x.t(), 1, "dp"), x.t()),
        "all_reduce": ((x, "dp"), x),
        "all_reduce max": ((x, "dp", "max"), x),
        "all_to_all": ((x, 0, 1, "dp"), x),
        "permute": ((x.t(), "dp"), x.t()),
        "rows": ((x, rows, rows, "dp", 4), torch.cat([x[:3], torch.zeros_like(x[:1])])),
    }
