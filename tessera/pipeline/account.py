"""What happened in a compilation: every stage's program, who runs what, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tessera.executors.base import FusionExecutor, in_order
from tessera.executors.claim import Claim
from tessera.ir.equation import Equation, Special, Value
from tessera.ir.trace import Trace
from tessera.passes.patterns.fp8 import Layers
from tessera.transforms.shard.partition import Note
from tessera.transforms.vjp import Joint


@dataclass(frozen=True)
class Program:
    """A program as it is run: the last trace, and the Python function generated from it."""

    name: str  # "forward" and "backward", "step", or "inference"
    trace: Trace
    run: Callable
    boxed: bool = False  # `run` takes one list, which it empties


@dataclass
class Account:
    """Not needed to call what was compiled; of a program from the disk it is made when somebody asks."""

    executors: tuple[str, ...]
    stages: list[tuple[str, Trace]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    to_claim: list[Trace] = field(default_factory=list)  # programs as executors saw them
    programs: list[Program] = field(default_factory=list)
    core: Trace | None = None  # what was differentiated
    joint: Joint | None = None  # as differentiated, before it was cleaned
    kept: tuple[Trace, tuple[Value, ...]] | None = None  # the forward's equations, and what it saves
    results: int = 0  # how many outputs of a forward are the caller's; the others are saved
    saved: tuple[str, ...] = ()
    saved_bytes: int = 0
    offloaded: dict[str, int] = field(default_factory=dict)  # saved tensors that wait on the host, and their bytes
    offload_note: str = ""  # what there is to say of them
    fp8: Layers = field(default_factory=Layers)  # layers that multiply in 8 bits, and those that could not
    pipeline: tuple[str, ...] = ()  # of a pipeline of ranks, its table and its stages in words
    pipeline_axis: str = ""  # whose ranks those are
    gathered: tuple[Note, ...] = ()  # on a mesh: equations that no sharding rule allows to be cut
    in_pieces: tuple[str, ...] = ()  # of products beside exchanges, which were cut into pieces, and why others not

    def run_by(self, programs: list[Program], kept: tuple[Trace, tuple[Value, ...]] | None) -> None:
        """Other programs run in place of those that the stages led to, of which they were not made: layers that were
        copied name another layer's modules. The last stages show them."""
        final: dict[int, Trace] = {}
        for old, new in zip(self.programs, programs, strict=True):
            final[id(old.trace)] = _told_as(old.trace, new.trace)
        self.programs = [replace(new, trace=trace) for new, trace in zip(programs, final.values(), strict=True)]
        self.stages = [(name, final.get(id(trace), trace)) for name, trace in self.stages]
        self.kept = kept

    def fusers(self) -> list[FusionExecutor]:
        return [e for e in in_order(self.executors) if isinstance(e, FusionExecutor)]

    def unfused(self) -> dict[str, list[str]]:
        """Why equations are in no fused region: reason -> names. Computed when asked for."""
        told: dict[str, list[str]] = {}
        for trace in self.to_claim:
            for executor in self.fusers():
                if executor.reasons is not None:
                    for name, reason in executor.reasons(trace).items():
                        told.setdefault(reason, []).append(name)
        return told


def _told_as(told: Trace, trace: Trace) -> Trace:
    """A program whose equations come from where those of its like do."""
    if [eqn.opname for eqn in told.equations] != [eqn.opname for eqn in trace.equations]:
        return trace
    return trace.with_(equations=tuple(map(_from_where, trace.equations, told.equations)))


def _from_where(eqn: Equation, told: Equation) -> Equation:
    op, like = eqn.op, told.op
    if isinstance(op, Special) and isinstance(like, Special) and op.body is not None and like.body is not None:
        op = replace(op, body=_told_as(like.body, op.body))
    return eqn.with_(op=op, source=told.source)
