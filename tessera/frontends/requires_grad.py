"""Which tensors of a program that is being traced autograd would follow.

Autograd is not at work while a program is recorded, so a result's own flag says nothing. In: the equations so far and
which inputs require gradients. Out: the values that have a gradient history, as eager has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tessera.ir.alias import KEEP_GRAD
from tessera.ir.builder import Builder
from tessera.ir.equation import NO_GRAD, Equation, Value, values_in
from tessera.ir.fake import shows_argument
from tessera.ir.record import recording
from tessera.ir.types import TensorType
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.operators import aten_name
from tessera.util.files import PACKAGE

_FLAG: Any = TensorBase.requires_grad
_INSIDE = (torch.__path__[0], PACKAGE)


def with_history(
    tensors: Iterable[tuple[Value, object]], equations: Sequence[Equation], grad: bool = True
) -> set[Value]:
    """The values that depend on tensors which require gradients; `tensors` are the program's inputs and constants, or
    True in place of an input that does. `grad`: gradients are on around the program."""
    carrying = {v for v, x in tensors if x is True or (isinstance(x, torch.Tensor) and _FLAG.__get__(x))}
    for eqn in equations:
        keeps = eqn.op is KEEP_GRAD  # its history is that of its first argument, in whatever mode
        if not any(v in carrying for v in (values_in(eqn.args[:1]) if keeps else eqn.inputs())):
            continue
        unheard = NO_GRAD in eqn.tags or not grad
        silent = unheard and not shows_argument(eqn)  # a view requires gradients if its base does
        if keeps or not (silent or aten_name(eqn.op) == "detach"):
            carrying.update(v for v in eqn.results() if isinstance(v.type, TensorType) and v.type.is_differentiable)
    return carrying


@contextmanager
def requires_grad_known(builder: Builder, inputs: Sequence[object]) -> Iterator[None]:
    """While this program is recorded, its results say as eager's do whether they require gradients."""

    def answer(self: torch.Tensor) -> bool:
        given: bool = _FLAG.__get__(self)
        recorder = recording()
        if given or recorder is None or recorder.builder is not builder:
            return given
        if sys._getframe(1).f_code.co_filename.startswith(_INSIDE):  # PyTorch asks about the tensors it works on
            return given
        if not isinstance(self, FakeTensor) or id(self) not in recorder.refs:
            return given
        builder.tags = recorder.tags()
        value = recorder.value(self)
        tensors = (*zip(builder.inputs, inputs, strict=True), *builder.constants.items())
        return value in with_history(tensors, builder.equations, recorder.base_grad)

    outer = vars(torch.Tensor).get("requires_grad")
    torch.Tensor.requires_grad = property(answer, _FLAG.__set__)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.requires_grad
        if outer is not None:
            torch.Tensor.requires_grad = outer
