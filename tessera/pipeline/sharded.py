"""Programs of one rank of a mesh: the pipelines, and one captured program on its way through them.

In: a program over whole values, already cleaned, and where its values lie. Out: one rank's programs. It is
differentiated first and partitioned then; what stands behind `shard` is a program like any other, so gathered weights
are kept for backward or gathered again as anything else is: `remat` decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from tessera.frontends.captured import Captured
from tessera.ir.dist import exchange_of
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.memory.bucket import bucket
from tessera.passes.memory.overlap import overlap
from tessera.passes.patterns.async_tp import async_tp
from tessera.pipeline import parts
from tessera.pipeline.account import Account
from tessera.pipeline.lists import PIPELINES, SPLIT, claiming, last
from tessera.pipeline.lists import finishing as finishing_alone
from tessera.pipeline.options import Options
from tessera.pipeline.run import Edits, Run
from tessera.pipeline.stage import BACKWARD, FORWARD, JOINT, PROGRAM, Hook, Row, Stage
from tessera.transforms.shard.joint import Partition, shard_joint, shard_program
from tessera.util.errors import EditError


def _program(trace: Trace, run: ShardedRun) -> Trace:
    sharded = shard_program(trace, run.partition)
    run.account.gathered = sharded.notes
    return sharded.trace


def _joint(trace: Trace, run: ShardedRun) -> Trace:
    joint = parts.in_order_of_use(trace, run.account.joint)
    run.account.joint, run.account.gathered = shard_joint(joint, run.partition)
    return run.account.joint.trace


def _async_tp(trace: Trace, run: Run) -> Trace:
    trace, said = async_tp(trace, asynchronous(run))
    run.account.in_pieces += said
    return trace


def asynchronous(run: Run) -> list[str]:
    """The axes whose exchanges are cut into pieces."""
    return [axis for axis, way in run.ways.items() if way == "async-tp"]


def in_pieces(over: str) -> Stage:
    return Stage(
        "async_tp", _async_tp, "it is decided what is gathered again; before regions are chosen", over,
        needs=("run",), when=lambda run, _: bool(asynchronous(run)),
    )  # fmt: skip


def cleaned_after(over: str) -> list[Row]:
    return [
        Hook("decompose", "one rank's program is a program like any other", over),
        Stage("canonicalise", last, "what decomposition left", over),
        Stage("fold", fold, "cotangents that are numbers", over),
        Stage("cse", cse, "what several equations gathered", over),
    ]


def finishing(over: str) -> list[Row]:
    """As elsewhere, with small exchanges joined, and all begun early and waited for late."""
    rows = finishing_alone(over)
    rows[1:1] = [
        Stage("bucket", bucket, "in the final order, which tells which exchanges stand together", over),
        Stage("overlap", overlap, "after bucket: what is joined begins once; before anything is written over", over),
    ]
    return rows


DIFFERENTIATED: list[Row] = [
    Stage(
        "vjp", parts.differentiate, "on whole values: gradients are those of the whole batch",
        gives=JOINT, needs=("run",), quiet=True,
    ),
    Stage("canonicalise", last, "detach and its like go", JOINT),
    Stage("cse", cse, "what forward and backward both compute is partitioned once", JOINT),
    Stage("shard", _joint, "everything that has a place is there", JOINT, needs=("run",)),
    *cleaned_after(JOINT),
]  # fmt: skip

PIPELINES["sharded training"] = [
    *DIFFERENTIATED, *SPLIT,
    in_pieces(FORWARD), *claiming(FORWARD), *finishing(FORWARD),
    in_pieces(BACKWARD), *claiming(BACKWARD), *finishing(BACKWARD),
]  # fmt: skip
PARTITIONED: list[Row] = [
    Stage("shard", _program, "the program is clean", needs=("run",)),
    *cleaned_after(PROGRAM),
    Stage("dce", dce, "what nobody reads"),
]
PIPELINES["sharded inference"] = [*PARTITIONED, in_pieces(PROGRAM), *claiming(PROGRAM), *finishing(PROGRAM)]


def told(account: Account, edits: Edits) -> list[str]:
    """What must be the same on all ranks, line by line: the programs as they were partitioned, those that a person
    edited, and the order in which the final ones exchange."""
    lines = [line.strip() for trace in same(account, edits) for line in str(trace).splitlines()]
    exchanges = [eqn for program in account.programs for eqn in program.trace.equations if exchange_of(eqn) is not None]
    return lines + [f"{eqn.inputs()[0]}: {exchange_of(eqn)} at {eqn.source}" for eqn in exchanges]


def same(account: Account, edits: Edits) -> list[Trace]:
    """Programs that are the same on all ranks; what a person wrote is the first to differ."""
    return [*edits.values(), *(trace for title, trace in account.stages if title.split()[-1] == "shard")]


def digest(account: Account, edits: Edits) -> str:
    """A text of one length that differs where programs do: made of the same as `told`, and sooner."""
    final = [eqn for program in account.programs for eqn in program.trace.equations if exchange_of(eqn)]
    return digest_of(same(account, edits), map(_short, final))


def digest_of(traces: Sequence[Trace], more: Iterable[str]) -> str:
    """Whichever files they were read from."""
    texts = [f"{v.name} {v.type}" for trace in traces for v in trace.inputs]
    texts += [_short(eqn) for trace in traces for eqn in trace.equations]
    return hashlib.sha256("\n".join((*texts, *more)).encode()).hexdigest()


def _short(eqn: Equation) -> str:
    given = map_values((eqn.args, eqn.kwargs), lambda v: v.name) if eqn.args else ""
    return f"{eqn.op} {given} {[v.name for v in eqn.results()]}"


def partition_data(trace: Trace, partition: Partition) -> dict[str, object]:
    """Where the values of a program lie, as data: whatever of it decides what is compiled."""

    def lies(places: Mapping[Value, Placement]) -> list[list[str]]:
        return [[v.name, str(place)] for v, place in places.items()]

    known = set(trace.values())
    return {
        "mesh": partition.mesh.axes,
        "inputs": lies({v: place for v, place in partition.inputs.items() if v in known}),
        "outputs": [str(place) for place in partition.outputs],
        "watched": [str(v) for v in trace.outputs[partition.results :]],
        "grads": lies(partition.grads),
        "homes": lies(partition.homes),
        "weights": [v.name for v in partition.weights],
        "settings": [dict(partition.stays), partition.wide, dict(partition.ways)],
    }


class ShardedRun(Run):
    """`trace` has more outputs than `captured`: those that are only placed."""

    kinds = ("sharded inference", "sharded training")
    linked = False

    def __init__(
        self,
        name: str,
        captured: Captured,
        trace: Trace,
        partition: Partition,
        options: Options,
        grad: bool,
        edits: Edits,
    ) -> None:
        self.trace, self.partition, self.ways = trace, partition, partition.ways
        super().__init__(name, captured, options, grad, (), edits)

    def begin(self, grad: bool) -> None:
        captured = self.keep("captured", self.captured.trace)
        if "captured" in self.edits:
            if len(captured.outputs) != len(self.trace.outputs):
                raise EditError(
                    "captured: expected an edit of forward or backward, where a plan places results by name"
                )
            self.trace = captured
        wanted = zip(self.trace.inputs, self.captured.requires_grad, strict=True)
        self.wrt = [v for v, want in wanted if want and v.is_differentiable] if grad else []
        self.plain_kind = self.kinds[0]
        self.kind = self.kinds[bool(self.wrt)]
        self.traces[PROGRAM] = self.account.core = self.trace

    def pull(self, core: Trace) -> list[Value] | None:
        """What is only placed has no cotangent."""
        return [v for v in core.outputs[: self.partition.results] if isinstance(v, Value)]
