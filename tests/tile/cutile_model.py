"""A model of the part of cuTile that emitted kernels use, over PyTorch: it runs them without a GPU or a compiler.

It follows the documentation to the letter and no further: what is undefined there is an error or a NaN here. Numbers
tell whether the emitted program is right; only NVIDIA's compiler tells whether it is a cuTile program.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.rewrites.offline import without_reduce_exp
from tessera.tile.rewrites.split_sequential import split
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets.cuda_tile.arrays import arrays, place
from tessera.tile.targets.cuda_tile.emit import blocks_of, programs_of
from tessera.tile.targets.cuda_tile.propose import of_halves
from tessera.tile.targets.cuda_tile.write import write


class PaddingMode(enum.Enum):
    ZERO = "zero"


class Array:
    """Memory from `start` on, with sizes and strides; flat memory has no bounds but its own."""

    def __init__(self, flat: torch.Tensor, start: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.flat, self.start, self.shape, self.strides = flat, start, tuple(shape), tuple(strides)

    def lanes(self, index: Sequence[int], tile: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Element offsets of a tile and whether each is inside."""
        assert len(index) == len(tile) == len(self.shape)
        assert all(int(i) * t < n for i, t, n in zip(index, tile, self.shape, strict=True)), "a tile outside its array"
        where, inside = torch.tensor(self.start), torch.tensor(True)
        for d, (i, t, n, s) in enumerate(zip(index, tile, self.shape, self.strides, strict=True)):
            at = (int(i) * t + torch.arange(t)).reshape([-1 if k == d else 1 for k in range(len(tile))])
            where, inside = where + at * s, inside & (at < n)
        return where, inside

    def get_raw_memory(self) -> Raw:
        return Raw(self)


class Raw:
    def __init__(self, array: Array) -> None:
        self.array = array

    def _lanes(self, offset: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        offset = torch.as_tensor(offset)
        mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        assert mask.shape in (offset.shape, torch.Size([]))
        mask = mask.expand(offset.shape)
        used = offset[mask]
        assert used.numel() == 0 or (used.min() >= 0 and used.max() < self.array.flat.numel()), "outside of memory"
        return offset, mask

    def load_offset(self, offset: Any, *, mask: Any = None, padding_value: Any = 0) -> torch.Tensor:
        offset, mask = self._lanes(offset, mask)
        found = torch.as_tensor(padding_value).to(self.array.flat.dtype).expand(offset.shape).clone()
        found[mask] = self.array.flat[offset[mask]]
        return found

    def store_offset(self, offset: Any, value: Any, *, mask: Any = None) -> None:
        offset, mask = self._lanes(offset, mask)
        self.array.flat[offset[mask]] = torch.as_tensor(value).expand(offset.shape)[mask]

    def atomic_add_offset(self, offset: Any, value: Any, *, mask: Any = None) -> None:
        offset, mask = self._lanes(offset, mask)
        update = torch.as_tensor(value).expand(offset.shape)[mask]
        self.array.flat.index_put_((offset[mask],), update, accumulate=True)


def load(array: Array, index: Any, shape: Any, *, padding_mode: Any = None, check_bounds: bool = True) -> torch.Tensor:
    where, inside = array.lanes(index, shape)
    assert check_bounds or bool(inside.all()), "check_bounds=False, but a lane is outside"
    found = array.flat[torch.where(inside, where, array.start)]
    fill = 0 if padding_mode is PaddingMode.ZERO else math.nan
    return torch.where(inside, found, torch.tensor(fill).to(found.dtype))


def store(array: Array, index: Any, tile: torch.Tensor, *, check_bounds: bool = True) -> None:
    where, inside = array.lanes(index, tile.shape)
    assert check_bounds or bool(inside.all()), "check_bounds=False, but a lane is outside"
    array.flat[where[inside]] = tile[inside]


def astype(x: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(x).to(dtype)


def mma(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    assert a.ndim == b.ndim == 2 and a.dtype == b.dtype
    return acc + a.to(acc.dtype) @ b.to(acc.dtype)


def _pick(nan: Callable, number: Callable) -> Callable:
    """maximum and minimum: NaN wins or loses, as asked."""

    def pick(a: Any, b: Any, propagate_nan: bool = False) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b) if nan is torch.maximum else min(a, b)
        a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b))
        dtype = a.dtype if a.ndim >= b.ndim else b.dtype
        return (nan if propagate_nan else number)(a.to(dtype), b.to(dtype))

    return pick


def _best(find: Callable) -> Callable:
    return lambda x, dim, propagate_nan=False: find(x, dim).to(torch.int32)


