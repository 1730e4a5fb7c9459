"""Convolutions over images whose channels lie side by side, and what stands between them.

In: a trace, forward alone or with backward. Out: the same program, where convolutions read and give tensors in the
channels-last layout, and operators that take any layout go on in it: 16-bit convolutions on a GPU, and those of float32
on a CPU where nothing is differentiated. A library convolves so, and would copy every operand before and every result
after. Values that others read, and all results of the program, are copied back into the layout they had. On a GPU group
norms of wide groups are written out as arithmetic, since PyTorch's take no other layout than their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import is_pointwise, is_random
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ir.verify import same_type
from tessera.ops.average_pool import UNROLLED
from tessera.ops.families import cast, per_dimension
from tessera.passes.decompose import group_norm
from tessera.torch_internals.operators import OpOverload
from tessera.util.names import names

LEAST = 3  # convolutions: with fewer, copies before and after them are all there is
CONVOLUTIONS = names("convolution conv2d conv_transpose2d")
# They take any layout and give what they were given; so does whatever goes element by element.
ANY_LAYOUT = names(
    """
    batch_norm native_batch_norm native_batch_norm_backward _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _native_batch_norm_legit
    max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward
    upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward cat
    """
)
ON_CPU = names("avg_pool2d")
# On a GPU those that kernels hold: on an H200 gradients behind the library's were wrong where images lay so.
AVERAGES = {"avg_pool2d": 1, "avg_pool2d_backward": 2}  # and where their windows' sizes stand
GROUP_NORMS = names("group_norm native_group_norm native_group_norm_backward")
LINE = 128  # bytes that a GPU reads at once: of narrower groups of channels it would throw most away
WITH_KERNELS = ["cuda"]  # devices of what kernels compute in any layout
REDUCTIONS = names("sum mean amax amin var_mean")
FORMAT, BACKWARD = "memory_format", "convolution_backward"


def channels_last(trace: Trace) -> Trace:
    """Lay out images channels last where there are enough convolutions."""
    backward = any(eqn.opname == BACKWARD for eqn in trace.equations)
    count = sum(eqn.opname in CONVOLUTIONS and _gains(eqn, backward) for eqn in trace.equations)
    return trace if count < LEAST else _Layouts(trace, backward).run()


def _is_image(v: Arg) -> bool:
    return isinstance(v, Value) and isinstance(v.type, TensorType) and v.ndim == 4


def _gains(eqn: Equation, backward: bool) -> bool:
    """A convolution of images that its device's library runs faster so."""
    images = [v for v in eqn.inputs() if _is_image(v)]
    if len(images) < 2 or any(v.tensor.is_symbolic for v in images):
        return False
    device, *others = {v.tensor.device.type for v in images}
    return not others and device in GAINS and GAINS[device](eqn, backward)


def _on_matrix_units(eqn: Equation, _: bool) -> bool:
    return all(v.dtype in (torch.bfloat16, torch.float16) for v in eqn.inputs() if _is_image(v))


def _one_group(eqn: Equation) -> bool:
    """Every channel is made of all channels, or each of its own."""
    x, weight = eqn.args[:2]
    assert isinstance(x, Value) and isinstance(weight, Value)
    transposed = eqn.opname == "conv_transpose2d" or (eqn.opname == "convolution" and eqn.args[6])
    return not transposed and weight.shape[1] in (1, x.shape[1])


def _by_onednn(eqn: Equation, backward: bool) -> bool:
    """Measured without gradients alone. Of several groups PyTorch would copy each out."""
    if backward or not torch.backends.mkldnn.is_available():
        return False
    return _one_group(eqn) and all(v.dtype == torch.float32 for v in eqn.inputs() if _is_image(v))


GAINS: dict[str, Callable[[Equation, bool], bool]] = {"cuda": _on_matrix_units, "cpu": _by_onednn}


def _lies_so(t: TensorType) -> bool:
    """Whether channels are side by side; dimensions of one element may lie anyhow."""
    extent = 1
    for d in (1, 3, 2, 0):
        if t.shape[d] != 1 and t.stride[d] != extent:
            return False
        extent *= t.shape[d]  # type: ignore[assignment]
    return True


def _by_kernels(eqn: Equation) -> bool:
    return eqn.inputs()[0].tensor.device.type in WITH_KERNELS


def _wide_groups(x: Value, groups: int) -> bool:
    """Groups of which a row of memory holds all, or as much of them as is read at once."""
    return groups == 1 or size_hint(x.shape[1]) // groups * x.dtype.itemsize >= LINE


