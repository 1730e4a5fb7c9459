"""Cross-entropy of a linear layer whose logits nothing else reads, as one operator and then in chunks of rows.

`linear_loss`, before differentiation. In: a trace. Out: the same program, where `cross_entropy(linear(x, w))` over
large logits, all in one grad mode, is one `tessera.linear_loss`.

`chunk_loss`, after it. In: a trace that may hold `tessera.linear_loss_grads`. Out: that operator in terms of PyTorch's,
a chunk of rows at a time: logits, then losses and the logits' gradient in one go (a kernel reads the logits once and
writes the gradient), then the products that give dx and dw. No more than a chunk of logits is ever there, and never in
single precision if the model is not.
"""

from __future__ import annotations

import functools
import math

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.views import RESHAPES
from tessera.ops.families import cast
from tessera.ops.linear_loss import LINEAR_LOSS, LINEAR_LOSS_GRADS
from tessera.passes.patterns.align import ALIGNED

LARGE = 32 * 2**20  # bytes of logits that are worth the trouble
CHUNK = 256 * 2**20  # bytes of logits to hold at a time
FEW = 4  # chunks: so often the weight's gradient is rounded to its own type without harm, and read and written again
MOST = 2**30  # bytes of logits to hold at a time rather than more chunks than that
ROWS = 64  # a multiple of so many classes, where their number is padded at all
DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # gradients without the loss's scale may underflow in float16
_BETWEEN = RESHAPES | {"_to_copy", "to", "float", "contiguous", "alias"}
MEAN, SUM = 1, 2


def linear_loss(trace: Trace) -> Trace:
    """One operator for a loss and the linear layer before it, where the logits are large and end there."""
    if not any(map(_is_loss, trace.equations)):
        return trace
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        layer = _layer(eqn, rewrite) if _is_loss(eqn) else None
        if layer is not None:
            rewrite.replace(eqn, functools.partial(_joined, layer))
    return rewrite.finish()


def _is_loss(eqn: Equation) -> bool:
    return eqn.opname == "cross_entropy_loss"


def _layer(eqn: Equation, rewrite: Rewrite) -> Equation | None:
    """The linear layer whose logits go into this loss and nowhere else. All that leads there has the loss's tags: what
    ran under no_grad, or in a region of its own to be run again, is no part of one operator with it."""
    (logits, target, weight, reduction, _, smoothing), _ = eqn.bound()
    plain = weight is None and reduction in (MEAN, SUM) and smoothing == 0.0
    if not plain or logits.ndim != 2 or target.ndim != 1 or target.dtype != torch.int64:  # type: ignore[union-attr]
        return None
    v = logits
    while isinstance(v, Value) and rewrite.reader(v) is not None and v in rewrite.makers:
        maker = rewrite.makers[v]
        if maker.tags != eqn.tags:
            return None
        if maker.opname == "linear":
            return maker if _large(maker, logits) else None  # type: ignore[arg-type]
        if maker.opname not in _BETWEEN or not v.tensor.is_float:
            return None
        v = maker.inputs()[0]
    return None


def _large(layer: Equation, logits: Value) -> bool:
    out = layer.out.tensor
    static = all(type(n) is int for v in layer.inputs() for n in v.shape)
    same = static and logits.shape[-1] == out.shape[-1] and logits.tensor.numel() == out.numel()
    wide = torch.promote_types(out.dtype, torch.float32)
    exact = logits.dtype in (out.dtype, wide)
    return same and exact and out.dtype in DTYPES and out.nbytes() >= LARGE


def _joined(layer: Equation, eqn: Equation) -> Value:
    positional, _ = eqn.bound()
    (x, w, bias), _ = layer.bound()
    rows = x if x.ndim == 2 else aten.reshape(x, [-1, x.shape[-1]])  # type: ignore[union-attr]
    loss = emit(LINEAR_LOSS, rows, w, bias, positional[1], positional[3] == MEAN, positional[4])
    assert isinstance(loss, Value)
    return cast(loss, eqn.out.dtype)


# --- after differentiation ---------------------------------------------------------------------------------


def chunk_loss(trace: Trace) -> Trace:
    """`linear_loss_grads` written out, a chunk of rows at a time."""
    if not any(eqn.op is LINEAR_LOSS_GRADS for eqn in trace.equations):
        return trace
    rewrite = Rewrite(trace)
    wanted = {*rewrite.results, *rewrite.users}
    for eqn in rewrite:
        if eqn.op is LINEAR_LOSS_GRADS:
            read = eqn.with_(outputs=tuple(v if v in wanted else None for v in eqn.outputs))
            rewrite.replace(read, _in_chunks)
    return rewrite.finish()


def _in_chunks(eqn: Equation) -> list[Value | None]:
    return _Chunks(*eqn.args, wanted=[v is not None for v in eqn.outputs]).run()  # type: ignore[arg-type]


def padded(weight: Value) -> bool:
    """Whether rows of logits would not be whole pieces of 16 bytes, as a GPU's matrix units want them."""
    return weight.tensor.device.type == "cuda" and weight.dtype.itemsize * int(weight.shape[0]) % ALIGNED != 0


