"""Which tensors of a program that is being traced autograd would follow.

Autograd is not at work while a program is recorded, so a result's own flag says nothing. In: the equations so far and
which inputs require gradients. Out: the values that have a gradient history, as eager has it.

Recordings nest, and each one is a level, as in torch.func. A transform that differentiates begins histories: to it a
tensor of an outer level is a constant, so that what is computed of it has none, though the tensor itself still says
what it says outside. To vmap, and to the body of a call, what is not mapped is the business of the level around it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tessera.ir.alias import KEEP_GRAD, followed
from tessera.ir.builder import Builder
from tessera.ir.call import is_call
from tessera.ir.equation import NO_GRAD, Equation, Value, map_values
from tessera.ir.fake import alone, shows_argument
from tessera.ir.record import recorder_of, recording
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.torch_internals import pytree
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.fake import FakeTensor
from tessera.torch_internals.operators import OpOverload, aten_name
from tessera.util.files import PACKAGE
from tessera.util.stack import Stack

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
        if not any(v in carrying for v in followed(eqn)):
            continue
        unheard = NO_GRAD in eqn.tags or not grad
        silent = unheard and not shows_argument(eqn)  # a view requires gradients if its base does
        if is_call(eqn) and not unheard:
            carrying.update(_given_by_body(eqn, carrying))
        elif keeps or not (silent or aten_name(eqn.op) == "detach"):
            carrying.update(_made_with_history(eqn, carrying))
    return carrying


def _made_with_history(eqn: Equation, carrying: set[Value]) -> list[Value]:
    """The results that autograd follows, where some operands have a history: not those of `new_zeros`, nor the mean
    beside a norm."""
    key = _asked(eqn, carrying)
    if key not in _followed:
        _followed[key] = _asked_of_autograd(eqn, carrying)
    told = _followed[key] or (True,) * len(eqn.results())
    differentiable = [isinstance(v.type, TensorType) and v.type.is_differentiable for v in eqn.results()]
    return [v for v, *flags in zip(eqn.results(), told, differentiable, strict=True) if all(flags)]


# By what was asked: which results have a history. None where autograd cannot be asked.
_followed: dict[tuple, tuple[bool, ...] | None] = {}


def _asked(eqn: Equation, carrying: set[Value]) -> tuple:
    """What autograd's answer hangs on: the operator, which operands have a history, what is real or complex, and what
    is switched on or off."""
    operands = ((v in carrying, getattr(v.type, "dtype", None)) for v in eqn.inputs())
    results = (getattr(v.type, "dtype", None) for v in eqn.results())
    switches = (x for x in (*eqn.args, *eqn.kwargs.values()) if isinstance(x, bool))
    return eqn.op, tuple(operands), tuple(results), tuple(switches)


def _asked_of_autograd(eqn: Equation, carrying: set[Value]) -> tuple[bool, ...] | None:
    """What autograd makes of the operator on tensors without data."""
    if not isinstance(eqn.op, OpOverload) or any(not _plain(v) for v in (*eqn.inputs(), *eqn.results())):
        return None

    def without_data(v: Value) -> torch.Tensor:
        x = torch.empty_strided(v.shape, v.tensor.stride, dtype=v.dtype, device="meta")  # type: ignore[arg-type]
        return x.requires_grad_(v in carrying)

    with alone(), torch.enable_grad():
        args, kwargs = map_values((eqn.args, eqn.kwargs), without_data)  # type: ignore[misc]
        kwargs = {name: torch.device("meta") if isinstance(x, torch.device) else x for name, x in kwargs.items()}
        try:
            out = eqn.op(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # data decides, or there is no rule for such tensors
            return None
    flags = tuple(_FLAG.__get__(x) for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
    return flags if len(flags) == len(eqn.results()) else None


def _plain(v: Value) -> bool:
    return isinstance(v.type, TensorType) and not v.type.is_symbolic and v.type.layout is torch.strided


def _given_by_body(eqn: Equation, carrying: set[Value]) -> set[Value]:
    """The results of a call that its body makes of operands with a history."""
    body, operands = eqn.args[0], eqn.args[1:]
    if not isinstance(body, Trace):
        return {v for v in eqn.results() if isinstance(v.type, TensorType) and v.type.is_differentiable}
    begun = ((v, (isinstance(x, Value) and x in carrying) or None) for v, x in zip(body.inputs, operands, strict=True))
    inner = with_history(begun, body.equations)
    pairs = zip(eqn.outputs, body.outputs, strict=True)
    return {v for v, made in pairs if v is not None and isinstance(made, Value) and made in inner}


@dataclass(frozen=True)
class Level:
    """A program that is being recorded, inside those that stand before it in `_levels`."""

    builder: Builder
    # Of every input what it is outside; True where the program is differentiated by it; False where no level but this
    # one knows it: an example of a batch, a primal of forward mode.
    inputs: Sequence[object]
    begins: bool  # histories begin here: the program is differentiated
    grad: bool  # gradients are on around it

    def says(self, x: torch.Tensor, outer: Sequence[Level]) -> bool:
        """What a tensor that the program can name answers."""
        fixed = not self.grad and not self.begins and (x.is_floating_point() or x.is_complex())
        v = self.base(x) if fixed else self.value(x)
        if v is None:
            return says(x, outer)
        if v in self.behind:
            known = self.behind[v]
            return known if isinstance(known, bool) else says(known, outer)
        return v in self.carrying(outer)

    def carries(self, x: torch.Tensor, outer: Sequence[Level]) -> bool:
        """What is computed of this tensor here has a history."""
        v = self.value(x)
        if v is None:
            return not self.begins and carries(x, outer)
        return v in self.carrying(outer)

    def carrying(self, outer: Sequence[Level]) -> set[Value]:
        known = self.behind.items()
        begun = {v for v, x in known if x is True or (not self.begins and x is not False and carries(x, outer))}
        history = with_history(((v, True) for v in begun), self.builder.equations, self.grad)
        mapped = {v for v, x in known if x is False}
        return history if self.begins else history - _dependent(mapped, self.builder.equations)

    @property
    def behind(self) -> dict[Value, Any]:
        return dict(zip(self.builder.inputs, self.inputs, strict=False)) | self.builder.constants

    def value(self, x: torch.Tensor) -> Value | None:
        recorder = recorder_of(self.builder)
        return recorder.value(x) if recorder is not None and id(x) in recorder.refs else None

    def base(self, x: torch.Tensor) -> Value | None:
        """Where gradients are off and none begin, a write changes no history, and that of a view is its base's."""
        recorder = recorder_of(self.builder)
        ref = recorder.refs.get(id(x)) if recorder is not None else None
        while ref is not None and ref.begun not in self.behind and ref.view is not None and not ref.view.detaches:
            ref = ref.view.parent
        return ref.begun if ref is not None else None


