"""The reference interpreter: what a tile kernel means, run with plain PyTorch. Every target is tested against it.

A kernel, the tensors behind its buffers and the values of its symbols come in; stored buffers are written in
place. A value is a dense tensor with one dimension per axis of the kernel, of size one where it does not vary, so
that broadcasting by axis name is broadcasting. Operations run one after another over all of their points; sums
and contractions accumulate in f64 (i64 for integers) and are rounded once. An access outside its tensor's
storage is an error here; a lane that its mask switches off touches no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Operation, SSAValue

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.ops import (
    ApplyOp,
    CastOp,
    ConstantOp,
    ContractOp,
    IotaOp,
    KernelOp,
    LoadOp,
    RandomOp,
    ReduceExpOp,
    ReduceOp,
    ScanOp,
    StoreOp,
)
from tessera.tile.dialect.types import BufferType, IndexAttr, ValueType, axes_of, element_of
from tessera.util.errors import InputError
from tessera.util.philox import block


def run(kernel: KernelOp, tensors: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
    """Run the kernel over all of its points; the tensors it stores to are changed."""
    machine = Machine(kernel, tensors, symbols)
    for op in kernel.block.ops:
        machine.step(op)


def reach(kernel: KernelOp, symbols: Sequence[int] = ()) -> list[int]:
    """How many elements of each buffer the kernel touches, where indices that it reads from memory are zero."""
    dummies = [torch.zeros(1, dtype=torch_dtype(element_of(b))) for b in kernel.buffers]
    machine = Machine(kernel, dummies, symbols)
    lengths = dict.fromkeys(kernel.buffers, 1)
    for op in kernel.block.ops:
        if isinstance(op, (LoadOp, StoreOp)):
            zeros = [torch.zeros([1] * len(machine.sizes), dtype=torch.int64) for _ in op.indices]
            where = machine._at(op.at, zeros)
            if where.numel():
                lengths[op.buffer] = max(lengths[op.buffer], int(where.max()) + 1)
    return list(lengths.values())


class Machine:
    """One run of a kernel: the sizes of its axes and the values so far. `step` runs one operation."""

    def __init__(self, kernel: KernelOp, tensors: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        _check(kernel, tensors, symbols)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.symbols = {s.data: int(n) for s, n in zip(kernel.symbol_names, symbols, strict=True)}
        self.sizes = {a.axis.data: a.size.expr.evaluate(self.symbols.__getitem__, int) for a in kernel.axes}
        self.memory = {b: _flat(t) for b, t in zip(kernel.buffers, tensors, strict=True)}
        self.values: dict[SSAValue, Tensor] = {}

    def step(self, op: Operation) -> None:
        if isinstance(op, StoreOp):
            return self._store(op)
        values = self._reduce_exp(op) if isinstance(op, ReduceExpOp) else (self._value(op),)
        for result, value in zip(op.results, values, strict=True):
            assert isinstance(result.type, ValueType)
            value = value.to(torch_dtype(result.type.element))
            self.values[result] = value.expand(self._shape(result.type.axis_names))

    def _value(self, op: Operation) -> Tensor:
        match op:
            case LoadOp():
                return self._load(op)
            case IotaOp():
                return self._at(op.at, [self.values[v] for v in op.indices])
            case ConstantOp():
                return self._constant(op)
            case ApplyOp():
                return FUNCTIONS[op.fn.data].reference(*(self.values[v] for v in op.args))
            case CastOp():
                return self.values[op.arg]
            case ReduceOp():
                return _REDUCE[op.kind.data](self.values[op.arg], self._dim(op.axis.data))
            case ScanOp():
                return _SCAN[op.kind.data](self.values[op.arg], self._dim(op.axis.data))
            case ContractOp():
                return self._contract(op)
            case RandomOp():
                return philox(self.values[op.seed], self.values[op.offset])
        raise NotImplementedError(f"the tile interpreter has no rule for {op.name}")

    # --- axes ---

    def _shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(n if a in axes else 1 for a, n in self.sizes.items())

    def _dim(self, axis: str) -> int:
        return list(self.sizes).index(axis)

    def _at(self, at: IndexAttr, indices: Sequence[Tensor]) -> Tensor:
        """The index expression at every point that it varies over."""
        expr = at.expr
        shape = torch.broadcast_shapes(self._shape(tuple(expr.names())), *(x.shape for x in indices))
        if 0 in shape:  # nothing to compute, and sizes of zero must not be divided by
            return torch.empty(shape, dtype=torch.int64, device=self.device)

        def look(name: str) -> Tensor | int:
            if name in self.symbols:
                return self.symbols[name]
            if name in self.sizes:
                places = [-1 if a == name else 1 for a in self.sizes]
                return torch.arange(self.sizes[name], device=self.device).reshape(places)
            return indices[int(name.removeprefix("_"))].long()

        return torch.as_tensor(expr.evaluate(look, int), device=self.device).expand(shape)

    # --- memory ---

    def _load(self, op: LoadOp) -> Tensor:
        memory = self.memory[op.buffer]
        where = self._at(op.at, [self.values[v] for v in op.indices])
        if op.mask is None:
            _check_bounds(op, where, memory)
            return memory[where]
        mask = self.values[op.mask].bool()
        where, mask = torch.broadcast_tensors(where, mask)
        _check_bounds(op, where[mask], memory)
        other = self.values[op.other] if op.other is not None else memory.new_zeros(())
        loaded = memory.new_zeros(mask.shape)
        loaded[mask] = memory[where[mask]]
        return torch.where(mask, loaded, other)

    def _store(self, op: StoreOp) -> None:
        memory = self.memory[op.buffer]
        where = self._at(op.at, [self.values[v] for v in op.indices])
        parts = [where, self.values[op.value]]
        if op.mask is not None:
            parts.append(self.values[op.mask].bool())
        where, value, *mask = torch.broadcast_tensors(*parts)
        if mask:
            where, value = where[mask[0]], value[mask[0]]
        _check_bounds(op, where, memory)
        memory.index_put_((where.reshape(-1),), value.reshape(-1), accumulate=op.mode.data == "add")

    # --- the rest ---

    def _constant(self, op: ConstantOp) -> Tensor:
        assert isinstance(op.value, (IntegerAttr, FloatAttr))
        dtype = torch_dtype(element_of(op.result))
        number = op.value.value.data
        value = torch.tensor(bool(number) if dtype == torch.bool else number, dtype=dtype, device=self.device)
        return value.reshape(self._shape(()))

    def _reduce_exp(self, op: ReduceExpOp) -> tuple[Tensor, Tensor]:
        x, dim = self.values[op.arg], self._dim(op.axis.data)
        top = _REDUCE["max"](x, dim)
        base = torch.where(top.isinf(), 0, top) if op.infinite.data == "zero" else top
        return top, _REDUCE["sum"](FUNCTIONS[op.fn.data].reference(x - base), dim)

    def _contract(self, op: ContractOp) -> Tensor:
        wide = torch.float64 if torch_dtype(element_of(op.result)).is_floating_point else torch.int64
        lhs, rhs = self.values[op.lhs].to(wide), self.values[op.rhs].to(wide)
        letters = {a: chr(ord("a") + k) for k, a in enumerate(self.sizes)}
        spec = ["".join(letters[a] for a in axes_of(v)) for v in (op.lhs, op.rhs, op.result)]
        lhs, rhs = (x.reshape([self.sizes[a] for a in axes_of(v)]) for x, v in ((lhs, op.lhs), (rhs, op.rhs)))
        return torch.einsum(f"{spec[0]},{spec[1]}->{spec[2]}", lhs, rhs).reshape(self._shape(axes_of(op.result)))


# --- memory ---


def _flat(tensor: Tensor) -> Tensor:
    """Everything from the tensor's first element to the end of its storage, as one row."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset()
    length = storage.nbytes() // tensor.element_size() - start
    return torch.as_strided(tensor.detach(), (max(length, 0),), (1,), start)


