"""What `tessera bench kernels` computes: functions as users write them, their inputs, and the bytes they must move.

A `Case` is one function at several sizes. `bytes` are those that a perfect kernel moves: every input read once, every
result written once, and in the backward pass the cotangents, the values it needs, and the gradients. They are counted
from the tensors themselves, so the same case serves every device and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = tuple[Tensor, ...]
Size = tuple[int, ...]
Counted = Callable[[Sequence[int], Sequence[int]], int]  # bytes of inputs and of results -> bytes moved


@dataclass(frozen=True)
class Case:
    """`back` counts the bytes of the backward pass; without it there is none to measure."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Callable[[Size, torch.dtype, str], Inputs]
    sizes: tuple[Size, ...]  # of the full run
    quick: tuple[Size, ...]
    small: Size  # for a CPU
    back: Counted | None = None
    grads: int = 0  # how many inputs, from the first, get gradients
    flops: Callable[[Size], float] | None = None  # of the matrix product, where there is one
    random: bool = False  # eager gives other numbers each time

    def forward_bytes(self, inputs: Inputs, results: Inputs) -> int:
        return sum(map(nbytes, inputs)) + sum(map(nbytes, results))

    def backward_bytes(self, inputs: Inputs, results: Inputs) -> int:
        assert self.back is not None
        return self.back([nbytes(x) for x in inputs], [nbytes(y) for y in results])


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def results_of(output: Tensor | tuple[Tensor, ...]) -> Inputs:
    return output if isinstance(output, tuple) else (output,)


# --- inputs -----------------------------------------------------------------------------------------------


def _like(*shapes: Callable[[Size], Size]) -> Callable[[Size, torch.dtype, str], Inputs]:
    """Normal numbers in shapes that follow from the size."""

    def make(size: Size, dtype: torch.dtype, device: str) -> Inputs:
        return tuple(torch.randn(shape(size), dtype=dtype, device=device) for shape in shapes)

    return make


def _all(size: Size) -> Size:
    return size


def _row(size: Size) -> Size:
    return size[-1:]


