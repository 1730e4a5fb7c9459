"""Regions compiled by TorchInductor.

In: a region of a trace as a trace of its own. Out: what `torch._inductor` makes of the same equations as an
fx graph over ATen, with Inductor's own decompositions. Sizes may be symbolic. Inductor is imported only when
a region is compiled, which happens only if a list of executors names it; the default list does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import torch
from torch.fx import GraphModule

from tessera.executors.base import FusionExecutor, Region, register
from tessera.executors.regions import partition
from tessera.ir import fake
from tessera.ir.equation import Equation
from tessera.ir.interp import run
from tessera.ir.mode import mode_of
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, type_of
from tessera.ir.verify import same_type
from tessera.torch_internals.lookup import missing
from tessera.torch_internals.operators import OpOverload
from tessera.util.errors import OptionError

LEAST = 2  # equations: one alone gains nothing over ATen


def wanted(eqn: Equation) -> bool:
    """ATen operators over strided tensors. Operators with effects never come into a region."""
    if not isinstance(eqn.op, OpOverload) or eqn.op.namespace != "aten" or not eqn.results():
        return False
    return all(
        isinstance(v.type, TensorType) and v.type.layout is torch.strided and v.type.bits == (False, False)
        for v in (*eqn.inputs(), *eqn.results())
    )


def regions(trace: Trace) -> list[Region]:
    return partition(trace, wanted, LEAST)


def compile_region(body: Trace) -> Callable | None:
    """A callable for a region, or None where Inductor would give other strides than its readers expect."""
    if not all(isinstance(v.type, TensorType) for v in body.inputs):
        return None
    compile_fx_inner, decompositions, make_fx = _inductor(body)
    mode = mode_of(body)
    inputs = [fake.fake_of(v.tensor, mode) for v in body.inputs]
    with torch.no_grad():
        graph: GraphModule = make_fx(lambda *xs: run(body, *xs), decomposition_table=decompositions)(*inputs)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results = [node.meta["val"] for node in output.args[0]]
    if not all(same_type(v.type, type_of(x)) for v, x in zip(body.outputs, results, strict=True)):  # type: ignore[union-attr]
        return None
    output.meta["user_visible_output_idxs"] = list(range(len(results)))  # keeps their strides
    code = compile_fx_inner(graph, inputs)

    def call(*args: object) -> tuple:
        return tuple(code(list(args)))

    return call


def _inductor(body: Trace) -> tuple[Callable, dict, Callable]:
    from tessera.torch_internals import inductor  # takes seconds: imported where a region is compiled

    if reason := missing(inductor.compile_fx_inner):
        raise OptionError(f"the inductor executor needs torch._inductor, which does not import here: {reason}")
    on_cpu = any(v.tensor.device.type == "cpu" for v in body.outputs)  # type: ignore[union-attr]
    if on_cpu and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        raise OptionError(
            "the inductor executor compiles C++ for the CPU and found no compiler (c++, g++, clang++); "
            "install one, or leave 'inductor' out of the list of executors"
        )
    return inductor.compile_fx_inner, inductor.select_decomp_table(), inductor.make_fx


register(FusionExecutor("inductor", regions, compile_region))
