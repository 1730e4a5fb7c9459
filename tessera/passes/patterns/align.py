"""Products whose rows begin where a GPU's matrix units cannot load them are padded with zeros.

In: a trace. Out: the same program, where a product of 16-bit numbers over an odd number of classes, or of whatever else
lies contiguous, multiplies operands with some more rows or columns, which are zero, and cuts its result. A library has
kernels for any alignment, but slow ones: a layer of 51,865 classes takes 8 times as long as one of 51,872. A product of
which only the result lies so, and is a result of the program, stays: it would be there twice while it is cut, and a
kernel of ours (`written_in_odd_rows`) writes it where it belongs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import size_hint
from tessera.machines import machine_of

ALIGNED = 16  # bytes
# Bytes that divide a row's address -> operations of the matrix units, in a cycle of a multiprocessor, that loads of so
# many bytes keep up with: cuBLAS reached 0.08 and 0.3 of an H200's rate. A GPU with slower units loses less.
FED = {2: 242, 4: 907}
FULL_RATE = 0.75  # the share of the matrix units' rate that large products reach on data of any kind
LAUNCHES = 5  # of copies, whose time is to be saved at least
DTYPES = (torch.bfloat16, torch.float16)
DEVICES = ("cuda",)
PRODUCTS = ("linear", "mm")
PAIRS = (4, 8)  # bytes that divide a row's address: two elements of 16 bits are stored at once
LARGE, ROWS_OF_TILES = 2**24, 128  # elements of a result that is worth a kernel, and the rows that it needs
ROWS, DEPTH, COLUMNS = "rows", "depth", "columns"


@dataclass(frozen=True)
class Operand:
    """A matrix in rows, and what the dimensions of the operand are; one that lies in columns is the matrix `turned`."""

    value: Value
    dims: tuple[str, str]
    turned: bool

    def matrix(self, more: dict[str, int]) -> Value:
        """The matrix in rows, with so many zeros behind each dimension."""
        if not any(more[d] for d in self.dims):
            return self.value
        outer, inner = self.dims[::-1] if self.turned else self.dims
        return aten.constant_pad_nd(self.value, [0, more[inner], 0, more[outer]])

    def padded(self, more: dict[str, int]) -> Value:
        return aten.t(self.matrix(more)) if self.turned else self.matrix(more)


@dataclass(frozen=True)
class Product:
    left: Operand
    right: Operand
    sizes: dict[str, int]
    more: dict[str, int]  # zeros behind each dimension

    def pays(self, item: int, device: torch.device) -> bool:
        machine = machine_of(device)
        at_best = 2 * math.prod(self.sizes.values()) / machine.matrix_flops
        fed = (FED.get(math.gcd(self.sizes[d] * item, ALIGNED), math.inf) for d, n in self.more.items() if n)
        share = min(FULL_RATE, min(fed) * machine.cycles / machine.matrix_flops)
        copied = [v.value.tensor.nbytes() for v in (self.left, self.right) if any(self.more[d] for d in v.dims)]
        if self.more[COLUMNS]:
            copied.append(self.sizes[ROWS] * self.sizes[COLUMNS] * item)
        return at_best / share - at_best / FULL_RATE - 2 * sum(copied) / machine.bandwidth > LAUNCHES * machine.launch


def align(trace: Trace) -> Trace:
    """Pad products where that pays."""
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if eqn.opname not in PRODUCTS or (eqn.out in rewrite.results and written_in_odd_rows(eqn)):
            continue
        product = _product(eqn, rewrite)
        if product is not None and product.pays(eqn.out.dtype.itemsize, eqn.out.tensor.device):
            rewrite.replace(eqn, functools.partial(_padded, product))
    return rewrite.finish()


def written_in_odd_rows(eqn: Equation) -> bool:
    """A large linear layer whose weight a GPU's matrix units load well, and whose results begin at multiples of four
    bytes: a kernel of ours stores pairs of them."""
    x, w, out = (*eqn.inputs()[:2], eqn.out)
    if eqn.opname != "linear" or out.tensor.device.type not in DEVICES or out.dtype not in DTYPES:
        return False
    columns, depth = w.shape
    if type(columns) is not int or type(depth) is not int or not all(v.tensor.is_row_major for v in (x, w, out)):
        return False
    whole, odd = (math.gcd(n * out.dtype.itemsize, ALIGNED) for n in (depth, columns))
    elements = size_hint(out.numel())
    return whole == ALIGNED and odd in PAIRS and elements >= LARGE and elements // columns >= ROWS_OF_TILES


def _product(eqn: Equation, rewrite: Rewrite) -> Product | None:
    """A product that wants zeros somewhere, and is made of matrices that lie in rows or in columns."""
    out = eqn.out.tensor
    values = [v for v in eqn.args if isinstance(v, Value)]
    static = all(type(n) is int for v in values for n in v.shape)
    if out.device.type not in DEVICES or not static or any(v.dtype not in DTYPES for v in (eqn.out, *values)):
        return None
    x, w = values[:2]
    left = _operand(x, (ROWS, DEPTH), rewrite)
    right = Operand(w, (DEPTH, COLUMNS), True) if eqn.opname == "linear" else _operand(w, (DEPTH, COLUMNS), rewrite)
    if left is None or right is None or not right.value.tensor.is_row_major or not out.is_row_major:
        return None
    sizes = {ROWS: math.prod(x.shape[:-1]), DEPTH: int(x.shape[-1]), COLUMNS: int(out.shape[-1])}
    inner = {COLUMNS, *(v.dims[0 if v.turned else 1] for v in (left, right))}
    step = ALIGNED // out.dtype.itemsize
    more = {d: -n % step if d in inner else 0 for d, n in sizes.items()}
    return Product(left, right, sizes, more) if any(more.values()) else None


def _operand(v: Value, dims: tuple[str, str], rewrite: Rewrite) -> Operand | None:
    if v.tensor.is_row_major:
        return Operand(v, dims, False)
    turn = rewrite.maker(v, "t")
    base = turn.inputs()[0] if turn is not None else None
    return Operand(base, dims, True) if base is not None and base.tensor.is_row_major else None


def _padded(product: Product, eqn: Equation) -> Value:
    more, sizes = product.more, product.sizes
    if eqn.opname == "linear":
        bias = (*eqn.args, None)[2]
        if isinstance(bias, Value) and more[COLUMNS]:
            bias = aten.constant_pad_nd(bias, [0, more[COLUMNS]])
        y = aten.linear(product.left.matrix(more), product.right.matrix(more), bias)
    else:
        y = aten.mm(product.left.padded(more), product.right.padded(more))
        if more[ROWS]:
            y = aten.slice(y, 0, 0, sizes[ROWS])
    if not more[COLUMNS]:
        return y
    return aten.clone(aten.slice(y, y.ndim - 1, 0, sizes[COLUMNS]), memory_format=torch.contiguous_format)
