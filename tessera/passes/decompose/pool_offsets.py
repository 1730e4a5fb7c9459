"""Max pooling over offsets of one byte, so that kernels can hold it and its gradient.

In: a trace, and why kernels cannot hold an equation. Out: the same program, where a max pool whose indices nobody but
its own gradient reads gives offsets within its windows instead, and the gradient gathers by them. Indices that the
program gives back, or that something else reads, are PyTorch's: such a pool is left alone, as are those that no kernel
holds. On a CPU too kernels are faster than the library: 0.03 to 0.9 of its time for both, the more the less it has
channels last.

    y, where = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    dx = aten.max_pool2d_with_indices_backward(dy, x, [3, 3], [2, 2], [1, 1], [1, 1], False, where)
    -->
    y, offsets = tessera.max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False)
    dx = tessera.max_pool_backward(dy, offsets, [8, 64, 112, 112], [3, 3], [2, 2], [1, 1], [1, 1], True)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ir.verify import same_type
from tessera.ops.families import per_dimension, same_shape
from tessera.ops.pool import FORMATS, MOST, max_pool, max_pool_backward
from tessera.torch_internals.operators import OpOverload

aten = torch.ops.aten
FORWARD = {
    aten.max_pool1d.default: 1,
    aten.max_pool2d.default: 2,
    aten.max_pool3d.default: 3,
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}  # and how many dimensions a window has
BACKWARD = {
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
}
Why = Callable[[Equation], str]  # why not; empty where it can be


@dataclass(frozen=True)
class Pool:
    """The windows of an equation, with every default filled in."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool

    @staticmethod
    def of(n: int, kernel: Arg, stride: Arg, padding: Arg, dilation: Arg, ceil_mode: Arg) -> Pool:
        stride = stride if stride or isinstance(stride, int) else kernel
        return Pool(*(per_dimension(s, n) for s in (kernel, stride, padding, dilation)), ceil_mode=bool(ceil_mode))

    @property
    def windows(self) -> tuple[list[int], ...]:
        return self.kernel, self.stride, self.padding, self.dilation


def pool_offsets(trace: Trace, refusal: Why) -> Trace:
    """Write max pools and their gradients over offsets, where kernels hold both."""
    if not any(eqn.op in FORWARD for eqn in trace.equations):
        return trace
    pools = _Pools(trace, refusal)
    rewritten: dict[Equation, Equation] = {}
    for eqn in trace.equations:
        pool = pools.over_offsets(eqn) if eqn.op in FORWARD else ""
        rewritten |= pool if isinstance(pool, dict) else {}
    return trace.with_(equations=tuple(rewritten.get(e, e) for e in trace.equations)) if rewritten else trace


def reasons(trace: Trace, refusal: Why) -> dict[str, str]:
    """Why max pools and their gradients are left to PyTorch, by the names of their first results."""
    pools = _Pools(trace, refusal)
    why: dict[str, str] = {}
    for eqn in trace.equations:
        if eqn.op in FORWARD and eqn.results():
            pool = pools.over_offsets(eqn)
            why[eqn.results()[0].name] = pool if isinstance(pool, str) else "its gradient is left to PyTorch"
        elif eqn.op in BACKWARD:
            why[eqn.out.name] = "the max pool whose indices it reads is left to PyTorch"
    return why


class _Pools:
    def __init__(self, trace: Trace, refusal: Why) -> None:
        self.refusal, self.rewrite = refusal, Rewrite(trace)

    def over_offsets(self, eqn: Equation) -> dict[Equation, Equation] | str:
        """A pool and its gradients over offsets, by what they replace; or why they stay as they are."""
        (x, *rest), _ = eqn.bound()
        assert isinstance(x, Value)
        values, indices, *_ = (*eqn.outputs, None)
        pool = Pool.of(FORWARD[eqn.op], *rest)  # type: ignore[index]
        readers = [] if indices is None else self.rewrite.users.get(indices, [])
        if values is None or not x.tensor.is_float:
            return "nothing reads its result" if values is None else f"it pools {x.dtype}"
        if math.prod(pool.kernel) > MOST:
            return f"its windows have more than {MOST} elements"
        if (maker := self.rewrite.makers.get(x)) is not None and maker.op in FORWARD:
            return "it pools what another max pool gives: one kernel would unroll windows of windows"
        if indices in self.rewrite.results or not all(self._is_gradient(user, eqn) for user in readers):
            return "its indices are read by something else than its gradient"
        forward = self._emitted(eqn, max_pool, x, *pool.windows, pool.ceil_mode)
        _, offsets = forward.outputs
        replaced = {eqn: forward}
        for user in readers:
            (grad, *_), _ = user.bound()
            last = channels_last(user.out.tensor)
            replaced[user] = self._emitted(user, max_pool_backward, grad, offsets, list(x.shape), *pool.windows, last)
        for old, new in replaced.items():
            if reason := self._unlike(old, new):
                return reason
            replaced[old] = new.with_(outputs=(old.outputs[0], *new.outputs[1:]))
        if not readers:
            replaced[eqn] = replaced[eqn].with_(outputs=(values, None))
        return replaced

    def _is_gradient(self, user: Equation, pool: Equation) -> bool:
        """The gradient of this very pool: the same windows over something of the same shape."""
        if BACKWARD.get(user.op) is not pool.op:  # type: ignore[arg-type]
            return False
        (x, *own), _ = pool.bound()
        (grad, y, *windows, indices), _ = user.bound()
        n = FORWARD[pool.op]  # type: ignore[index]
        same = Pool.of(n, *own) == Pool.of(n, *windows) and indices is pool.outputs[1]
        return same and grad is not indices and same_shape(x.shape, y.shape)

    def _emitted(self, eqn: Equation, op: OpOverload, *args: Arg) -> Equation:
        with self.rewrite.at(eqn) as builder:
            builder.emit(op, *args)
        return builder.equations.pop()

    def _unlike(self, old: Equation, new: Equation) -> str:
        """Why an equation cannot stand for another; empty where it can."""
        wanted, got = (eqn.outputs[0].type for eqn in (old, new))  # type: ignore[union-attr]
        return self.refusal(new) or ("" if same_type(wanted, got) else f"its result is {wanted}, a kernel's {got}")


def channels_last(t: TensorType) -> bool:
    """Channels are contiguous, and there is more than one."""
    return t.ndim in FORMATS and size_hint(t.stride[1]) == 1 and size_hint(t.shape[1]) > 1
