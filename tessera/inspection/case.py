"""A program that fails, by itself: a trace, what it is called with, and how it is compiled.

In: a failed compilation, a compilation that computes something wrong, or any trace. Out: a `Case`, whose `outcome` says
how it fails now: with which exception, or with a wrong result. Inputs are described, not kept: types, seeds, and the
range of whole numbers and of positive ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tessera.frontends.captured import Captured
from tessera.inspection.examples import Range, example_inputs, range_of
from tessera.inspection.graph_check import GraphCheck, copied
from tessera.inspection.step import values_of
from tessera.ir import interp
from tessera.ir.equation import Value
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.pipeline.compilation import Compilation, Failure
from tessera.pipeline.options import Options
from tessera.runtime.plan import core_of
from tessera.torch_internals import pytree
from tessera.util.config import config, override

FINE = ""


@dataclass(frozen=True)
class Case:
    trace: Trace
    wants_grad: frozenset[str]  # inputs, by name, that gradients are taken of
    options: Options
    ranges: dict[str, Range] = field(default_factory=dict)
    drawn: bool = False  # random numbers are PyTorch's own, so that results can be compared

    @staticmethod
    def of(captured: Captured, options: Options, inputs: list[object] | None = None, grad: bool = True) -> Case:
        """Tensors closed over become inputs: a case holds no data."""
        trace = core_of(captured.trace, captured)
        constants = list(trace.constants.items())
        trace = trace.with_(inputs=(*trace.inputs, *(v for v, _ in constants)), constants={})
        wants = zip(captured.trace.inputs, captured.requires_grad, strict=True)
        case = Case(trace, frozenset(v.name for v, wanted in wants if grad and wanted), options)
        values = None if inputs is None else [*inputs, *(t for _, t in constants)]
        return replace(case, ranges=_ranges(trace, values))

    def with_trace(self, trace: Trace) -> Case:
        """The same case of another program; inputs it does not have any more are forgotten."""
        names = {v.name for v in trace.inputs}
        return replace(self, trace=trace, wants_grad=self.wants_grad & names)

    def inputs(self, seed: int = 0) -> list[object]:
        return example_inputs(self.trace, seed, self.ranges)

    def captured(self) -> Captured:
        spec = pytree.tree_structure([None] * len(self.trace.outputs))
        grads = tuple(v.name in self.wants_grad for v in self.trace.inputs)
        return Captured(self.trace, spec, mode_of(self.trace), len(self.trace.outputs), {}, grads)

    def compile(self) -> Compilation:
        def eager(*args: object) -> tuple:
            return tuple(interp.run(self.trace, *args))

        random = "off" if self.drawn else config.fused_random
        # What fails is compiled, whatever is on disk; and none of many attempts is kept there.
        with torch.set_grad_enabled(bool(self.wants_grad)), override(fused_random=random, program_cache=False):
            return Compilation(self.trace.name, self.captured(), eager, self.options)

    def outcome(self) -> str:
        """`raises SomeError`, `wrong`, or nothing where all is well."""
        try:
            check = GraphCheck(self.compile(), self.inputs())
            return FINE if check.results_are_right() and not check.wrong_rules(user=True) else "wrong"
        except Exception as error:
            return f"raises {type(error).__name__}"


def _ranges(trace: Trace, inputs: list[object] | None) -> dict[str, Range]:
    """What must be known of the numbers: of the inputs, and of values that may become inputs."""
    arguments = example_inputs(trace) if inputs is None else [copied(x) for x in inputs]
    values = dict(zip((v.name for v in trace.inputs), arguments, strict=True)) if inputs is not None else {}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            values.update(values_of(trace, arguments)[1])
    except Exception:  # the program itself fails on these: what the inputs show must do
        pass
    tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
    return {name: r for name, x in tensors.items() if (r := range_of(x)) is not None}


def of_failure(failure: Failure) -> Case:
    return Case.of(failure.captured, failure.options)


def of_compilation(compilation: Compilation, inputs: list[object] | None = None) -> Case:
    case = Case.of(compilation.captured, compilation.options, inputs, grad=compilation.account.joint is not None)
    return replace(case, drawn=True)


def is_float(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype.is_floating_point
