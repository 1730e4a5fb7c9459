"""`torch.export` programs become Traces.

In: an ExportedProgram. Out: its Trace, whose inputs are parameters, buffers, constants and then the user's
inputs, all by name, with the sizes the program was exported for (symbolic where exported as dynamic). Buffers
the program writes are mutations of the trace, as they are when eager PyTorch runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tessera.frontends.captured import Captured, capture
from tessera.frontends.dynamo.graphs import run_graph
from tessera.frontends.export_arguments import Arguments
from tessera.ir.builder import Builder
from tessera.ops.op import keep_whole
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError, InputError


@dataclass(frozen=True)
class Exported:
    """A captured program and how the user's arguments and results line up with it."""

    captured: Captured
    held: tuple[torch.Tensor, ...]  # parameters, buffers and constants: the first inputs
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    arguments: Arguments
    named: tuple[str, ...]  # keyword arguments, in the order of the exported program

    def flatten(self, args: tuple, kwargs: dict) -> list[object] | None:
        """The user's arguments as the program takes them; None where only eager PyTorch can."""
        if kwargs.keys() == set(self.named):
            kwargs = {name: kwargs[name] for name in self.named}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise InputError(f"expected arguments of structure {self.in_spec}, got {spec}")
        return self.arguments(leaves)

    def pack(self, outputs: tuple) -> object:
        return pytree.tree_unflatten(list(outputs), self.out_spec)


def capture_export(program: ExportedProgram, name: str = "exported") -> Exported:
    """The trace of an exported program."""
    signature = program.graph_signature
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    specs = signature.input_specs
    order = sorted(range(len(nodes)), key=lambda i: specs[i].kind == InputKind.USER_INPUT)
    held = [_held(program, specs[i]) for i in order if specs[i].kind != InputKind.USER_INPUT]
    fakes = [nodes[i].meta["val"] for i in order]
    mode = next((x.fake_mode for x in fakes if hasattr(x, "fake_mode")), None)
    builder = Builder(name, mode)
    run = run_graph(program.graph_module, builder)
    written = [s.target for s in signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION]
    targets = {specs[i].target: place for place, i in enumerate(order) if specs[i].kind == InputKind.BUFFER}

    def call(*inputs: object) -> object:
        placed = [x for _, x in sorted(zip(order, inputs, strict=True), key=lambda pair: pair[0])]
        outs = list(run(*placed))  # type: ignore[call-overload]
        for target, new in zip(written, outs, strict=False):
            inputs[targets[target]].copy_(new)  # type: ignore[attr-defined]
        return outs[len(written) :]

    names = [(specs[i].target or nodes[i].name).replace(".", "_") for i in order]
    captured = capture(call, fakes, names, keep_whole, builder, locate=False)
    grads = tuple(t.requires_grad for t in held) + (False,) * (len(fakes) - len(held))
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    users = range(len(held), len(fakes))
    inputs = captured.trace.inputs
    mutated = [i - len(held) for i in users if inputs[i] in captured.trace.mutations]
    arguments = Arguments([names[i] for i in users], fakes[len(held) :], program.range_constraints, mutated)
    named = tuple(pytree.tree_unflatten([None] * in_spec.num_leaves, in_spec)[1])
    return Exported(replace(captured, requires_grad=grads), tuple(held), in_spec, out_spec, arguments, named)


def _held(program: ExportedProgram, spec: object) -> torch.Tensor:
    target = spec.target  # type: ignore[attr-defined]
    for store in (program.state_dict, program.constants):
        if target in store:
            return store[target]
    raise CaptureError(f"the exported program needs {target!r}, which it does not carry")