def scan(x: torch.Tensor, dim: int, func: Callable, identity: Any) -> torch.Tensor:
    parts = list(x.unbind(dim))
    for k in range(1, len(parts)):
        parts[k] = func(parts[k - 1], parts[k])
    return torch.stack(parts, dim)


def _scalar(fn: Callable) -> Callable:
    return lambda x: fn(torch.as_tensor(x))


def _program() -> Any:
    ct = SimpleNamespace(program=0)
    ct.bid = lambda axis: ct.program
    ct.kernel = lambda function=None, **flags: function if function is not None else (lambda f: f)
    ct.ScalarInt64, ct.PaddingMode = int, PaddingMode
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
    ):
        setattr(ct, name, getattr(torch, name))
    ct.bool_ = torch.bool
    ct.load, ct.store, ct.astype, ct.mma, ct.scan = load, store, astype, mma, scan
    ct.cdiv = lambda a, b: -(-a // b)
    ct.arange = lambda n, dtype: torch.arange(n, dtype=dtype)
    ct.full = lambda shape, value, dtype: torch.as_tensor(value).to(dtype).expand(shape).clone()
    ct.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    ct.reshape, ct.permute, ct.broadcast_to = torch.reshape, torch.permute, torch.broadcast_to
    ct.where = torch.where
    ct.maximum, ct.minimum = _pick(torch.maximum, torch.fmax), _pick(torch.minimum, torch.fmin)
    ct.argmax, ct.argmin = _best(torch.argmax), _best(torch.argmin)
    ct.sum = lambda x, dim, keepdims=False: x.sum(dim, keepdim=keepdims, dtype=x.dtype)
    ct.prod = lambda x, dim, keepdims=False: x.prod(dim, keepdim=keepdims, dtype=x.dtype)
    ct.max = lambda x, dim, propagate_nan=False, keepdims=False: x.amax(dim, keepdim=keepdims)
    ct.min = lambda x, dim, propagate_nan=False, keepdims=False: x.amin(dim, keepdim=keepdims)
    ct.cumsum = lambda x, dim: x.cumsum(dim, dtype=x.dtype)
    ct.cumprod = lambda x, dim: x.cumprod(dim, dtype=x.dtype)
    for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "floor"):
        setattr(ct, name, _scalar(getattr(torch, name)))
    ct.ceil, ct.abs, ct.isnan = _scalar(torch.ceil), _scalar(torch.abs), _scalar(torch.isnan)
    ct.pow, ct.atan2 = torch.pow, torch.atan2
    return ct


def load_source(source: str, name: str) -> tuple[Any, Callable]:
    """The emitted function with this model in the place of cuTile."""
    ct = _program()
    space: dict[str, Any] = {"ct": ct}
    exec(compile(source.replace("import cuda.tile as ct\n", ""), f"<{name}>", "exec"), space)
    return ct, space[name]


def run(kernel: KernelOp, schedule: Schedule, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
    """Emit the kernel, or the two that it becomes, and run every program, one after another."""
    if schedule.split == 1:
        _run(without_reduce_exp(kernel), schedule, tensors, symbols)
        return
    made = split(kernel, schedule.split)
    values = {s.data: n for s, n in zip(kernel.symbol_names, symbols, strict=True)}
    sizes = [(s.size.evaluate(values.__getitem__, int), torch_dtype(s.element)) for s in made.scratch]
    every = [*tensors, *(torch.full((n,), 99).to(dtype) for n, dtype in sizes)]
    for half, how in zip((made.first, made.second), of_halves(kernel, schedule, made.second), strict=True):
        _run(without_reduce_exp(half), how, every, symbols)


def _run(kernel: KernelOp, schedule: Schedule, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
    ct, function = load_source(write(kernel, schedule), kernel.sym_name.data)
    values = {s.data: n for s, n in zip(kernel.symbol_names, symbols, strict=True)}
    sizes = {a.axis.data: a.size.expr.evaluate(values.__getitem__, int) for a in kernel.axes}
    parameters = []
    for array in arrays(kernel).all:
        tensor = tensors[array.buffer]
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        placed = place(array, tensor.data_ptr(), sizes, values)
        start = (placed.address - tensor.untyped_storage().data_ptr()) // tensor.element_size()
        if array.flat:
            flat, start = flat[start:], 0
        parameters.append(Array(flat, start, placed.shape, placed.strides))
    blocks = blocks_of(kernel, schedule)
    for program in range(math.prod(-(-sizes[a] // blocks[a]) for a in programs_of(kernel))):
        ct.program = program
        function(*parameters, *symbols)