def _check(kernel: KernelOp, tensors: Sequence[Tensor], symbols: Sequence[int]) -> None:
    name = kernel.sym_name.data
    if len(tensors) != len(kernel.buffers):
        raise InputError(f"{name}: expected {len(kernel.buffers)} tensors, got {len(tensors)}")
    if len(symbols) != len(kernel.symbol_names):
        names = ", ".join(s.data for s in kernel.symbol_names)
        raise InputError(f"{name}: expected {len(kernel.symbol_names)} sizes ({names}), got {len(symbols)}")
    for k, (buffer, tensor) in enumerate(zip(kernel.buffers, tensors, strict=True)):
        assert isinstance(buffer.type, BufferType)
        if (want := torch_dtype(buffer.type.element)) != tensor.dtype:
            raise InputError(f"{name}: expected a tensor of {want} for buffer {k}, got {tensor.dtype}")


def _check_bounds(op: LoadOp | StoreOp, where: Tensor, memory: Tensor) -> None:
    if where.numel() == 0:
        return
    low, high = int(where.min()), int(where.max())
    if low < 0 or high >= memory.numel():
        raise InputError(
            f"{op.name} at {op.at.text.data!r}: expected offsets in [0, {memory.numel()}), got {low} … {high}"
        )


# --- reductions, scans, random bits ---


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.is_floating_point() else torch.int64


def _lowest(x: Tensor) -> float | int | bool:
    if x.dtype == torch.bool:
        return False
    return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min


def _highest(x: Tensor) -> float | int | bool:
    if x.dtype == torch.bool:
        return True
    return math.inf if x.is_floating_point() else torch.iinfo(x.dtype).max


def _extreme(combine: Callable[..., Tensor], identity: Callable[[Tensor], float]) -> Callable[[Tensor, int], Tensor]:
    """max or min; over an empty axis, the number that changes nothing."""

    def reduce(x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] == 0:
            return x.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], identity(x))
        return combine(x, dim, keepdim=True)

    return reduce


def _position(find: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    """argmax or argmin: the first of equals, the first NaN if there is one; 0 over an empty axis."""

    def reduce(x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] == 0:
            return x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)], dtype=torch.int64)
        return find(x.to(torch.uint8) if x.dtype == torch.bool else x, dim, keepdim=True)

    return reduce


_REDUCE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim, keepdim=True, dtype=_wide(x)),
    "prod": lambda x, dim: x.prod(dim, keepdim=True, dtype=_wide(x)),
    "max": _extreme(torch.amax, _lowest),
    "min": _extreme(torch.amin, _highest),
    "any": lambda x, dim: x.bool().any(dim, keepdim=True),
    "all": lambda x, dim: x.bool().all(dim, keepdim=True),
    "argmax": _position(torch.argmax),
    "argmin": _position(torch.argmin),
}

_SCAN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.cumsum(dim, dtype=_wide(x)),
    "prod": lambda x, dim: x.cumprod(dim, dtype=_wide(x)),
    "max": lambda x, dim: x.cummax(dim).values,
    "min": lambda x, dim: x.cummin(dim).values,
}


def philox(seed: Tensor, offset: Tensor) -> Tensor:
    """Word `offset % 4` of block `offset // 4`, as `tile.random` defines it."""
    words = block(seed, offset >> 2)
    return torch.stack(words).gather(0, (offset & 3).expand_as(words[0])[None])[0]
