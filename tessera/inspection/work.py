"""What an equation of a final program must move and compute, and how long the machine needs for that at best.

Bytes are those that must cross memory if every tensor is read or written once: an expanded tensor counts what it holds,
a gather what it takes, a view nothing. A region is one kernel: only what enters and leaves it counts. The profiler's
rates are measured ones (`machines/measure.py`), so a fraction of the roofline is a fraction of what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tessera.ir.equation import Equation, Special, Value
from tessera.ir.layouts import can_view
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ir.views import MAY_COPY
from tessera.machines import Machine
from tessera.ops.op import flops as declared_flops
from tessera.ops.op import rules
from tessera.passes.patterns.align import ALIGNED, DEVICES, DTYPES
from tessera.torch_internals.operators import op_name
from tessera.util.names import names

MATRIX = ("matmul", "attention", "conv", "experts")  # families that run on matrix units
GATHERS = names("embedding index _unsafe_index gather index_select take masked_select")
OVERWRITES = names("copy_ fill_ zero_")  # do not read what they write over


@dataclass(frozen=True)
class Work:
    """Of one equation."""

    bytes: float = 0.0
    flops: float = 0.0  # outside the matrix units
    matrix_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.matrix_flops + other.matrix_flops)

    def seconds(self, machine: Machine) -> tuple[float, float]:
        """At best, for moving and for computing."""
        computing = self.flops / machine.flops + self.matrix_flops / machine.matrix_flops
        return self.bytes / machine.bandwidth, computing


def work(eqn: Equation) -> Work:
    """What a perfect implementation of this equation moves and computes."""
    if isinstance(eqn.op, Special) and eqn.op.body is not None:
        return _region(eqn.op.body)
    plain = _plain(eqn)
    if is_view(plain):
        return Work()
    declaration = rules(plain.op)
    flops = declared_flops(plain)
    if declaration is not None and declaration.family in MATRIX:
        return _matrix(plain, flops, _bytes(plain))
    return Work(_bytes(plain), flops)


def rate(eqn: Equation, machine: Machine) -> float:
    """What matrix units do in an equation for as long as a step takes, where that is known: attention has its own."""
    declaration = rules(_plain(eqn).op)
    figure = "sustained.bfloat16"
    if declaration is not None and declaration.family == "attention":
        figure = "attention.backward" if _name(eqn).endswith("_backward") else "attention.forward"
    return machine.first_of(figure, "matrix.bfloat16", "flops.float32")


def _plain(eqn: Equation) -> Equation:
    """The equation with PyTorch's operator in place of an executor's callable for it."""
    special = isinstance(eqn.op, Special) and eqn.op.of is not None
    return eqn.with_(op=eqn.op.of) if special else eqn  # type: ignore[union-attr]


def _region(body: Trace) -> Work:
    inner = [work(e) for e in body.equations]
    outside = {*body.inputs, *body.outputs}
    moved = sum(touched(v) for v in outside if isinstance(v, Value))
    for eqn in body.equations:  # of a table that is only gathered from, the rows that are taken
        if _name(eqn) in GATHERS and eqn.inputs() and eqn.inputs()[0] in body.inputs:
            table = touched(eqn.inputs()[0])
            moved -= table - min(table, sum(map(touched, eqn.results())))
    return Work(moved, sum(w.flops for w in inner), sum(w.matrix_flops for w in inner))


def _matrix(eqn: Equation, flops: float, moved: float) -> Work:
    """Matrix units take 16-bit numbers at the machine's rate, TF32 at half of it, and f32 not at all on a GPU."""
    t = next((v.tensor for v in eqn.inputs() if isinstance(v.type, TensorType) and v.type.is_float), None)
    if t is None or t.device.type == "cpu" or t.dtype.itemsize <= 2:
        return Work(moved, 0.0, flops)
    if t.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return Work(moved, 0.0, 2 * flops)
    return Work(moved, flops)


def unaligned(eqn: Equation) -> bool:
    """Is it a product of 16-bit numbers in rows that matrix units cannot load? Libraries' kernels for it are slow."""
    if isinstance(eqn.op, Special) and eqn.op.body is not None:
        return any(map(unaligned, eqn.op.body.equations))
    declaration = rules(_plain(eqn).op)
    if declaration is None or declaration.family != "matmul":
        return False
    return any(_odd_rows(v.type) for v in (*eqn.inputs(), *eqn.results()) if isinstance(v.type, TensorType))


def _odd_rows(t: TensorType) -> bool:
    strided = len(t.stride) == len(t.shape)
    if not strided or t.device.type not in DEVICES or t.dtype not in DTYPES:
        return False
    strides = [size_hint(s) for s, n in zip(t.stride, t.shape, strict=True) if size_hint(n) > 1]
    return any(s * t.dtype.itemsize % ALIGNED for s in strides if s > 1)


def main_device(traces: Iterable[Trace]) -> torch.device:
    """Where programs' tensors are: the first GPU that is mentioned, else the CPU."""
    for trace in traces:
        for v in trace.values():
            if isinstance(v.type, TensorType) and v.type.device.type == "cuda":
                return v.type.device
    return torch.device("cpu")


def _bytes(eqn: Equation) -> float:
    read = list(dict.fromkeys(eqn.inputs()))
    written = float(sum(map(touched, eqn.results())))
    name = _name(eqn)
    if name in OVERWRITES:
        read = read[1:]
    if name in GATHERS and read:
        return min(float(touched(read[0])), written) + sum(map(touched, read[1:])) + written
    return sum(map(touched, read)) + written


def touched(v: Value) -> int:
    """Bytes a tensor holds; a dimension it is expanded along counts once."""
    if not isinstance(v.type, TensorType):
        return 0
    if len(v.type.stride) != len(v.type.shape):  # not strided
        return v.type.nbytes()
    count = v.type.dtype.itemsize
    for size, stride in zip(v.type.shape, v.type.stride, strict=True):
        if not (isinstance(stride, int) and stride == 0):
            count *= size_hint(size)
    return count


def is_view(eqn: Equation) -> bool:
    """Does this equation only look at its argument's memory?"""
    declaration = rules(_plain(eqn).op)
    if declaration is None or not declaration.free:
        return False
    if _name(eqn) in MAY_COPY and eqn.inputs() and eqn.results():
        return can_view(eqn.inputs()[0].tensor, eqn.results()[0].tensor)
    return True


def _name(eqn: Equation) -> str:
    op = _plain(eqn).op
    return op.name if isinstance(op, Special) else op_name(op)
