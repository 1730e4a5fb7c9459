"""Arithmetic on sizes: Shape, Gather, Concat, Reshape and their like over numbers instead of tensors.

A `Sizes` is a small tensor of numbers some of which are symbols. The functions below give the results of ONNX's
operators on such values; `EVALUATED` names them. An operator that is not there gets an ordinary tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera.ir.types import SYMBOLIC, size_hint
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.util.errors import TesseraError


@dataclass(frozen=True, eq=False)
class Sizes:
    array: np.ndarray  # of objects: int, SymInt, SymBool or bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def symbolic(self) -> bool:
        return any(isinstance(n, SYMBOLIC) for n in self.array.flat)

    def tensor(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The same as a tensor of the program."""
        if not self.symbolic():
            return torch.tensor(self.array.tolist(), dtype=self.dtype, device=device)
        parts = [torch.full((), n, dtype=self.dtype, device=device) for n in self.array.flat]
        return torch.stack(parts).reshape(self.array.shape) if self.array.ndim else parts[0]


def objects(values: Sequence, shape: Sequence[int] | None = None) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array if shape is None else array.reshape(tuple(shape))


def of_shape(shape: Sequence) -> Sizes:
    return Sizes(objects(list(shape)), torch.int64)


def known_as_sizes(x: object) -> object:
    """A tensor whose contents are known, in the form of the functions below."""
    if isinstance(x, torch.Tensor):
        return Sizes(objects(listed(x), x.shape), x.dtype)
    return x


def listed(x: torch.Tensor) -> list:
    """The elements of a tensor that holds some, while another program may be recorded around."""
    with disable_current_modes():
        return x.detach().reshape(-1).tolist()


def _each(fn: Callable) -> Callable:
    """An elementwise function of numbers, broadcast."""
    run = np.frompyfunc(fn, 2, 1)

    def apply(a: Sizes, b: Sizes) -> Sizes:
        return Sizes(np.asarray(run(a.array, b.array), dtype=object), a.dtype)

    return apply


def _compare(fn: Callable) -> Callable:
    run = np.frompyfunc(fn, 2, 1)

    def apply(a: Sizes, b: Sizes) -> Sizes:
        return Sizes(np.asarray(run(a.array, b.array), dtype=object), torch.bool)

    return apply