class _Layouts:
    def __init__(self, trace: Trace, backward: bool) -> None:
        self.trace, self.rewrite, self.backward = trace, Rewrite(trace), backward
        self.last: dict[Value, Value] = {}  # value -> the same elements, channels last
        self.absent: set[Value] = set()  # of these, those that are not there in their own layout

    def run(self) -> Trace:
        for eqn in self.trace.equations:
            with self.rewrite.at(eqn):
                if not self.turned(eqn):
                    self.own(eqn.inputs())
                    self.rewrite.keep(eqn)
        last = self.trace.equations[-1]
        with self.rewrite.at(last):
            self.own(self.trace.results())
        return self.rewrite.finish()

    def turned(self, eqn: Equation) -> bool:
        """Write the equation over images that lie channels last, if it is one of those."""
        if eqn.opname in CONVOLUTIONS or eqn.opname == BACKWARD:
            if not _gains(eqn, self.backward):
                return False
            convert = self.converted
        elif eqn.opname in GROUP_NORMS:
            return self.normalised(eqn)
        elif self.takes_any(eqn) and self.reads_some(eqn) and not isinstance(eqn.args[0], (list, tuple)):
            convert = self.converted
        elif self.reads_some(eqn) and self.by_element(eqn):
            convert = self.known
        else:
            return False
        others = [v for v in eqn.inputs() if not _is_image(v)]
        self.own(others)
        stands = {v: convert(v) for v in eqn.inputs() if _is_image(v)}
        self.own([v for v, new in stands.items() if v is new])
        read = eqn.substitute({v: new for v, new in stands.items() if v is not new})
        given = self.rewrite.builder.emit(read.op, *read.args, **read.kwargs)
        return self.take(eqn, given if isinstance(given, list) else [given])  # type: ignore[list-item]

    def takes_any(self, eqn: Equation) -> bool:
        if eqn.opname in AVERAGES and _by_kernels(eqn):
            return math.prod(per_dimension(eqn.bound()[0][AVERAGES[eqn.opname]], 2)) <= UNROLLED
        on_cpu = eqn.opname in ON_CPU and not self.backward and eqn.inputs()[0].tensor.device.type == "cpu"
        return on_cpu or eqn.opname in ANY_LAYOUT

    def normalised(self, eqn: Equation) -> bool:
        """Write a group norm, or its gradient, out over images that lie channels last."""
        args = eqn.bound()[0]
        backward, native = eqn.opname.endswith("backward"), eqn.opname.startswith("native")
        x, groups = args[1 if backward else 0], args[8 if backward else 6 if native else 1]
        assert isinstance(x, Value) and isinstance(groups, int)
        if x not in self.last or not _by_kernels(eqn) or not _wide_groups(x, groups):
            return False
        if any(_is_image(v) and not v.tensor.is_row_major for v in eqn.results()):
            return False
        self.own([v for v in eqn.inputs() if not _is_image(v)])
        stands = {v: self.converted(v) for v in eqn.inputs() if _is_image(v)}
        start = len(self.rewrite.equations)
        if backward:
            grad, _, mean, rstd, w = args[:5]
            given = group_norm.gradients(stands[grad], stands[x], mean, rstd, w, groups)  # type: ignore[arg-type,index]
        else:
            w, b = args[1:3] if native else args[2:4]
            given = group_norm.normalised(stands[x], w, b, groups, args[7 if native else 4])  # type: ignore[arg-type]
        self.name(eqn, given, start)
        return True

    def name(self, eqn: Equation, given: Sequence[Value], start: int) -> None:
        """Results that were written out, from equation `start` on, get their dtypes and names; images stand beside."""
        pairs = [(old, cast(new, old.dtype)) for old, new in zip(eqn.outputs, given, strict=False) if old is not None]
        renamed = {new: old for old, new in pairs if same_type(old.type, new.type)}
        other = {old: new for old, new in pairs if new not in renamed}
        equations = self.rewrite.equations
        equations[start:] = [part.renamed(renamed) for part in equations[start:]]
        self.last |= other
        self.absent |= other.keys()

    def reads_some(self, eqn: Equation) -> bool:
        return any(v in self.absent for v in eqn.inputs())

    def by_element(self, eqn: Equation) -> bool:
        if not isinstance(eqn.op, OpOverload) or eqn.kwargs.get(FORMAT, torch.preserve_format) != torch.preserve_format:
            return False
        joins = eqn.opname == "cat" and all(_is_image(v) for v in eqn.inputs())
        copies = eqn.opname in ("clone", "_to_copy")
        plain = is_pointwise(eqn.op) and not is_random(eqn.op)  # which number an element draws depends on its place
        return plain or copies or joins or eqn.opname in REDUCTIONS

    def take(self, eqn: Equation, given: Sequence[Value | None]) -> bool:
        """Results in their own layout keep their names; images in another one stand beside. Where anything else lies
        otherwise than before, the equation is not wanted."""
        equations = self.rewrite.equations
        pairs = [(old, new) for old, new in zip(eqn.outputs, given, strict=True) if old is not None and new is not None]
        other = {old: new for old, new in pairs if old.type != new.type}
        if any(not _is_image(v) or not v.tensor.is_row_major for v in other):
            equations.pop()
            return False
        equations[-1] = equations[-1].renamed({new: old for old, new in pairs if old not in other})
        self.last |= other
        self.absent |= other.keys()
        return True

    def known(self, v: Value) -> Value:
        return self.last.get(v, v)

    def converted(self, v: Value) -> Value:
        if v in self.last or _lies_so(v.tensor):
            return self.last.get(v, v)
        self.last[v] = aten.clone(v, memory_format=torch.channels_last)
        return self.last[v]

    def own(self, values: Sequence[Value]) -> None:
        """Make sure that values are there in their own layout."""
        for v in values:
            if v in self.absent:
                copy = aten.clone(self.last[v], memory_format=torch.contiguous_format)
                equations = self.rewrite.equations
                equations[-1] = equations[-1].renamed({copy: v})
                self.absent.discard(v)