def _logits(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    return torch.randn(size, dtype=dtype, device=device), torch.randint(size[1], size[:1], device=device)


def _images(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """With channels last."""
    return (torch.randn(size, dtype=dtype, device=device).to(memory_format=torch.channels_last),)


def _linear(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    m, n, k = size
    scale = 1 / math.sqrt(k)
    return (
        torch.randn(m, k, dtype=dtype, device=device),
        torch.randn(n, k, dtype=dtype, device=device) * scale,
        torch.randn(n, dtype=dtype, device=device),
    )


def _matrices(*of: str) -> Callable[[Size, torch.dtype, str], Inputs]:
    """Matrices with sides named by letters of m, n and k, small enough that products stay near one."""

    def make(size: Size, dtype: torch.dtype, device: str) -> Inputs:
        sides = dict(zip("mnk", size, strict=True))
        shapes = [tuple(sides[letter] for letter in letters) for letters in of]
        return tuple(torch.randn(s, dtype=dtype, device=device) * s[-1] ** -0.25 for s in shapes)

    return make


# --- functions --------------------------------------------------------------------------------------------


def pointwise(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a * 2 + b) * torch.tanh(a - b) + a * 0.5


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def add_rms_norm(x: Tensor, rest: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + rest
    return h, F.rms_norm(h, h.shape[-1:], w, 1e-6)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()


def cross_entropy(x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x, targets)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def dropout_add(x: Tensor, rest: Tensor) -> Tensor:
    return F.dropout(x, DROPPED, training=True) + rest


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w, b))


def linear_residual(x: Tensor, w: Tensor, rest: Tensor) -> Tensor:
    return F.linear(x, w) + rest


def linear_swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def gqa_decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


DROPPED = 0.25

# --- the cases --------------------------------------------------------------------------------------------

POINTS = 2**26  # elements of the large matrices: far more than an L2 cache holds
ROWS = tuple((POINTS // n, n) for n in (512, 2048, 8192, 32768, 65536))
QUICK = ((16384, 4096),)
HEADS: Size = (2, 32, 4096, 128)
CUBES = ((4096, 4096, 4096), (8192, 8192, 8192))


def _case(name: str, function: Callable, make: Callable, back: Counted | None = None, grads: int = 0, **more) -> Case:  # noqa: ANN003
    sizes = {"sizes": ROWS, "quick": QUICK, "small": (1024, 1024)} | more
    return Case(name, function, make, back=back, grads=grads, **sizes)


CASES: tuple[Case, ...] = (
    # backward: the cotangent and what is needed of the inputs (i) and results (o), then the gradients
    _case("pointwise", pointwise, _like(_all, _all), lambda i, o: o[0] + 2 * sum(i), 2),
    _case("softmax", softmax, _like(_all), lambda i, o: 2 * o[0] + i[0], 1),
    _case("layer_norm", layer_norm, _like(_all, _row, _row), lambda i, o: o[0] + i[0] + i[1] + sum(i), 3),
    _case("rms_norm", rms_norm, _like(_all, _row), lambda i, o: o[0] + 2 * sum(i), 2),
    _case("add_rms_norm", add_rms_norm, _like(_all, _all, _row), lambda i, o: sum(o) + o[0] + i[0] + 2 * i[2], 3),
    _case("gelu", gelu, _like(_all), lambda i, o: o[0] + 2 * i[0], 1),
    _case("silu_mul", silu_mul, _like(_all, _all), lambda i, o: o[0] + 2 * sum(i), 2),
    _case("row_sum", row_sum, _like(_all)),
    _case("column_sum", column_sum, _like(_all)),
    _case("transpose", transpose, _like(_all), sizes=((8192, 8192), (65536, 1024)), quick=((8192, 8192),)),
    _case(
        "cross_entropy", cross_entropy, _logits, lambda i, o: 2 * i[0] + i[1] + o[0], 1,
        sizes=((8192, 32000), (8192, 128256)), quick=((8192, 32000),), small=(512, 8192),
    ),
    _case(
        "rotary", rotary, _like(_all, lambda s: s[2:], lambda s: s[2:]), lambda i, o: o[0] + sum(i), 1,
        sizes=(HEADS,), quick=(HEADS,), small=(1, 4, 256, 64),
    ),
    # the mask is made again from its seed: only the cotangent is read and one gradient written
    _case("dropout_add", dropout_add, _like(_all, _all), lambda i, o: o[0] + i[0], 2, random=True),
    _case(  # of images, as a ResNet begins; an offset of a byte a window is needed in between, and not counted
        "max_pool", max_pool, _images, lambda i, o: o[0] + i[0], 1,
        sizes=((128, 64, 112, 112), (64, 128, 56, 56)), quick=((128, 64, 112, 112),), small=(2, 16, 32, 32),
    ),
    _case(  # one query over a cache: four query heads share a key head
        "gqa_decode", gqa_decode, _like(lambda s: (s[0], 4 * s[1], 1, s[3]), _all, _all),
        sizes=((1, 8, 32768, 128), (8, 8, 8192, 128), (32, 8, 4096, 128)), quick=((8, 8, 8192, 128),),
        small=(1, 2, 256, 64),
    ),
    _case(
        "linear_gelu", linear_gelu, _linear, flops=lambda s: 2.0 * s[0] * s[1] * s[2],
        sizes=CUBES, quick=CUBES[:1], small=(64, 1024, 256),
    ),
    _case(
        "linear_silu", linear_silu, _matrices("mk", "nk", "n"), flops=lambda s: 2.0 * s[0] * s[1] * s[2],
        sizes=CUBES, quick=CUBES[:1], small=(64, 1024, 256),
    ),
    _case(
        "linear_residual", linear_residual, _matrices("mk", "nk", "mn"), flops=lambda s: 2.0 * s[0] * s[1] * s[2],
        sizes=CUBES, quick=CUBES[:1], small=(64, 1024, 256),
    ),
    _case(
        "linear_swiglu", linear_swiglu, _matrices("mk", "nk", "nk"), flops=lambda s: 4.0 * s[0] * s[1] * s[2],
        sizes=CUBES, quick=CUBES[:1], small=(64, 1024, 256),
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


# --- is it right? -----------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-11}


def cotangents(results: Inputs) -> Inputs:
    generator = torch.Generator(results[0].device).manual_seed(1)
    return tuple(torch.empty_like(y).normal_(generator=generator) for y in results)


def with_grads(case: Case, inputs: Inputs) -> Inputs:
    return tuple(x.detach().requires_grad_() if i < case.grads else x for i, x in enumerate(inputs))


def gradients(case: Case, function: Callable, inputs: Inputs) -> Inputs:
    """The results and then the gradients, from fixed cotangents."""
    arguments = with_grads(case, inputs)
    results = results_of(function(*arguments))
    grads = torch.autograd.grad(results, arguments[: case.grads], cotangents(results))
    return (*(y.detach() for y in results), *grads)


def mistake(case: Case, function: Callable, inputs: Inputs, backward: bool) -> str:
    """What a compiled function gets wrong, in words; empty if nothing. Eager in a wider dtype is the judge.

    A result may be as far from it as its dtype is coarse, or twice as far as eager is, measured against the largest
    element: sums over many rows round where they are large.
    """

    def run(f: Callable, arguments: Inputs) -> Inputs:
        return gradients(case, f, arguments) if backward else results_of(f(*arguments))

    with torch.set_grad_enabled(backward):
        got = run(function, inputs)
        if case.random:
            return _dropout_mistake(inputs, got)
        eager = run(case.function, inputs)
        wide = run(case.function, tuple(map(_wide, inputs)))
    for i, (g, e, w) in enumerate(zip(got, eager, wide, strict=True)):
        if g.dtype != e.dtype or g.shape != e.shape:
            return f"result {i}: expected {e.dtype} {tuple(e.shape)}, got {g.dtype} {tuple(g.shape)}"
        scale = w.abs().max().item()
        off, usual = ((x.to(w.dtype) - w).abs().max().item() for x in (g, e))
        if not off <= 2 * usual + TOLERANCE[g.dtype] * scale:
            return (
                f"result {i}: off by {off:.3g} where the largest element is {scale:.3g} and eager is off by {usual:.3g}"
            )
    return ""


def _wide(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.to(torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else torch.float64)


def _dropout_mistake(inputs: Inputs, got: Inputs) -> str:
    """Every element is dropped or scaled up, as many as they should be, and gradients agree with the results."""
    x, rest = (t.float() for t in inputs)
    kept = (got[0].float() - rest).abs() > (got[0].float() - rest - x / (1 - DROPPED)).abs()
    want = torch.where(kept, x / (1 - DROPPED), 0.0) + rest
    if not bool(((got[0].float() - want).abs() <= 4 * TOLERANCE[got[0].dtype] * (1 + want.abs())).all()):
        return "some elements are neither dropped nor scaled"
    if len(got) == 1:
        zero = x == 0
        share = 1 - (kept & ~zero).sum().item() / max((~zero).sum().item(), 1)
        return "" if abs(share - DROPPED) < 0.02 else f"expected {DROPPED:.0%} dropped, got {share:.1%}"
    (ct,) = cotangents(got[:1])
    sure = (x.abs() > 0.1) & (ct != 0)  # elsewhere rounding, or no cotangent, hides whether an element was kept
    agree = ((got[1] != 0) == kept)[sure].float().mean().item()
    return "" if agree > 0.999 else f"the gradient has another mask: {agree:.1%} agree"