def chunks(size: int) -> int:
    """How many there are for so many bytes of logits. Every chunk reads and writes all of the weight's gradient, so few
    large ones are faster than many small ones."""
    return max(min(math.ceil(size / CHUNK), FEW), math.ceil(size / MOST), 1)


class _Chunks:
    def __init__(
        self, x: Value, w: Value, bias: Value | None, target: Value, mean: bool, ignore: int, wanted: list[bool]
    ) -> None:
        self.x, self.target, self.ignore = x, target, ignore
        self.given, self.wanted = (w, bias), wanted
        self.classes = int(w.shape[0])
        self.w, self.bias = self.aligned(w), None if bias is None else self.aligned(bias)
        self.wide = torch.promote_types(x.dtype, torch.float32)
        used = aten._to_copy(aten.ne(target, ignore), dtype=self.wide)
        self.total = aten.sum(used) if mean else None
        # what a row's loss counts for; a row that is ignored counts for nothing even where all of them are
        self.factor = used if self.total is None else aten.where(aten.ne(used, 0.0), aten.div(used, self.total), used)

    def run(self) -> list[Value | None]:
        rows = int(self.x.shape[0])
        count = chunks(rows * self.classes * self.x.dtype.itemsize)
        step = math.ceil(rows / count)
        loss: Value | None = None
        dw: Value | None = None
        db: Value | None = None
        dxs: list[Value] = []
        device = self.x.tensor.device
        for start in range(0, rows, step):
            x = aten.slice(self.x, 0, start, min(start + step, rows))
            part, d = self.logits(x, start, min(start + step, rows))
            loss = part if loss is None else aten.add(loss, part)
            if self.wanted[1]:
                dxs.append(aten.mm(d, self.w))
            if self.wanted[2]:
                dw = self.added(dw, d, x, count)
            if self.bias is not None and self.wanted[3]:
                # a product, since sums would all be fused into one kernel at the end, with every chunk held for it
                part = aten._to_copy(
                    aten.mv(aten.t(d), aten.full([d.shape[0]], 1.0, dtype=d.dtype, device=device)), dtype=self.wide
                )
                db = part if db is None else aten.add(db, part)
        loss = loss if self.total is None else aten.div(loss, self.total)
        dx = None if not dxs else dxs[0] if len(dxs) == 1 else aten.cat(dxs, 0)
        return [loss, dx, *(self.as_given(grad, like) for grad, like in zip((dw, db), self.given, strict=True))]

    def aligned(self, v: Value) -> Value:
        """With zeros for some more classes, if that pays. They are masked: no row is of them, they have no gradient."""
        return aten.constant_pad_nd(v, [*([0, 0] * (v.ndim - 1)), 0, -self.classes % ROWS]) if padded(v) else v

    def logits(self, x: Value, start: int, end: int) -> tuple[Value, Value]:
        """The loss of some rows, and the gradient with respect to their logits."""
        narrow = aten.linear(x, self.w, self.bias)
        column = aten.arange(self.w.shape[0], device=x.tensor.device)
        z = aten._to_copy(narrow, dtype=self.wide)
        if self.w is not self.given[0]:
            z = aten.where(
                aten.lt(column, self.classes), z, aten.full([], -math.inf, dtype=z.dtype, device=z.tensor.device)
            )
        target, factor = (aten.slice(v, 0, start, end) for v in (self.target, self.factor))
        label = aten.unsqueeze(aten.where(aten.ne(target, self.ignore), target, aten.zeros_like(target)), 1)
        top = aten.amax(z, [1], True)
        log = aten.add(aten.log(aten.sum(aten.exp(aten.sub(z, top)), [1], True)), top)
        picked = aten.squeeze(aten.sub(log, aten._to_copy(aten.gather(narrow, 1, label), dtype=self.wide)), 1)
        loss = aten.sum(aten.where(aten.ne(target, self.ignore), picked, aten.zeros_like(picked)))
        here = aten.eq(column, label)
        share = aten.sub(aten.exp(aten.sub(z, log)), aten._to_copy(here, dtype=self.wide))
        d = aten.mul(share, aten.unsqueeze(factor, 1))
        return loss, aten._to_copy(d, dtype=self.x.dtype)

    def added(self, dw: Value | None, d: Value, x: Value, count: int) -> Value:
        """One more chunk's part of dw; sums over many chunks are kept in single precision."""
        turned, cuda = aten.t(d), self.x.tensor.device.type == "cuda"
        if count == 1 or self.w.dtype == self.wide or (cuda and count <= FEW):
            return aten.mm(turned, x) if dw is None else aten.addmm(dw, turned, x)
        if cuda:  # the library adds narrow products to a wide sum
            return aten.mm(turned, x, self.wide) if dw is None else aten.addmm(dw, turned, x, self.wide)
        part = aten._to_copy(aten.mm(turned, x), dtype=self.wide)
        return part if dw is None else aten.add(dw, part)

    def as_given(self, grad: Value | None, like: Value | None) -> Value | None:
        if grad is None or like is None:
            return grad
        own = grad if grad.shape[0] == like.shape[0] else aten.slice(grad, 0, 0, self.classes)
        return cast(own, like.dtype)