_levels: Stack[Level] = Stack()


def says(x: object, levels: Sequence[Level]) -> bool:
    if not isinstance(x, FakeTensor) or not levels:  # no tensor of a program's own
        return isinstance(x, torch.Tensor) and _FLAG.__get__(x)
    return levels[-1].says(x, levels[:-1])


def carries(x: object, levels: Sequence[Level]) -> bool:
    if not isinstance(x, torch.Tensor) or not levels:
        return isinstance(x, torch.Tensor) and _FLAG.__get__(x)
    return levels[-1].carries(x, levels[:-1])


def _dependent(values: set[Value], equations: Sequence[Equation]) -> set[Value]:
    for eqn in equations if values else ():
        if any(v in values for v in eqn.inputs()):
            values.update(eqn.results())
    return values


@contextmanager
def requires_grad_known(
    builder: Builder, inputs: Sequence[object], begins: bool = False, grad: bool | None = None
) -> Iterator[None]:
    """While this program is recorded, its tensors say as eager's do whether they require gradients (see `Level`)."""

    def answer(self: torch.Tensor) -> bool:
        recorder = recording()
        if not isinstance(self, FakeTensor) or recorder is None or recorder.builder is not builder:
            return _FLAG.__get__(self)
        if sys._getframe(1).f_code.co_filename.startswith(_INSIDE):  # PyTorch asks about the tensors it works on
            return _FLAG.__get__(self)
        builder.tags = recorder.tags()
        return says(self, _levels.items)

    outer = vars(torch.Tensor).get("requires_grad")
    torch.Tensor.requires_grad = property(answer, _FLAG.__set__)  # type: ignore[assignment]
    _levels.append(Level(builder, inputs, begins, torch.is_grad_enabled() if grad is None else grad))
    try:
        yield
    finally:
        _levels.pop()
        del torch.Tensor.requires_grad
        if outer is not None:
            torch.Tensor.requires_grad = outer
