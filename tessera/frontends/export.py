"""`torch.export` programs become Traces.

In: an ExportedProgram. Out: its Trace, whose inputs are parameters, buffers, constants and then the user's
inputs, all by name, with the sizes the program was exported for (symbolic where exported as dynamic). Buffers
the program writes are mutations of the trace, as they are when eager PyTorch runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec

from tessera.frontends.arguments import (
    Arguments,
    Leaf,
    MislaidError,
    Range,
    SizeLeaf,
    TensorLeaf,
    ValueLeaf,
    symbols_of,
)
from tessera.frontends.captured import Captured, capture
from tessera.frontends.dynamo.graphs import run_graph
from tessera.frontends.size_roots import tell_roots
from tessera.ir.builder import Builder
from tessera.ir.check import with_names
from tessera.ir.equation import Value
from tessera.ir.recurrent import RECURRENT
from tessera.ir.serial_size import formula_of
from tessera.ir.types import TensorType
from tessera.ops.op import keep_whole
from tessera.torch_internals import pytree
from tessera.torch_internals.shapes import given_names
from tessera.util.errors import CaptureError, InputError


@dataclass(frozen=True)
class Exported:
    """A captured program and how the user's arguments and results line up with it."""

    captured: Captured
    held: tuple[torch.Tensor, ...]  # parameters, buffers and constants: the first inputs
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    leaves: list[Leaf]  # what each of the user's arguments has to be
    ranges: Mapping[str, Range]  # of sizes, by their symbols
    size_names: Mapping[str, str]  # what the user called them
    named: tuple[str, ...]  # keyword arguments, in the order of the exported program

    @functools.cached_property
    def arguments(self) -> Arguments:
        return Arguments(self.leaves, self.ranges, self.size_names)

    def flatten(self, args: tuple, kwargs: dict) -> list[object] | None:
        """The user's arguments as the program takes them; None where only eager PyTorch can."""
        if kwargs.keys() == set(self.named):
            kwargs = {name: kwargs[name] for name in self.named}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise InputError(f"expected arguments of structure {self.in_spec}, got {spec}")
        try:
            return self.arguments(leaves)
        except MislaidError:
            return None

    def pack(self, outputs: tuple) -> object:
        return pytree.tree_unflatten(list(outputs), self.out_spec)


# Assertions of what types in a trace tell: they would only keep values alive that kernels need not write.
_TOLD = ("_assert_tensor_metadata",)


def capture_export(program: ExportedProgram, name: str = "exported", whole_layers: bool = False) -> Exported:
    """The trace of an exported program. Recurrent layers are taken apart into their steps, unless how many there are
    is known only at a call, or they are wanted whole."""
    signature = program.graph_signature
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    specs = signature.input_specs
    order = sorted(range(len(nodes)), key=lambda i: specs[i].kind == InputKind.USER_INPUT)
    held = [_held(program, specs[i]) for i in order if specs[i].kind != InputKind.USER_INPUT]
    fakes = [nodes[i].meta["val"] for i in order]
    mode = next((x.fake_mode for x in fakes if hasattr(x, "fake_mode")), None)
    builder = Builder(name, mode)
    run = run_graph(program.graph_module, builder)
    written = _written([specs[i] for i in order], signature.output_specs)

    def call(*inputs: object) -> object:
        tell_roots(inputs)
        placed = [x for _, x in sorted(zip(order, inputs, strict=True), key=lambda pair: pair[0])]
        outs = list(run(*placed))  # type: ignore[call-overload]
        for out, place in written.items():
            inputs[place].copy_(outs[out])  # type: ignore[attr-defined]
        return [x for i, x in enumerate(outs) if i not in written]

    names = [(specs[i].target or nodes[i].name).replace(".", "_") for i in order]
    whole = keep_whole
    if whole_layers or any(map(_steps_unknown, program.graph.nodes)):
        whole = lambda op: keep_whole(op) or op in RECURRENT  # noqa: E731
    try:
        captured = capture(call, fakes, names, whole, builder, locate=False)
    except CaptureError as error:
        place = f": called at {builder.source}" if str(builder.source) else ""
        raise CaptureError(f"{error}{place}") from error
    grads = tuple(t.requires_grad for t in held) + (False,) * (len(fakes) - len(held))
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    sizes = {} if mode is None or mode.shape_env is None else given_names(mode.shape_env)
    leaves = _leaves(captured, fakes, len(held))
    ranges = _ranges(program, symbols_of(leaves))
    named = tuple(pytree.tree_unflatten([None] * in_spec.num_leaves, in_spec)[1])
    equations = (eqn for eqn in captured.trace.equations if eqn.opname not in _TOLD)
    checked = captured.trace.with_(equations=tuple(with_names(eqn, sizes) for eqn in equations))
    captured = replace(captured, trace=checked, requires_grad=grads)
    return Exported(captured, tuple(held), in_spec, out_spec, leaves, ranges, sizes, named)


def _written(inputs: list[InputSpec], outputs: list[OutputSpec]) -> dict[int, int]:
    """Outputs that are what an input becomes, and the places of those inputs: a functional program writes nothing."""
    users = {spec.arg.name: place for place, spec in enumerate(inputs) if spec.kind == InputKind.USER_INPUT}
    held = {spec.target: place for place, spec in enumerate(inputs) if spec.kind != InputKind.USER_INPUT}
    homes = {
        OutputKind.USER_INPUT_MUTATION: users, OutputKind.BUFFER_MUTATION: held, OutputKind.PARAMETER_MUTATION: held,
    }  # fmt: skip
    return {i: homes[spec.kind][spec.target] for i, spec in enumerate(outputs) if spec.kind in homes}  # type: ignore[index]


def _steps_unknown(node: torch.fx.Node) -> bool:
    if node.target not in RECURRENT:
        return False
    x, *_, batch_first = node.args
    return not isinstance(x.meta["val"].shape[1 if batch_first else 0], int)  # type: ignore[union-attr]


def _leaves(captured: Captured, fakes: list, held: int) -> list[Leaf]:
    trace = captured.trace
    # Those that are written, or of which the caller gets views, are taken as they lie or not at all.
    written = {trace.inputs.index(v) for v in trace.mutations}
    written |= {alias.source for alias in captured.aliased.values() if not alias.of_output}

    def leaf(place: int, v: Value) -> Leaf:
        if isinstance(v.type, TensorType):
            t, device = v.type, torch.device(v.type.device.type)
            shape, stride = (tuple(map(formula_of, part)) for part in (t.shape, t.stride))
            return TensorLeaf(v.name, t.dtype, device, shape, stride, place in written, t.layout)
        if isinstance(fakes[place], torch.SymInt):
            return SizeLeaf(v.name, formula_of(fakes[place]))
        return ValueLeaf(v.name, fakes[place])

    return [leaf(place, v) for place, v in enumerate(trace.inputs) if place >= held]


def _ranges(program: ExportedProgram, there: set[str]) -> dict[str, Range]:
    """Of every size that arguments have, the least and the most that was exported. Sizes that are known only when the
    program runs are none of these, nor are those that are computed from others."""
    ranges: dict[str, Range] = {}
    for size, bounds in program.range_constraints.items():
        if str(size) in there:
            low, high = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
            most = None if high is None or high >= 1 << 62 else high
            ranges[str(size)] = (low or 0, most)
    return ranges


def _held(program: ExportedProgram, spec: object) -> torch.Tensor:
    target = spec.target  # type: ignore[attr-defined]
    for store in (program.state_dict, program.constants):
        if target in store:
            return store[target]
    raise CaptureError(f"the exported program needs {target!r}, which it does not carry")
