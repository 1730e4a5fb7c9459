"""The partitioner over a differentiated program: forward and backward of one rank.

In: a `Joint` over whole values, where inputs, results and gradients lie. Out: a `Joint` over one rank's values, which
`remat` splits as any other. A cotangent lies as its result does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera.ir.equation import Value
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.transforms.shard.partition import Note, Sharded, shard
from tessera.transforms.vjp import Joint


@dataclass(frozen=True)
class Partition:
    """Where the values of a captured program lie. Its outputs are the caller's, then others that are only placed."""

    mesh: Mesh
    inputs: Mapping[Value, Placement]
    outputs: Sequence[Placement | None]  # of all outputs; None: where they come to lie
    results: int  # how many outputs are the caller's
    grads: Mapping[Value, Placement] = field(default_factory=dict)  # of the inputs that are differentiated
    weights: Collection[Value] = ()
    stays: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False  # summands of 16 bits are added in float32
    homes: Mapping[Value, Placement] = field(default_factory=dict)  # of inputs that are cut further at once
    ways: Mapping[str, str] = field(default_factory=dict)  # of axes along which operands are exchanged, how

    def with_outputs(self, outputs: Sequence[Placement | None], results: int) -> Partition:
        return replace(self, outputs=outputs, results=results)

    def of(self, trace: Trace, pins: Mapping[Value, Placement]) -> Sharded:
        """One rank's program; `trace` gives what is the caller's at the start."""
        homes = {v: home for v, home in self.homes.items() if v in trace.inputs}
        return shard(trace, self.mesh, pins, self.weights, self.stays, self.wide, homes, self.ways)

    def pins(self, trace: Trace) -> dict[Value, Placement]:
        """What is pinned of a program that has these inputs and outputs."""
        known = set(trace.values())
        pins = {v: placement for v, placement in self.inputs.items() if v in known}
        for v, placement in zip(trace.outputs, self.outputs, strict=False):
            if isinstance(v, Value) and placement is not None and v not in trace.inputs:
                pins[v] = placement
        return pins


def shard_program(trace: Trace, partition: Partition) -> Sharded:
    """A program without gradients."""
    pins = partition.pins(trace)
    return partition.of(trace.with_(outputs=trace.outputs[: partition.results]), pins)


def shard_joint(joint: Joint, partition: Partition) -> tuple[Joint, tuple[Note, ...]]:
    trace = joint.trace
    pins = partition.pins(trace)
    cotangents = trace.inputs[len(trace.inputs) - len(joint.pulled) :]
    for v, ct in zip(joint.pulled, cotangents, strict=True):
        if v in pins:
            pins[ct] = pins[v]
    first = len(trace.outputs) - len(joint.wrt)
    for v, grad in zip(joint.wrt, trace.outputs[first:], strict=True):
        if isinstance(grad, Value) and v in partition.grads:
            pins[grad] = partition.grads[v]
    results = trace.outputs[: partition.results]
    sharded = partition.of(trace.with_(outputs=(*results, *trace.outputs[first:])), pins)
    local = sharded.trace
    inputs = dict(zip(trace.inputs, local.inputs, strict=True))
    place = {v: i for i, v in enumerate(results)}
    target = {v: inputs[t] for t, v in trace.mutations.items()}
    pulled = [local.outputs[place[v]] if v in place else local.mutations[target[v]] for v in joint.pulled]
    wrt, carried = tuple(inputs[v] for v in joint.wrt), tuple(inputs[v] for v in joint.carried)
    return Joint(local, wrt, tuple(pulled), 0, carried), sharded.notes  # type: ignore[arg-type]