def _quotient(a: object, b: object) -> object:
    """ONNX divides integers towards zero. The sign of a symbol is a guard."""
    if isinstance(a, float) or isinstance(b, float):
        return a / b  # type: ignore[operator]
    if (a < 0) == (b < 0):  # type: ignore[operator]
        return abs(a) // abs(b)  # type: ignore[arg-type,operator]
    return -(abs(a) // abs(b))  # type: ignore[arg-type,operator]


def _same(a: object, b: object) -> object:
    return bool(a == b)  # of symbols this is a guard: which branch a program takes is fixed when it is made


def _least(a: object, b: object) -> object:
    return torch.sym_min(a, b)


def _most(a: object, b: object) -> object:
    return torch.sym_max(a, b)


def _reduced(fn: Callable, start: int) -> Callable:
    def apply(x: Sizes, axes: Sizes | None = None, *, keepdims: int = 1, **more: object) -> Sizes | None:
        given = more.get("axes", None if axes is None else [int(n) for n in axes.array.flat])
        if x.ndim != 1 or (given is not None and list(given) not in ([0], [-1])):
            return None
        total: object = start
        for n in x.array.flat:
            total = fn(total, n)
        return Sizes(objects([total], (1,) if keepdims else ()), x.dtype)

    return apply


def _gather(x: Sizes, indices: Sizes, *, axis: int = 0) -> Sizes:
    return Sizes(np.asarray(np.take(x.array, indices.array.astype(np.int64), axis=axis), dtype=object), x.dtype)


def _concat(*parts: Sizes, axis: int = 0) -> Sizes:
    return Sizes(np.concatenate([p.array for p in parts], axis=axis), parts[0].dtype)


def _slice(
    x: Sizes,
    starts: Sizes | None = None,
    ends: Sizes | None = None,
    axes: Sizes | None = None,
    steps: Sizes | None = None,
    **given: list[int],
) -> Sizes:
    first = _listed(starts, given.get("starts"))
    last = _listed(ends, given.get("ends"))
    dims = _listed(axes, given.get("axes")) or list(range(len(first)))  # type: ignore[arg-type]
    stride = _listed(steps, None) or [1] * len(first)  # type: ignore[arg-type]
    array = x.array
    for a, b, dim, step in zip(first, last, dims, stride, strict=True):  # type: ignore[arg-type]
        place: list = [slice(None)] * array.ndim
        stop: int | None = int(b)
        if step < 0 and stop < -array.shape[dim]:  # type: ignore[operator]
            stop = None
        place[dim] = slice(int(a), stop, int(step))
        array = array[tuple(place)]
    return Sizes(array, x.dtype)


def _listed(x: Sizes | None, given: list[int] | None) -> list | None:
    return [int(n) for n in x.array.flat] if x is not None else given


def _squeeze(x: Sizes, axes: Sizes | None = None, **given: list[int]) -> Sizes:
    dims = _listed(axes, given.get("axes"))
    return Sizes(np.asarray(np.squeeze(x.array, None if dims is None else tuple(dims)), dtype=object), x.dtype)


def _unsqueeze(x: Sizes, axes: Sizes | None = None, **given: list[int]) -> Sizes:
    return Sizes(np.expand_dims(x.array, tuple(_listed(axes, given.get("axes")) or ())), x.dtype)


def _reshape(x: Sizes, shape: Sizes | None = None, **given: object) -> Sizes:
    target = _listed(shape, given.get("shape"))  # type: ignore[arg-type]
    return Sizes(x.array.reshape(tuple(target or ())), x.dtype)


def _cast(x: Sizes, *, to: int, **_: object) -> Sizes | None:
    kinds = {6: torch.int32, 7: torch.int64}
    if to not in kinds or x.dtype not in kinds.values():
        return None
    return Sizes(x.array, kinds[to])


def _where(which: Sizes, a: Sizes, b: Sizes) -> Sizes:
    choose = np.frompyfunc(lambda c, x, y: x if c else y, 3, 1)
    return Sizes(np.asarray(choose(which.array, a.array, b.array), dtype=object), a.dtype)


def _split(x: Sizes, sizes: Sizes | None = None, *, axis: int = 0, context: object = None, **given: object) -> object:
    lengths = _listed(sizes, given.get("split"))  # type: ignore[arg-type]
    if lengths is None or x.ndim != 1:
        return None
    places = np.cumsum(lengths)[:-1]
    return tuple(Sizes(part, x.dtype) for part in np.split(x.array, places))


def _fold(fn: Callable) -> Callable:
    """An operator of any number of inputs."""
    each = _each(fn)

    def apply(*parts: Sizes) -> Sizes:
        total = parts[0]
        for p in parts[1:]:
            total = each(total, p)
        return total

    return apply


EVALUATED: dict[str, Callable] = {
    "Add": _each(operator.add),
    "Sub": _each(operator.sub),
    "Mul": _each(operator.mul),
    "Div": _each(_quotient),
    "Mod": _each(operator.mod),
    "Min": _fold(_least),
    "Max": _fold(_most),
    "Neg": lambda x: Sizes(np.asarray(-x.array, dtype=object), x.dtype),
    "Identity": lambda x: x,
    "Equal": _compare(_same),
    "Greater": _compare(lambda a, b: bool(a > b)),
    "Less": _compare(lambda a, b: bool(a < b)),
    "GreaterOrEqual": _compare(lambda a, b: bool(a >= b)),
    "LessOrEqual": _compare(lambda a, b: bool(a <= b)),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Cast": _cast,
    "Where": _where,
    "Split": _split,
    "ReduceProd": _reduced(operator.mul, 1),
    "ReduceSum": _reduced(operator.add, 0),
    "ReduceMin": lambda x, axes=None, **k: _reduced(_least, x.array.flat[0])(x, axes, **k) if x.array.size else None,
    "ReduceMax": lambda x, axes=None, **k: _reduced(_most, x.array.flat[0])(x, axes, **k) if x.array.size else None,
}


_HALF = {torch.int32: 1 << 31, torch.int64: 1 << 63}


class TooLarge(TesseraError):
    """A number beyond its type, which wraps around when the program runs."""


PLACED = ("Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Split")  # inputs behind the first are places in it


def evaluate(op: str, args: Sequence[object], attributes: dict) -> object:
    """The result of an operator over sizes and known numbers; None where it has to be a tensor."""
    fn = EVALUATED.get(op)
    if fn is None or any(not isinstance(a, (Sizes, type(None))) for a in args):
        return None
    if op in PLACED and any(isinstance(a, Sizes) and a.symbolic() for a in args[1:]):
        return None  # how many numbers come out is a symbol
    if any(isinstance(a, Sizes) and a.array.size > 1024 for a in args):
        return None
    if op in ("Div", "Mod") and any(not isinstance(n, SYMBOLIC) and n == 0 for n in args[1].array.flat):  # type: ignore[union-attr]
        return None  # the tensor's division says what that is
    return _wrapped(fn(*args, **attributes))


def _wrapped(out: object) -> object:
    """Numbers as integers of their type hold them. A symbol that is too large for its type stays none."""
    if isinstance(out, tuple):
        return tuple(map(_wrapped, out))
    if not isinstance(out, Sizes) or out.dtype not in _HALF:
        return out
    half = _HALF[out.dtype]
    if all(-half <= size_hint(n) < half for n in out.array.flat):
        return out
    if out.symbolic():
        raise TooLarge("a size that 64 bits do not hold")
    return Sizes(objects([(int(n) + half) % (2 * half) - half for n in out.array.flat], out.shape), out.dtype)
