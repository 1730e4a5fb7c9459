"""Convolutions over images whose channels lie side by side, and what stands between them.

In: a trace, forward alone or with backward. Out: the same program, where convolutions read and give tensors in the
channels-last layout, and operators that take any layout go on in it: 16-bit convolutions on a GPU, and those of float32
on a CPU where nothing is differentiated. A library convolves so, and would copy every operand before and every result
after. Values that others read, and all results of the program, are copied back into the layout they had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.schema import is_pointwise, is_random
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.torch_internals.operators import OpOverload
from tessera.util.names import names

LEAST = 3  # convolutions: with fewer, copies before and after them are all there is
CONVOLUTIONS = names("convolution conv2d")
# They take any layout and give what they were given; so does whatever goes element by element. Average pools are not
# among them: on an H200 gradients behind one that lay so were wrong.
ANY_LAYOUT = names(
    """
    batch_norm native_batch_norm native_batch_norm_backward _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _native_batch_norm_legit
    max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward
    upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward cat
    """
)
ON_CPU = names("avg_pool2d")
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
    transposed = eqn.opname == "convolution" and eqn.args[6]
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
        on_cpu = eqn.opname in ON_CPU and not self.backward and eqn.inputs()[0].tensor.device.type == "cpu"
        return on_cpu or eqn.opname in ANY_LAYOUT

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
